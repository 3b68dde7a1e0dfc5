"""The engine on a tiny Llama: greedy answers in fp32 are those of PEFT, token for token, whatever else is going on."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_core.engine.engine import LLMEngine
from lora_core.engine.request import ScheduledBatch
from lora_core.errors import ConfigError
from lora_core.messages import GenerateRequest
from lora_core.types import LoRAStatus
from tests.engine.answers import (
    NUM_TOKENS,
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
from tests.factories import make_adapter

Start = Callable[..., LLMEngine]
Reference = Callable[[str | None, int], list[int]]


@pytest.fixture(scope="module")
def adapters(tiny_base: Path, tiny_adapters: Names, tmp_path_factory: pytest.TempPathFactory) -> Names:
    """Six adapters."""
    folder = tmp_path_factory.mktemp("more-adapters")
    more = {f"more-r{r}": make_adapter(tiny_base, folder / f"more-r{r}", r=r, seed=10 + r) for r in (3, 6)}
    return {**tiny_adapters, **more}


@pytest.fixture(scope="module")
def reference(tiny_base: Path, adapters: Names) -> Reference:
    """The answer of PEFT (or of transformers for None) to one of PROMPTS."""
    return peft_answers(tiny_base, adapters)


@pytest.fixture
def start(tiny_base: Path, adapters: Names) -> Iterator[Start]:
    """Start engines, which must be idle, with nothing left behind, when the test ends."""
    engines: list[LLMEngine] = []

    def make(**settings: Any) -> LLMEngine:
        engines.append(make_engine(settings.pop("base", tiny_base), settings.pop("adapters", adapters), **settings))
        return engines[-1]

    yield make
    for engine in engines:
        assert_nothing_left(engine)


# Exact tokens


def test_the_references_differ_from_each_other(adapters: Names, reference: Reference) -> None:
    answers = [tuple(reference(name, 7)) for name in (None, *adapters)]
    assert len(set(answers)) == len(answers)


def test_each_adapter_alone_answers_as_peft_does(start: Start, adapters: Names, reference: Reference) -> None:
    engine = start()
    for name in (None, *adapters):
        for size in (1, 20):
            ask(engine, "r", name, size)
            answer = finish(engine)["r"]
            assert answer == Answer(reference(name, size), "length")


MIX = [None, "rslora-r8", "linear-r4", None, "attention-r2", "linear-r4", "attention-r2", "rslora-r8"]
SIZES = [12, 20, 3, 33, 7, 12, 1, 33]


@pytest.mark.parametrize("max_num_batched_tokens", [1, 5, 16, 64, 512])
def test_a_mixed_batch_answers_as_each_request_alone_at_any_chunk_size(
    start: Start, reference: Reference, max_num_batched_tokens: int
) -> None:
    engine = start(max_num_batched_tokens=max_num_batched_tokens)
    for index, (name, size) in enumerate(zip(MIX, SIZES, strict=True)):
        ask(engine, str(index), name, size)
    answers = finish(engine)
    for index, (name, size) in enumerate(zip(MIX, SIZES, strict=True)):
        assert answers[str(index)] == Answer(reference(name, size), "length")


@pytest.mark.parametrize("block_size", [1, 4, 6])
def test_preempted_requests_answer_as_ever(start: Start, reference: Reference, block_size: int) -> None:
    engine = start(kv_cache_tokens=96, block_size=block_size, max_num_batched_tokens=24)
    for index, (name, size) in enumerate(zip(MIX, SIZES, strict=True)):
        ask(engine, str(index), name, size)
    answers = finish(engine)
    num_preempted, _ = engine.preemption_counts
    assert num_preempted, "the cache was never too small"
    for index, (name, size) in enumerate(zip(MIX, SIZES, strict=True)):
        assert answers[str(index)] == Answer(reference(name, size), "length")


def test_aborting_neighbours_changes_nothing_and_nothing_more_is_sent_for_them(
    start: Start, reference: Reference
) -> None:
    engine = start(max_num_batched_tokens=16)
    for index, (name, size) in enumerate(zip(MIX, SIZES, strict=True)):
        ask(engine, str(index), name, size)
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
        for size in (3, 20):
            ask(engine, str(size), None, size)
        finish(engine)
    assert len(logits[0]) == NUM_TOKENS
    assert all(torch.equal(off, on) for off, on in zip(*logits, strict=True))


def test_adapters_that_come_and_go_leave_those_that_decode_alone(
    start: Start, adapters: Names, reference: Reference
) -> None:
    engine = start(slots=3)
    answers: Answers = {}
    names = list(adapters)
    for index, name in enumerate(names[:2]):
        ask(engine, f"steady-{index}", name, 12)
    for turn in range(8):
        name = names[2 + turn % 4]
        assert engine.manager.unload_adapter(name).status is LoRAStatus.SUCCESS
        assert engine.manager.load_adapter(f"{name}={adapters[name]}").status is LoRAStatus.SUCCESS
        ask(engine, f"passing-{turn}", name, 3, max_tokens=2)
        step(engine, answers)
    finish(engine, answers)
    for index, name in enumerate(names[:2]):
        assert answers[f"steady-{index}"].tokens == reference(name, 12)
    for turn in range(8):
        assert answers[f"passing-{turn}"].tokens == reference(names[2 + turn % 4], 3)[:2]


# Unloading


def test_an_unloaded_adapter_finishes_its_requests_running_and_queued(start: Start, reference: Reference) -> None:
    engine = start(slots=1, max_num_seqs=2)
    answers: Answers = {}
    for index in range(16):
        ask(engine, str(index), "linear-r4", 12)
    step(engine, answers)
    assert engine.manager.unload_adapter("linear-r4").status is LoRAStatus.SUCCESS
    ask(engine, "late", "linear-r4", 12)
    assert finish(engine, answers)["late"].error_type == "AdapterNotFound"
    assert all(answers[str(index)] == Answer(reference("linear-r4", 12), "length") for index in range(16))


def test_a_name_loaded_anew_has_its_new_weights_while_older_requests_keep_theirs(
    start: Start, adapters: Names, reference: Reference
) -> None:
    engine = start(slots=2, adapters={"x": adapters["linear-r4"]})
    answers: Answers = {}
    ask(engine, "old", "x", 12)
    step(engine, answers)
    ask(engine, "old-queued", "x", 7)
    engine.manager.unload_adapter("x")
    assert engine.manager.load_adapter(f"x={adapters['rslora-r8']}").status is LoRAStatus.SUCCESS
    ask(engine, "new", "x", 12)
    finish(engine, answers)
    assert answers["old"].tokens == reference("linear-r4", 12)
    assert answers["old-queued"].tokens == reference("linear-r4", 7)
    assert answers["new"].tokens == reference("rslora-r8", 12)


# What users do wrong


def test_refused_requests_are_answered_by_the_next_step_and_disturb_nobody(start: Start, reference: Reference) -> None:
    engine = start(kv_cache_tokens=64, max_model_len=128)
    ask(engine, "good", None, 7)
    ask(engine, "unknown", "nobody", 7)
    ask(engine, "negative", None, 7, top_p=-1.0)
    ask(engine, "bad-and-unknown", "nobody", 7, max_tokens=0)
    ask(engine, "large", "linear-r4", 33, max_tokens=32)
    ask(engine, "long", None, 33, max_tokens=96)
    engine.add_request(GenerateRequest("empty", []))
    assert engine.has_work()
    answers: Answers = {}
    step(engine, answers)
    assert {request_id: answer.error_type for request_id, answer in answers.items()} == {
        "good": None,
        "unknown": "AdapterNotFound",
        "negative": "InvalidRequest",
        "bad-and-unknown": "InvalidRequest",
        "large": "InvalidRequest",
        "long": "InvalidRequest",
        "empty": "InvalidRequest",
    }
    assert "'nobody'" in str(answers["unknown"].error)
    for request_id, words in (("large", ("65", "64", "kv_cache_tokens")), ("long", ("129", "128", "max_model_len"))):
        assert all(word in str(answers[request_id].error) for word in words)
    assert finish(engine, answers)["good"].tokens == reference(None, 7)


def test_an_id_in_use_is_refused_and_its_first_request_goes_on(start: Start, reference: Reference) -> None:
    engine = start()
    ask(engine, "same", "linear-r4", 7)
    engine.step()
    ask(engine, "same", "rslora-r8", 12)
    refused = [delta for delta in engine.step() if delta.error]
    assert [delta.error_type for delta in refused] == ["InvalidRequest"]
    assert "'same' is in use" in str(refused[0].error)
    tokens = finish(engine)["same"].tokens
    assert tokens == reference("linear-r4", 7)[2:]
    ask(engine, "same", "rslora-r8", 12)
    assert finish(engine)["same"].tokens == reference("rslora-r8", 12)


def test_with_lora_off_an_adapter_is_refused_as_disabled(start: Start, reference: Reference) -> None:
    engine = start(slots=0)
    ask(engine, "adapted", "linear-r4")
    ask(engine, "base", None)
    answers = finish(engine)
    assert answers["adapted"].error_type == "LoRADisabled"
    assert answers["base"].tokens == reference(None, 7)
    assert engine.ready().num_slots == 0


def test_an_abort_takes_back_a_refusal_and_unknown_ids_are_ignored(start: Start) -> None:
    engine = start()
    ask(engine, "refused", "nobody")
    engine.abort("refused")
    engine.abort("never heard of")
    assert not engine.has_work()


def test_an_adapter_whose_logits_overflow_fails_alone(
    start: Start, tiny_base: Path, adapters: Names, reference: Reference, tmp_path: Path
) -> None:
    broken = shutil.copytree(adapters["linear-r4"], tmp_path / "broken")
    weights = load_file(broken / "adapter_model.safetensors")
    save_file({key: tensor * 1e25 for key, tensor in weights.items()}, broken / "adapter_model.safetensors")
    engine = start(adapters={"broken": broken, "rslora-r8": adapters["rslora-r8"]}, kv_cache_tokens=96, block_size=8)
    answers: Answers = {}
    for index in range(4):
        ask(engine, f"broken-{index}", "broken", 12)
        ask(engine, f"good-{index}", "rslora-r8", 12)
        ask(engine, f"base-{index}", None, 7)
    finish(engine, answers)
    for index in range(4):
        failed = answers[f"broken-{index}"]
        assert failed.reason == "error"
        assert "'broken'" in str(failed.error)
        assert "not finite" in str(failed.error)
        # Their blocks, left full of NaN, went to others.
        assert answers[f"good-{index}"] == Answer(reference("rslora-r8", 12), "length")
        assert answers[f"base-{index}"] == Answer(reference(None, 7), "length")


# Faults of the engine itself


def test_a_fault_of_the_runner_leaves_step_and_loses_no_request(
    start: Start, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(max_num_batched_tokens=16)
    for index, (name, size) in enumerate(zip(MIX, SIZES, strict=True)):
        ask(engine, str(index), name, size)
    ask(engine, "refused", "nobody")
    run = engine.runner.run
    answers: Answers = {}
    for _ in range(3):
        with monkeypatch.context() as patch:

            def fail(batch: ScheduledBatch) -> Tensor:
                run(batch)
                raise RuntimeError("device lost")

            patch.setattr(engine.runner, "run", fail)
            with pytest.raises(RuntimeError, match="device lost"):
                engine.step()
            engine.check_invariants()
        step(engine, answers)
    finish(engine, answers)
    assert answers["refused"].error_type == "AdapterNotFound"
    for index, (name, size) in enumerate(zip(MIX, SIZES, strict=True)):
        assert answers[str(index)] == Answer(reference(name, size), "length")


def test_an_adapter_of_lora_paths_that_cannot_be_loaded_is_named_with_the_reason(
    tiny_base: Path, adapters: Names, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"gone=.*nowhere") as caught:
        make_engine(tiny_base, {**adapters, "gone": tmp_path / "nowhere"})
    assert "lora_paths" in str(caught.value)
    too_wide = make_adapter(tiny_base, tmp_path / "wide", r=9)
    with pytest.raises(ConfigError, match=r"wide=.*9.*8"):
        make_engine(tiny_base, {"wide": too_wide})


# Ends and choices


def ending_base(tiny_base: Path, folder: Path, **eos: Any) -> Path:
    """A copy of the base whose configs name the given end-of-text ids, by file."""
    shutil.copytree(tiny_base, folder)
    for file, ids in eos.items():
        path = folder / f"{file}.json"
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, "eos_token_id": ids}))
    return folder


def test_an_answer_ends_with_the_models_own_end_of_text_token(
    start: Start, tiny_base: Path, reference: Reference, tmp_path: Path
) -> None:
    tokens = reference(None, 7)
    cut = next(place for place in range(3, NUM_TOKENS) if tokens[place] not in tokens[:place])
    end, other = tokens[cut], next(token for token in range(128) if token not in tokens)
    cases: list[dict[str, Any]] = [
        {"config": end},
        {"generation_config": end},
        {"config": other, "generation_config": [other, end]},
        {"config": end, "generation_config": None},
    ]
    for case, eos in enumerate(cases):
        engine = start(base=ending_base(tiny_base, tmp_path / str(case), **eos))
        assert end in engine.ready().eos_token_ids
        ask(engine, "ends", None, 7)
        ask(engine, "goes on", None, 7, ignore_eos=True)
        ask(engine, "exact", None, 7, max_tokens=cut + 1)
        answers = finish(engine)
        assert answers["ends"] == Answer(tokens[: cut + 1], "stop")
        assert answers["goes on"] == Answer(tokens, "length")
        assert answers["exact"] == Answer(tokens[: cut + 1], "stop")
    # What generation_config.json says holds, even against config.json.
    engine = start(base=ending_base(tiny_base, tmp_path / "against", config=end, generation_config=other))
    ask(engine, "r", None, 7)
    assert finish(engine)["r"] == Answer(tokens, "length")


def test_a_stop_token_of_the_request_ends_it_and_is_sent(start: Start, reference: Reference) -> None:
    engine = start()
    tokens = reference("linear-r4", 7)
    cut = next(place for place in range(3, NUM_TOKENS) if tokens[place] not in tokens[:place])
    ask(engine, "r", "linear-r4", 7, stop_token_ids=(tokens[cut],), ignore_eos=True)
    assert finish(engine)["r"] == Answer(tokens[: cut + 1], "stop")


def test_a_seed_gives_the_same_answer_alone_in_a_crowd_and_preempted(start: Start) -> None:
    quiet = start()
    seeded: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 40}
    alone: Answers = {}
    for seed in (1, 2):
        ask(quiet, str(seed), "linear-r4", 12, seed=seed, **seeded)
        finish(quiet, alone)
    assert alone["1"].tokens != alone["2"].tokens
    crowded = start(kv_cache_tokens=64, block_size=4, max_num_batched_tokens=8)
    for index in range(3):
        ask(crowded, f"crowd-{index}", MIX[index], 12, temperature=1.5)
        ask(crowded, str(index), "linear-r4", 12, seed=index, **seeded)
    answers = finish(crowded)
    assert answers["1"].tokens == alone["1"].tokens
    assert answers["2"].tokens == alone["2"].tokens


def test_requests_without_a_seed_are_not_the_same_twice(start: Start) -> None:
    engine = start()
    for index in range(4):
        ask(engine, str(index), None, 7, temperature=1.5)
    assert len({tuple(answer.tokens) for answer in finish(engine).values()}) > 1


# Slots


def test_a_request_gets_the_only_slot_within_its_bound(start: Start, reference: Reference) -> None:
    now_s = 0.0
    engine = start(slots=1, max_slot_wait_s=1.0, clock=lambda: now_s)
    answers: Answers = {}
    waited_s = None
    for turn in range(40):
        if turn % 3 == 0:
            ask(engine, f"steady-{turn}", "linear-r4", 7)
        if turn == 10:
            ask(engine, "one", "rslora-r8", 7)
        step(engine, answers)
        now_s += 0.1
        if "one" in answers and waited_s is None:
            waited_s = now_s - 1.0
    # The other adapter has its slot for half the bound at least.
    assert waited_s is not None
    assert 0.5 <= waited_s <= 1.0
    finish(engine, answers)
    assert answers.pop("one").tokens == reference("rslora-r8", 7)
    assert all(answer.tokens == reference("linear-r4", 7) for answer in answers.values())


def test_warm_up_leaves_nothing_behind_and_ready_tells_the_limits(start: Start, reference: Reference) -> None:
    engine = start(kv_cache_tokens=100, block_size=8, max_model_len=256, slots=2)
    engine.warm_up()
    engine.check_invariants()
    assert not engine.has_work()
    ready = engine.ready()
    assert (ready.max_model_len, ready.kv_cache_tokens, ready.num_slots, ready.vocab_size) == (104, 104, 2, 128)
    ask(engine, "r", "rslora-r8", 7)
    assert finish(engine)["r"].tokens == reference("rslora-r8", 7)
    smallest = start(kv_cache_tokens=2, block_size=1, max_model_len=2, slots=1)
    smallest.warm_up()


# Anything at once

NAMES = [None, "attention-r2", "linear-r4", "query-value-r8", "rslora-r8", "more-r3", "more-r6"]
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NAMES), st.sampled_from([1, 3, 12, 33]), st.integers(1, NUM_TOKENS)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 3)),
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(ACTIONS, min_size=5, max_size=40),
    block_size=st.sampled_from([1, 4, 16]),
    kv_cache_tokens=st.sampled_from([48, 96, 200]),
    max_num_batched_tokens=st.sampled_from([3, 8, 40]),
    max_slot_wait_s=st.sampled_from([0.0, 0.02, 10.0]),
)
def test_six_adapters_on_two_slots_answer_exactly_under_any_traffic(
    tiny_base: Path,
    adapters: Names,
    reference: Reference,
    actions: list[tuple[Any, ...]],
    block_size: int,
    kv_cache_tokens: int,
    max_num_batched_tokens: int,
    max_slot_wait_s: float,
) -> None:
    engine = make_engine(
        tiny_base,
        adapters,
        slots=2,
        block_size=block_size,
        kv_cache_tokens=kv_cache_tokens,
        max_num_batched_tokens=max_num_batched_tokens,
        max_slot_wait_s=max_slot_wait_s,
        max_num_seqs=6,
    )
    answers: Answers = {}
    expected: dict[str, list[int]] = {}
    for place, (action, *values) in enumerate(actions):
        if action == "add":
            name, size, max_tokens = values
            expected[str(place)] = reference(name, size)[:max_tokens]
            ask(engine, str(place), name, size, max_tokens)
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
