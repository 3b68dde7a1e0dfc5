"""Steps replayed from recordings at bucketed sizes: the same tokens as without, whatever the adapters and lengths."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.launch import Launch
from lora_core.engine.engine import LLMEngine
from tests.engine.answers import Answer, Answers, Names, ask, assert_nothing_left, finish, make_engine, step
from tests.engine.device_stand_in import device_stand_in
from tests.engine.operator_recorder import OperatorRecorder
from tests.factories import ATTENTION_TARGETS, make_adapter, reference_tokens, tiny_llama, tiny_model
from tests.kernels import interpreter

pytest.importorskip("triton")
interpreter.install()

CPU = torch.device("cpu")
NUM_TOKENS = 4
PROMPT = [5, 17, 90, 3, 44]
Start = Callable[..., LLMEngine]


@pytest.fixture
def on_device() -> Iterator[list[OperatorRecorder]]:
    """Runners made meanwhile are as on a device with Triton and graphs."""
    with device_stand_in() as recorders:
        yield recorders


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer: what the interpreter takes for a step adds up."""
    return tiny_llama(tmp_path_factory.mktemp("base"), layers=1)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Names:
    """Adapters of linear layers, one with gains, one of the head, and one of the embedding."""
    folder = tmp_path_factory.mktemp("kinds")
    return {
        "linear": make_adapter(base, folder / "linear", seed=2),
        "attention": make_adapter(base, folder / "attention", r=2, targets=ATTENTION_TARGETS, seed=1),
        "rslora": make_adapter(base, folder / "rslora", r=8, use_rslora=True, seed=4),
        "dora": make_adapter(base, folder / "dora", targets=("q_proj", "gate_proj", "down_proj"), use_dora=True),
        "head": make_adapter(base, folder / "head", targets=("v_proj", "lm_head"), seed=5),
        "embedding": make_adapter(base, folder / "embedding", targets=("o_proj", "embed_tokens"), seed=6),
    }


def start(base: Path, adapters: Names, **options: Any) -> LLMEngine:
    """An engine whose recordings are made; it serves steps of up to 4 rows with them."""
    engine = make_engine(
        base, adapters, **{"slots": 3, "max_num_seqs": 4, "max_model_len": 64, "block_size": 4, **options}
    )
    engine.runner.capture_graphs()
    return engine


def ask_for(engine: LLMEngine, request_id: str, name: str | None, size: int = 5, count: int = NUM_TOKENS) -> None:
    from lora_core.messages import GenerateRequest, SamplingParams

    prompt = PROMPT[:size]
    engine.add_request(GenerateRequest(request_id, prompt, SamplingParams(max_tokens=count, temperature=0), name))


def expected(base: Path, adapters: Names, name: str | None, size: int = 5, count: int = NUM_TOKENS) -> list[int]:
    return reference_tokens(base, None if name is None else adapters[name], PROMPT[:size], count)


@pytest.mark.parametrize(("one_launch", "runs_ahead"), [(False, True), (True, False)], ids=["ahead", "one launch"])
def test_changing_mixes_answer_as_the_reference_does(
    one_launch: bool,
    runs_ahead: bool,
    on_device: list[OperatorRecorder],
    base: Path,
    adapters: Names,
) -> None:
    """Requests come and go, so that the same recordings serve one to four rows of none, one and several adapters."""
    names = {name: adapters[name] for name in ("linear", "attention")}
    engine = start(
        base, names, async_scheduling=runs_ahead, lora_settings={"one_launch": one_launch}, kv_cache_tokens=256
    )
    assert on_device[-1].num_recordings == 3 * 2
    answers: Answers = {}
    work = [(None, 5), ("linear", 3), ("attention", 5), (None, 2)]
    for index, (name, size) in enumerate(work):
        ask_for(engine, str(index), name, size)
        step(engine, answers)
    finish(engine, answers)
    for index, (name, size) in enumerate(work):
        assert answers[str(index)] == Answer(expected(base, adapters, name, size), "length")
    assert engine.runner.num_replays == NUM_TOKENS - 1
    assert_nothing_left(engine)


def test_preempted_and_aborted_requests_answer_as_ever(
    on_device: list[OperatorRecorder], base: Path, adapters: Names
) -> None:
    names = {"linear": adapters["linear"]}
    engine = start(base, names, kv_cache_tokens=32, async_scheduling=True)
    answers: Answers = {}
    for index, name in enumerate((None, "linear", "linear", None)):
        ask_for(engine, str(index), name, count=8)
    for _ in range(3):
        step(engine, answers)
    engine.abort("2")
    finish(engine, answers)
    assert engine.preemption_counts[0], "the cache was never too small"
    for index, name in ((0, None), (1, "linear"), (3, None)):
        assert answers[str(index)] == Answer(expected(base, adapters, name, count=8), "length")
    assert engine.runner.num_replays
    assert_nothing_left(engine)


