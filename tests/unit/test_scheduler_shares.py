"""What each adapter and the base model get of an engine that all of them ask for more than it has."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lora_core.engine.request import Request
from tests.unit.stepped_scheduler import SteppedScheduler

TOKENS = list(range(40, 56))


def keep_asking(engine: SteppedScheduler, names: list[str | None], steps: int, **asked: Any) -> Counter[str | None]:
    """Keep four requests of each name unfinished; how many of each finished."""
    for _ in range(steps):
        unfinished = Counter(name_of(request) for request in engine.live)
        for name in names:
            for _ in range(4 - unfinished[name]):
                engine.add(name, **asked)
        engine.step()
    return Counter(name_of(outcome.request) for outcome in finished(engine))


def finished(engine: SteppedScheduler) -> Iterator[Any]:
    for outcome in engine.outcomes.values():
        if outcome.finished_s is not None:
            engine.assert_exact(outcome.request)
            yield outcome


def name_of(request: Request) -> str | None:
    return None if request.adapter is None else request.adapter.name


@pytest.mark.parametrize(
    ("names", "num_slots"), [(["a", None], 1), (["a", "b", None], 1), (["a", "b", None], 2), (["a", "b", "c"], 3)]
)
@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"max_num_seqs": 1}, {"max_tokens": 5}),
        # No request runs for longer than a step, and only one starts in each.
        ({"max_num_seqs": 8, "share": False}, {"tokens": TOKENS, "max_tokens": 1}),
        ({"max_num_seqs": 3}, {"max_tokens": 5}),
    ],
)
def test_nobody_is_starved_where_one_request_runs_at_a_time(
    names: list[str | None], num_slots: int, settings: dict[str, Any], asked: dict[str, Any]
) -> None:
    engine = SteppedScheduler(num_slots=num_slots, checks=False, **settings)
    done = keep_asking(engine, names, 240, **asked)
    assert min(done[name] for name in names) >= 0.8 * max(done.values()) - 1


def test_the_base_model_is_not_starved_by_a_stream_of_new_adapters() -> None:
    engine = SteppedScheduler(num_slots=1, max_num_seqs=1)
    for step in range(240):
        if sum(request.adapter is None for request in engine.live) < 2:
            engine.add(None, max_tokens=5)
        if sum(request.adapter is not None for request in engine.live) < 2:
            engine.add(f"new {step}", max_tokens=5)
        engine.step()
    done = Counter(outcome.request.adapter is None for outcome in finished(engine))
    assert done[True] >= 0.25 * done.total()


def test_who_asks_for_long_answers_and_ends_them_early_pays_for_what_was_computed() -> None:
    engine = SteppedScheduler(num_slots=1, max_num_seqs=1, num_blocks=600)
    computed: Counter[str | None] = Counter()
    for _ in range(600):
        unfinished = Counter(name_of(request) for request in engine.live)
        for name, max_tokens in (("a", 2000), (None, 5)):
            for _ in range(4 - unfinished[name]):
                engine.add(name, max_tokens=max_tokens)
        batch = engine.step()
        for row in batch.rows:
            computed[name_of(row.request)] += row.num_tokens
            if row.request.sampling.max_tokens == 2000 and row.request.num_output_tokens == 5:
                engine.abort(row.request)
    assert computed["a"] == pytest.approx(computed[None], rel=0.05)


def test_text_that_is_found_in_the_cache_is_not_charged() -> None:
    engine = SteppedScheduler(num_slots=1, max_num_seqs=1, max_num_batched_tokens=64)
    for step in range(400):
        if sum(request.adapter is None for request in engine.live) < 2:
            engine.add(None, tokens=list(range(41)), max_tokens=4)
        if sum(request.adapter is not None for request in engine.live) < 2:
            engine.add("a", tokens=[step % 200], max_tokens=4)
        engine.step()
    done = Counter(name_of(outcome.request) for outcome in finished(engine))
    assert done[None] == pytest.approx(done["a"], abs=12)
