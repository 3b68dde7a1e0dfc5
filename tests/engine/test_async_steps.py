"""Steps that are left in flight while the next one is scheduled: the same tokens as steps that are waited for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lora_core.engine.ahead import AheadTokens, Landed, can_run_ahead
from lora_core.engine.engine import LLMEngine
from lora_core.engine.sampler import sample
from lora_core.engine.sampler_state import SamplerState
from lora_core.messages import GenerateRequest, SamplingParams
from lora_core.types import LoRAStatus
from tests.engine.answers import (
    PROMPTS,
    Answer,
    Answers,
    Names,
    ask,
    assert_nothing_left,
    finish,
    make_engine,
    peft_answers,
    step,
)

Start = Callable[..., LLMEngine]
Reference = Callable[[str | None, int], list[int]]

MIX = [None, "rslora-r8", "linear-r4", None, "attention-r2", "linear-r4", "attention-r2", "rslora-r8"]
SIZES = [12, 20, 3, 33, 7, 12, 1, 33]


@pytest.fixture(scope="module")
def reference(tiny_base: Path, tiny_adapters: Names) -> Reference:
    return peft_answers(tiny_base, tiny_adapters)


@pytest.fixture
def start(tiny_base: Path, tiny_adapters: Names) -> Iterator[Start]:
    """Start engines that run ahead; they must be idle, with nothing left behind, when the test ends."""
    engines: list[LLMEngine] = []

    def make(**options: Any) -> LLMEngine:
        adapters = options.pop("adapters", tiny_adapters)
        engines.append(make_engine(tiny_base, adapters, **{"async_scheduling": True, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        assert_nothing_left(engine)


def ask_all(engine: LLMEngine) -> None:
    for index, (name, size) in enumerate(zip(MIX, SIZES, strict=True)):
        ask(engine, str(index), name, size)


def assert_all(answers: Answers, reference: Reference) -> None:
    for index, (name, size) in enumerate(zip(MIX, SIZES, strict=True)):
        assert answers[str(index)] == Answer(reference(name, size), "length")


@pytest.mark.parametrize("max_num_batched_tokens", [1, 5, 512])
def test_a_mixed_batch_answers_as_each_request_alone(
    start: Start, reference: Reference, max_num_batched_tokens: int
) -> None:
    engine = start(max_num_batched_tokens=max_num_batched_tokens, slots=4)
    ask_all(engine)
    assert_all(finish(engine), reference)


def test_a_step_returns_the_tokens_of_the_one_before(start: Start) -> None:
    engine = start()
    ask(engine, "a", None, 7, max_tokens=3)
    assert [len(engine.step()) for _ in range(5)] == [0, 1, 1, 1, 0]


def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_looked_at(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    plain_wait = AheadTokens.wait
    engine = start()
    run = engine.runner.run

    def launch(*arguments: Any) -> Tensor:
        events.append("launch")
        return run(*arguments)

    def wait(tokens: AheadTokens) -> list[Landed]:
        events.append("wait")
        return plain_wait(tokens)

    monkeypatch.setattr(engine.runner, "run", launch)
    monkeypatch.setattr(AheadTokens, "wait", wait)
    ask(engine, "a", None, 7, max_tokens=3)
    finish(engine)
    assert events == ["launch", "launch", "wait", "launch", "wait", "wait"]


@pytest.mark.parametrize("block_size", [1, 4, 6])
def test_preempted_requests_answer_as_ever(start: Start, reference: Reference, block_size: int) -> None:
    engine = start(kv_cache_tokens=96, block_size=block_size, max_num_batched_tokens=24, slots=4)
    ask_all(engine)
    answers = finish(engine)
    assert engine.preemption_counts[0], "the cache was never too small"
    assert_all(answers, reference)


def test_turns_of_adapters_in_one_slot_answer_as_ever(start: Start, reference: Reference) -> None:
    now_s = 0.0
    engine = start(slots=1, max_slot_wait_s=0.3, clock=lambda: now_s)
    ask_all(engine)
    answers: Answers = {}
    while engine.has_work():
        step(engine, answers)
        now_s += 0.05
    assert engine.preemption_counts[1], "no adapter had to give its slot up"
    assert_all(answers, reference)


def test_aborting_neighbours_changes_nothing(start: Start, reference: Reference) -> None:
    engine = start(max_num_batched_tokens=16, slots=4)
    ask_all(engine)
    answers: Answers = {}
    for index in (1, 4, 6, 3):
        engine.abort(str(index))
        engine.check_invariants()
        sent = len(answers.get(str(index), Answer()).tokens)
        for _ in range(2):
            step(engine, answers)
        assert len(answers.get(str(index), Answer()).tokens) == sent
    finish(engine, answers)
    for index in (0, 2, 5, 7):
        assert answers[str(index)] == Answer(reference(MIX[index], SIZES[index]), "length")


def test_an_answer_that_ends_early_frees_its_blocks_though_its_next_token_is_on_the_way(
    start: Start, reference: Reference
) -> None:
    """The row of the ended request is still computed once; its blocks go to others at once."""
    end = reference(None, 12)[4]
    engine = start(kv_cache_tokens=48, block_size=4, slots=4)
    for index in range(6):
        ask(engine, str(index), None, 12, stop_token_ids=(end,))
    answers = finish(engine)
    expected = reference(None, 12)[: reference(None, 12).index(end) + 1]
    assert all(answers[str(index)] == Answer(expected, "stop") for index in range(6))


def test_blocks_are_shared_once_their_tokens_are_known(start: Start, reference: Reference) -> None:
    engine = start(block_size=4)
    answers: Answers = {}
    ask(engine, "first", "linear-r4", 20)
    finish(engine, answers)
    text = [*PROMPTS[20], *reference("linear-r4", 20)]
    engine.add_request(GenerateRequest("second", text, SamplingParams(max_tokens=1, temperature=0), "linear-r4"))
    deltas = [delta for _ in range(4) for delta in engine.step()]
    # 33 of the first answer's 34 tokens were computed: 8 whole blocks of 4.
    assert deltas[0].num_cached_tokens == 32


def test_requests_that_need_their_tokens_on_the_host_are_not_run_ahead(start: Start, reference: Reference) -> None:
    engine, plain = start(), start(async_scheduling=False)
    for one in (engine, plain):
        ask(one, "greedy", "linear-r4", 12)
        ask(one, "penalised", None, 12, frequency_penalty=1.5)
        ask(one, "seeded", "rslora-r8", 12, temperature=0.8, seed=3)
    found, expected = finish(engine), finish(plain)
    assert found == expected
    assert found["greedy"].tokens == reference("linear-r4", 12)


def test_a_request_that_needs_the_host_joins_and_leaves(start: Start, reference: Reference) -> None:
    engine = start()
    answers: Answers = {}
    ask(engine, "greedy", "linear-r4", 12)
    step(engine, answers)
    step(engine, answers)
    ask(engine, "penalised", None, 12, max_tokens=3, presence_penalty=0.5)
    finish(engine, answers)
    assert answers["greedy"].tokens == reference("linear-r4", 12)
    assert len(answers["penalised"].tokens) == 3


@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05, "top_k": 40}])
def test_seeds_give_the_same_tokens(start: Start, sampling: dict[str, Any]) -> None:
    answers = []
    for runs_ahead in (True, False):
        engine = start(async_scheduling=runs_ahead)
        for seed in (1, 2, 3):
            ask(engine, str(seed), "linear-r4", 7, temperature=1.3, seed=seed, **sampling)
        answers.append(finish(engine))
    assert answers[0] == answers[1]
    assert len({tuple(answer.tokens) for answer in answers[0].values()}) == 3


def test_logits_that_are_not_finite_end_their_request_only(start: Start, reference: Reference) -> None:
    engine = start(slots=4)
    run = engine.runner.run
    rows: list[str] = []

    def spoil(batch: Any, *flight: Any) -> Tensor:
        logits = run(batch, *flight).clone()
        sampling = [row.request.request_id for row in batch.rows if row.samples]
        for place, request_id in enumerate(sampling):
            if request_id in ("0", "1") and len(rows) >= 4:
                logits[place, 5] = float("nan")
        rows.append(str(sampling))
        return logits

    engine.runner.run = spoil  # type: ignore[method-assign, assignment]
    ask_all(engine)
    # Of those that are drawn, the distribution itself would be none.
    ask(engine, "drawn", None, 7, temperature=1.0, top_p=0.5)
    answers = finish(engine)
    for request_id in ("0", "1"):
        assert answers[request_id].reason == "error"
        assert "not finite" in str(answers[request_id].error)
    for index in range(2, 8):
        assert answers[str(index)] == Answer(reference(MIX[index], SIZES[index]), "length")


def test_an_unloaded_adapter_finishes_its_requests(start: Start, reference: Reference) -> None:
    engine = start(slots=1)
    answers: Answers = {}
    ask(engine, "a", "linear-r4", 12)
    step(engine, answers)
    step(engine, answers)
    assert engine.manager.unload_adapter("linear-r4").status is LoRAStatus.SUCCESS
    ask(engine, "b", "rslora-r8", 12)
    finish(engine, answers)
    assert answers["a"].tokens == reference("linear-r4", 12)
    assert answers["b"].tokens == reference("rslora-r8", 12)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    kv_cache_tokens=st.sampled_from([48, 96, 200]),
    block_size=st.sampled_from([1, 4, 7]),
    max_num_batched_tokens=st.sampled_from([3, 16, 64]),
    slots=st.integers(1, 3),
)
def test_any_schedule_gives_the_references_tokens(
    data: st.DataObject,
    kv_cache_tokens: int,
    block_size: int,
    max_num_batched_tokens: int,
    slots: int,
    start: Start,
    reference: Reference,
) -> None:
    engine = start(
        kv_cache_tokens=kv_cache_tokens,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        slots=slots,
        max_slot_wait_s=0.0,
    )
    answers: Answers = {}
    asked: dict[str, tuple[str | None, int, int]] = {}
    aborted: set[str] = set()
    for turn in range(data.draw(st.integers(3, 14))):
        action = data.draw(st.sampled_from(["ask", "ask", "step", "abort", "serial"]))
        request_id = f"r{turn}"
        if action == "abort" and asked:
            victim = data.draw(st.sampled_from(sorted(asked)))
            engine.abort(victim)
            aborted.add(victim)
        elif action in ("ask", "serial"):
            name, size = data.draw(st.sampled_from(list(zip(MIX, SIZES, strict=True))))
            count = data.draw(st.integers(1, 14))
            # A penalty of nothing changes nothing, and is looked at on the host.
            options = {"repetition_penalty": 1.0 + 1e-7} if action == "serial" else {}
            ask(engine, request_id, name, size, max_tokens=count, **options)
            asked[request_id] = name, size, count
        step(engine, answers)
    finish(engine, answers)
    for request_id, (name, size, count) in asked.items():
        if request_id not in aborted:
            assert answers[request_id] == Answer(reference(name, size)[:count], "length")
    assert_nothing_left(engine)


# Tokens that are chosen on the device


def states(sampling: list[SamplingParams]) -> list[SamplerState]:
    return [SamplerState.start(params, [1], frozenset()) for params in sampling]


@pytest.mark.parametrize("vocab_size", [50, 300, 5000])
def test_tokens_chosen_ahead_are_those_chosen_at_once(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(24, vocab_size, generator=generator) * 2
    # Wide distributions, some of which keep more than is looked at first.
    logits[12:] *= 0.05
    kinds: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.02}, {"temperature": 0.0}]
    kinds.append({"top_p": 0.5, "top_k": 200})
    sampling = [SamplingParams(**{"temperature": 0.9, **kinds[row % 6]}) for row in range(24)]
    logits[7, 3] = float("inf")
    logits[4, 3] = float("nan")
    chosen = sample(logits.clone(), sampling, states(sampling), torch.Generator().manual_seed(9))
    # Rows that are not finite take no number there, and one here.
    rows = [row for row in range(24) if row not in (4, 7)]
    some, params = logits[rows], [sampling[row] for row in rows]
    chosen = sample(some.clone(), params, states(params), torch.Generator().manual_seed(9))
    ahead = AheadTokens(some, params, states(params), torch.Generator().manual_seed(9))
    landed = ahead.wait()
    assert [one.token_id for one in landed] == [choice.token_id for choice in chosen if choice is not None]
    wrong = [row for row, one in enumerate(landed) if one.was_wrong]
    assert bool(wrong) == (vocab_size == 5000)
    for row, one in enumerate(landed):
        assert (int(ahead.inputs[row]) == one.token_id) != one.was_wrong
    spoiled = AheadTokens(logits, sampling, states(sampling), torch.Generator().manual_seed(9))
    assert [row for row, one in enumerate(spoiled.wait()) if one.token_id is None] == [4, 7]
    assert spoiled.inputs[[4, 7]].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"temperature": 0.0, "seed": 1}, True),
        ({"top_p": 0.9}, True),
        ({"seed": 1}, True),
        ({"seed": 1, "top_k": 50, "top_p": 0.9}, True),
        ({"seed": 1, "top_p": 0.9}, False),
        ({"logprobs": 0}, False),
        ({"prompt_logprobs": 0}, False),
        ({"presence_penalty": 0.1}, False),
        ({"logit_bias": ((3, 1.0),)}, False),
        ({"min_tokens": 2, "stop_token_ids": (3,)}, False),
    ],
)
def test_what_can_run_ahead(fields: dict[str, Any], expected: bool) -> None:
    params = SamplingParams(**fields)
    assert can_run_ahead(params, SamplerState.start(params, [1], frozenset()), vocab_size=5000) is expected


def test_a_token_that_was_wrong_is_taken_back(
    start: Start, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    """The device has another token now and then: what follows from it counts for nothing."""
    plain_start, plain_wait = AheadTokens.__init__, AheadTokens.wait
    made = 0

    def begin(tokens: AheadTokens, *arguments: Any) -> None:
        nonlocal made
        made += 1
        plain_start(tokens, *arguments)
        tokens.is_spoiled = made % 3 == 0  # type: ignore[attr-defined]
        if tokens.is_spoiled:  # type: ignore[attr-defined]
            tokens.inputs = torch.zeros_like(tokens.inputs)

    def wait(tokens: AheadTokens) -> list[Landed]:
        landed = plain_wait(tokens)
        return [Landed(token, tokens.is_spoiled and bool(token)) for token, _ in landed]  # type: ignore[attr-defined]

    monkeypatch.setattr(AheadTokens, "__init__", begin)
    monkeypatch.setattr(AheadTokens, "wait", wait)
    engine = start(block_size=4, kv_cache_tokens=200, max_num_batched_tokens=24, slots=4)
    ask_all(engine)
    assert_all(finish(engine), reference)
    assert made > 10