@pytest.mark.parametrize(("setting", "kinds"), [("common", 2), ("all", 3)])
def test_adapters_of_every_kind_share_a_batch(
    setting: str, kinds: int, on_device: list[OperatorRecorder], base: Path, adapters: Names
) -> None:
    """With `common`, steps with gains or an adapted embedding are computed as they are, and the others replayed."""
    names = {name: adapters[name] for name in ("dora", "head", "embedding")}
    engine = start(base, names, cuda_graphs=setting)
    assert on_device[-1].num_recordings == 3 * kinds
    for first, second in (("head", None), ("dora", "head"), ("embedding", "dora")):
        before = engine.runner.num_replays
        ask_for(engine, "first", first, count=3)
        ask_for(engine, "second", second, count=3)
        answers = finish(engine)
        for request_id, name in (("first", first), ("second", second)):
            assert answers[request_id] == Answer(expected(base, adapters, name, count=3), "length"), name
        is_replayed = setting == "all" or second is None
        assert engine.runner.num_replays - before == (2 if is_replayed else 0)
    assert_nothing_left(engine)


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Phi3ForCausalLM"])
def test_other_architectures(architecture: str, on_device: list[OperatorRecorder], tmp_path: Path) -> None:
    """Gemma 2: windows, soft caps, a scaled embedding. Phi 3: gate and up are one projection to adapters."""
    base = tiny_model(tmp_path / "base", architecture)
    targets = "all-linear"
    names = {"adapter": make_adapter(base, tmp_path / "adapter", targets=targets, seed=2)}
    engine = start(base, names, slots=1, max_num_seqs=2)
    ask_for(engine, "adapted", "adapter", count=4)
    ask_for(engine, "base", None, count=4)
    answers = finish(engine)
    assert answers["adapted"].tokens == expected(base, names, "adapter", count=4)
    assert answers["base"].tokens == expected(base, names, None, count=4)
    assert engine.runner.num_replays == 3


def test_base_rows_do_not_notice_which_adapters_their_batch_has(
    on_device: list[OperatorRecorder], base: Path, adapters: Names
) -> None:
    logits: list[list[Tensor]] = []
    for neighbour in ("linear", "rslora"):
        engine = start(base, {name: adapters[name] for name in ("linear", "rslora")}, max_num_seqs=3)
        logits.append([])
        run = engine.runner.run

        def record(batch: Any, run: Any = run, into: list[Tensor] = logits[-1]) -> Tensor:
            found: Tensor = run(batch)
            into.append(found[[row.request.request_id == "base" for row in batch.rows]].clone())
            return found

        engine.runner.run = record  # type: ignore[method-assign, assignment]
        for request_id, name in (("one", neighbour), ("two", neighbour), ("base", None)):
            ask_for(engine, request_id, name, size=2, count=3)
        finish(engine)
        assert engine.runner.num_replays == 2
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))


def test_no_step_launches_a_kernel_that_was_not_compiled_at_start(
    on_device: list[OperatorRecorder], base: Path, adapters: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `compile_kernels` compiles on a device, before any adapter is loaded."""
    engine = start(base, {}, cuda_graphs="all", max_num_seqs=2, max_num_batched_tokens=32)
    known = {launch.variant for launch in engine.runner.kernel_launches()}
    launched: Counter[Any] = Counter()
    plain_run: Callable[[Launch], None] = Launch.run

    def run(launch: Launch) -> None:
        if launch.programs:
            launched[launch.variant] += 1
        plain_run(launch)

    monkeypatch.setattr(Launch, "run", run)
    for loaded, path in adapters.items():
        engine.manager.load_adapter(f"{loaded}={path}")
    for index, (name, size) in enumerate([("linear", 5), ("dora", 1), (None, 3), ("head", 5), ("embedding", 4)]):
        ask_for(engine, str(index), name, size, count=3)
    ask(engine, "long", "linear", 20, max_tokens=2)
    finish(engine)
    monkeypatch.undo()
    assert len({variant[0] for variant in launched}) == 7, "not every kernel was launched"
    assert not [variant for variant in launched if variant not in known]


def test_settings_leave_graphs_out(on_device: list[OperatorRecorder], base: Path, adapters: Names) -> None:
    none = start(base, {}, cuda_graphs="none")
    ask_for(none, "a", None)
    finish(none)
    assert none.runner.num_replays == 0
    small = start(base, {}, slots=0, max_graph_seqs=1)
    assert on_device[-1].num_recordings == 1
    for index in range(2):
        ask_for(small, str(index), None, count=2 + 2 * index)
    answers = finish(small)
    # While both run, steps are larger than the graph.
    assert small.runner.num_replays == 2
    assert answers["1"].tokens == expected(base, {}, None, count=4)


def test_without_a_device_nothing_is_captured(base: Path) -> None:
    engine = make_engine(base, {})
    engine.warm_up()
    assert engine.runner.num_replays == 0
    assert engine.runner.kernel_launches() == []
