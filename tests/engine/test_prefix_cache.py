"""The prefix cache on a tiny Llama: answers are those of PEFT whatever was computed before, and by which weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lora_core.engine.engine import LLMEngine
from lora_core.engine.request import ScheduledBatch
from lora_core.messages import GenerateRequest, SamplingParams
from lora_core.types import LoRAStatus
from tests.engine.answers import Answer, Answers, Names, assert_nothing_left, finish, make_engine, step
from tests.factories import make_adapter, reference_model

NUM_TOKENS = 10
NEAR_TIE = 1e-3
# Texts that share their first 24 tokens, and beginnings of them.
COMMON = [(7 + place * 29) % 128 for place in range(24)]
TEXTS = {
    f"{letter}{length}": (COMMON + [(place * factor + 3) % 128 for place in range(24)])[:length]
    for letter, factor in (("p", 13), ("q", 37))
    for length in (1, 8, 16, 17, 24, 32, 39, 45)
    if letter == "p" or length > 24
}

Start = Callable[..., LLMEngine]
Reference = Callable[[str | None, str], list[int]]


@pytest.fixture(scope="module")
def adapters(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Names:
    folder = tmp_path_factory.mktemp("prefix-adapters")
    return {name: make_adapter(tiny_base, folder / name, r=4, seed=seed) for seed, name in enumerate("abcd", 40)}


@pytest.fixture(scope="module")
def reference(tiny_base: Path, adapters: Names) -> Reference:
    """The answer of PEFT (or of transformers for None) to one of TEXTS."""
    models = {name: reference_model(tiny_base, adapters.get(name or "")) for name in (None, *adapters)}
    known: dict[tuple[str | None, str], list[int]] = {}

    @torch.inference_mode()
    def answer(name: str | None, text: str) -> list[int]:
        if (name, text) not in known:
            token_ids = list(TEXTS[text])
            for _ in range(NUM_TOKENS):
                best = models[name](input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1].topk(2)
                assert best.values[0] - best.values[1] > NEAR_TIE, f"{name}, {text}: a near tie"
                token_ids.append(int(best.indices[0]))
            known[name, text] = token_ids[len(TEXTS[text]) :]
        return known[name, text]

    return answer


@pytest.fixture
def start(tiny_base: Path, adapters: Names) -> Iterator[Start]:
    """Start engines, which must be idle, with nothing left behind, when the test ends."""
    engines: list[LLMEngine] = []

    def make(**settings: Any) -> LLMEngine:
        engines.append(
            make_engine(tiny_base, settings.pop("adapters", adapters), **{"block_size": 8, "slots": 4, **settings})
        )
        return engines[-1]

    yield make
    for engine in engines:
        assert_nothing_left(engine)


def ask(engine: LLMEngine, request_id: str, name: str | None, text: str, max_tokens: int = NUM_TOKENS) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    engine.add_request(GenerateRequest(request_id, TEXTS[text], sampling, name))


def answer_alone(engine: LLMEngine, name: str | None, text: str) -> tuple[list[int], int]:
    """An answer, and how many prompt tokens were in the cache."""
    ask(engine, "alone", name, text)
    tokens: list[int] = []
    cached = []
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta.error
            tokens += delta.token_ids
            cached.append(delta.num_cached_tokens)
        engine.check_invariants()
    assert cached[1:] == [0] * (NUM_TOKENS - 1), "told with the first token only"
    return tokens, cached[0]


# Hits


@pytest.mark.parametrize("name", [None, "a"])
def test_a_text_that_was_computed_is_not_computed_again_but_for_its_last_token(
    start: Start, reference: Reference, name: str | None
) -> None:
    engine = start()
    hits = {"p1": 0, "p17": 0, "p16": 8, "p24": 16, "p39": 24, "q39": 24, "p45": 32, "p8": 0}
    for text, num_cached in hits.items():
        assert answer_alone(engine, name, text) == (reference(name, text), num_cached), text
    # All of a text but what its last block holds, one token at least.
    for text in hits:
        assert answer_alone(engine, name, text) == (reference(name, text), (len(TEXTS[text]) - 1) // 8 * 8), text
    assert engine.prefix_cache_counts == (
        2 * sum(len(TEXTS[text]) for text in hits),
        sum(hits.values()) + sum((len(TEXTS[text]) - 1) // 8 * 8 for text in hits),
    )


def test_answers_are_found_too(start: Start) -> None:
    engine = start()
    tokens, _ = answer_alone(engine, "a", "p24")
    again = SamplingParams(max_tokens=1, temperature=0.0)
    engine.add_request(GenerateRequest("again", TEXTS["p24"] + tokens, again, "a"))
    (delta,) = engine.step()
    # The last token of the answer was never computed; the first 33 of 34 were, in four blocks.
    assert delta.num_cached_tokens == 32


@pytest.mark.parametrize(("block_size", "max_num_batched_tokens"), [(3, 3), (16, 7), (1, 40), (8, 512)])
def test_everything_at_once_and_again_answers_as_each_alone(
    start: Start, reference: Reference, block_size: int, max_num_batched_tokens: int
) -> None:
    engine = start(block_size=block_size, max_num_batched_tokens=max_num_batched_tokens, slots=2, max_slot_wait_s=0.0)
    for _ in range(2):
        expected = {}
        for name in (None, "a", "b", "c"):
            for text in ("p17", "p39", "q32"):
                ask(engine, f"{name} {text}", name, text)
                expected[f"{name} {text}"] = Answer(reference(name, text), "length")
        assert finish(engine) == expected
    assert engine.prefix_cache_counts[1] > 0


def test_preempted_requests_take_up_what_they_had_computed(start: Start, reference: Reference) -> None:
    engine = start(kv_cache_tokens=64, max_num_batched_tokens=64)
    num_tokens = 0
    run = engine.runner.run

    def count(batch: ScheduledBatch) -> Tensor:
        nonlocal num_tokens
        num_tokens += batch.num_tokens
        return run(batch)

    engine.runner.run = count  # type: ignore[method-assign, assignment]
    names = (None, "a", "b", "c")
    for name in names:
        ask(engine, str(name), name, "p24")
    answers = finish(engine)
    num_preempted, _ = engine.preemption_counts
    assert num_preempted, "the cache was never too small"
    assert answers == {str(name): Answer(reference(name, "p24"), "length") for name in names}
    # Without hits, each preemption would cost the 24 tokens of a prompt and more.
    assert num_tokens < 4 * (24 + NUM_TOKENS - 1) + 24 * num_preempted


def test_aborting_one_of_two_that_share_blocks_leaves_the_other_alone(start: Start, reference: Reference) -> None:
    engine = start()
    answer_alone(engine, "a", "p39")
    for request_id, text in (("stays", "q39"), ("goes", "p39"), ("stays too", "p45")):
        ask(engine, request_id, "a", text)
    answers: Answers = {}
    step(engine, answers)
    engine.abort("goes")
    engine.check_invariants()
    # Takes what the aborted one has left.
    ask(engine, "other", "b", "p45")
    finish(engine, answers)
    assert answers["stays"].tokens == reference("a", "q39")
    assert answers["stays too"].tokens == reference("a", "p45")
    assert answers["other"].tokens == reference("b", "p45")


def test_the_least_recently_used_blocks_go_first_and_ends_before_beginnings(start: Start) -> None:
    engine = start(kv_cache_tokens=96)
    answer_alone(engine, "a", "p32")
    answer_alone(engine, None, "p32")
    # 42 tokens have five full blocks; two texts have ten of twelve, and the third takes those of the first.
    answer_alone(engine, "b", "p17")
    assert answer_alone(engine, None, "p32")[1] == 24
    assert answer_alone(engine, "a", "p32")[1] < 24


# Whose tokens


def test_one_text_of_one_adapter_is_nothing_to_another_or_to_the_base(
    start: Start, adapters: Names, reference: Reference
) -> None:
    engine = start()
    for name in (None, *adapters):
        assert answer_alone(engine, name, "p39") == (reference(name, "p39"), 0)
    assert len({tuple(reference(name, "p39")) for name in (None, *adapters)}) == 5


def test_an_adapter_reloaded_in_place_answers_by_its_new_weights(
    start: Start, adapters: Names, reference: Reference
) -> None:
    engine = start(adapters={"x": adapters["a"]})
    for folder in ("a", "b", "a"):
        response = engine.manager.load_adapter(f"x={adapters[folder]}", replace=True)
        assert response.status is LoRAStatus.SUCCESS
        assert answer_alone(engine, "x", "p39") == (reference(folder, "p39"), 0)
        assert answer_alone(engine, "x", "p39") == (reference(folder, "p39"), 32)


def test_a_reload_under_a_request_leaves_each_its_own_weights(
    start: Start, adapters: Names, reference: Reference
) -> None:
    engine = start(adapters={"x": adapters["a"]})
    answers: Answers = {}
    ask(engine, "old", "x", "p39")
    step(engine, answers)
    engine.manager.load_adapter(f"x={adapters['b']}", replace=True)
    ask(engine, "new", "x", "p39")
    finish(engine, answers)
    assert answers["old"].tokens == reference("a", "p39")
    assert answers["new"].tokens == reference("b", "p39")


def test_an_adapter_that_was_unloaded_and_loaded_again_starts_anew(
    start: Start, adapters: Names, reference: Reference
) -> None:
    engine = start(adapters={"x": adapters["a"]})
    answer_alone(engine, "x", "p39")
    engine.manager.unload_adapter("x")
    engine.manager.load_adapter(f"x={adapters['a']}")
    assert answer_alone(engine, "x", "p39") == (reference("a", "p39"), 0)


def test_what_an_adapter_computed_before_it_is_reset_is_not_used_again(start: Start, reference: Reference) -> None:
    """Its slot is under suspicion, and so is what came of it."""
    engine = start()
    for name in ("a", "b", None):
        answer_alone(engine, name, "p39")
    engine.reset_adapter("a", "no token for 60 s")
    engine.check_invariants()
    assert answer_alone(engine, "a", "p39") == (reference("a", "p39"), 0)
    assert answer_alone(engine, "b", "p39") == (reference("b", "p39"), 32)
    assert answer_alone(engine, None, "p39") == (reference(None, "p39"), 32)


def test_an_adapter_that_lost_its_slot_keeps_what_it_computed(start: Start, reference: Reference) -> None:
    engine = start(slots=1)
    answer_alone(engine, "a", "p39")
    answer_alone(engine, "b", "p39")
    assert not engine.manager.is_active_lora("a")
    assert answer_alone(engine, "a", "p39") == (reference("a", "p39"), 32)


def test_blocks_of_an_adapter_that_is_gone_go_before_those_of_others(start: Start, adapters: Names) -> None:
    engine = start(kv_cache_tokens=96, adapters={"x": adapters["a"]})
    answer_alone(engine, None, "p32")
    answer_alone(engine, "x", "p32")
    engine.manager.unload_adapter("x")
    # Needs five blocks; two are empty, and the adapter's were used after the base's.
    assert answer_alone(engine, None, "q45")[1] == 24
    assert answer_alone(engine, None, "p32")[1] == 24


def test_base_requests_get_the_same_logits_bit_for_bit_with_lora_on(start: Start) -> None:
    logits: list[list[Tensor]] = []
    for slots in (0, 3):
        engine = start(slots=slots)
        logits.append([])
        run = engine.runner.run

        def record(batch: ScheduledBatch, run: Any = run, into: list[Tensor] = logits[-1]) -> Tensor:
            into.append(run(batch).clone())
            return into[-1]

        engine.runner.run = record  # type: ignore[method-assign, assignment]
        for text in ("p39", "q39", "p39"):
            answer_alone(engine, None, text)
    assert len(logits[0]) == 3 * NUM_TOKENS
    assert all(torch.equal(off, on) for off, on in zip(*logits, strict=True))


# What is not shared


def test_without_the_cache_nothing_is_shared(start: Start, reference: Reference) -> None:
    engine = start(enable_prefix_caching=False)
    for _ in range(2):
        assert answer_alone(engine, "a", "p39") == (reference("a", "p39"), 0)
    assert engine.prefix_cache_counts == (0, 0)


def test_a_step_that_failed_has_computed_nothing_that_is_shared(
    start: Start, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    ask(engine, "r", "a", "p39")
    with monkeypatch.context() as patch:

        def fail(batch: ScheduledBatch) -> Tensor:
            raise RuntimeError("device lost")

        patch.setattr(engine.runner, "run", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
    engine.abort("r")
    engine.check_invariants()
    assert answer_alone(engine, "a", "p39") == (reference("a", "p39"), 0)


def test_what_gave_logits_that_are_not_finite_is_not_shared(
    start: Start, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    ask(engine, "broken", "a", "p39")
    with monkeypatch.context() as patch:
        run = engine.runner.run
        patch.setattr(engine.runner, "run", lambda batch: run(batch) * float("nan"))
        (delta,) = engine.step()
    assert delta.finish_reason == "error"
    assert answer_alone(engine, "a", "p39") == (reference("a", "p39"), 0)


def test_a_request_that_needs_the_whole_prompts_logits_computes_it(start: Start) -> None:
    engine = start()
    answer_alone(engine, "a", "p39")
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    engine.add_request(GenerateRequest("scored", TEXTS["p39"], sampling, "a"))
    (delta,) = engine.step()
    assert delta.num_cached_tokens == 0
    assert engine.prefix_cache_counts == (39, 0)


def test_a_request_that_can_never_fit_is_refused_whatever_is_cached(start: Start, reference: Reference) -> None:
    engine = start(kv_cache_tokens=56)
    assert answer_alone(engine, "a", "p45") == (reference("a", "p45"), 0)
    ask(engine, "large", "a", "p45", max_tokens=12)
    (delta,) = engine.step()
    assert delta.error_type == "InvalidRequest"
    # As large as the cache, part of which it shares: it fits.
    ask(engine, "whole", "a", "p45", max_tokens=11)
    ask(engine, "beside", "b", "p17")
    answers = finish(engine)
    assert answers["whole"].tokens[:NUM_TOKENS] == reference("a", "p45")
    assert answers["beside"].tokens == reference("b", "p17")


# Anything at once

ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from([None, *"wxyz"]), st.sampled_from(sorted(TEXTS)), st.integers(1, 10)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("reload"), st.sampled_from("wxyz"), st.sampled_from("abcd")),
)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(ACTIONS, min_size=10, max_size=50),
    block_size=st.sampled_from([1, 4, 8]),
    kv_cache_tokens=st.sampled_from([64, 120, 400]),
    max_num_batched_tokens=st.sampled_from([3, 16, 100]),
    max_slot_wait_s=st.sampled_from([0.0, 0.02, 10.0]),
    max_loras_per_step=st.sampled_from([None, 1]),
)
def test_requests_that_share_beginnings_answer_exactly_under_any_traffic_and_reloads(
    tiny_base: Path, adapters: Names, reference: Reference, actions: list[tuple[Any, ...]], **settings: Any
) -> None:
    engine = make_engine(tiny_base, dict(zip("wxyz", adapters.values(), strict=True)), slots=2, **settings)
    weights = dict(zip("wxyz", adapters, strict=True))
    answers: Answers = {}
    expected: dict[str, list[int]] = {}
    for place, (action, *values) in enumerate(actions):
        if action == "add":
            name, text, max_tokens = values
            expected[str(place)] = reference(weights.get(name), text)[:max_tokens]
            ask(engine, str(place), name, text, max_tokens)
        elif action == "reload":
            name, weights[name] = values
            response = engine.manager.load_adapter(f"{name}={adapters[weights[name]]}", replace=True)
            assert response.status is LoRAStatus.SUCCESS
        elif action == "step":
            for _ in range(values[0]):
                step(engine, answers)
        elif expected:
            request_id = list(expected)[values[0] % len(expected)]
            if answers.get(request_id, Answer()).reason is None:
                engine.abort(request_id)
                del expected[request_id]
                answers.pop(request_id, None)
    finish(engine, answers)
    assert answers == {request_id: Answer(tokens, "length") for request_id, tokens in expected.items()}
    assert_nothing_left(engine)
