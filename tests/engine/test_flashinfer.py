"""FlashInfer in place of the Triton kernels: the lists it gets mean the same attention, in graphs too."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lora_core.engine.runner
from kernels import PagedLayout
from kernels.flashinfer_attention import (
    WORKSPACE_BYTES,
    FlashInferAttention,
    PageLists,
    library_fault,
    model_fault,
    open_flashinfer,
    workspace_bytes,
)
from lora_core.engine.attention import build_attention
from lora_core.engine.runner import ModelRunner
from tests.engine.answers import PROMPTS, Answer, Answers, Names, ask, assert_nothing_left, finish, make_engine, step
from tests.engine.device_stand_in import device_stand_in, triton_layout
from tests.engine.driver import PROMPT, Driver
from tests.engine.flashinfer_stand_in import DecodeWrapper, flashinfer_stand_in, stand_in_module
from tests.engine.operator_recorder import OperatorRecorder
from tests.engine.test_attention import PagedBatch
from tests.factories import ATTENTION_TARGETS, make_adapter, reference_tokens, tiny_llama, tiny_model
from tests.kernels import interpreter
from tests.kernels.scratch import poisoned_empty

pytest.importorskip("triton")
interpreter.install()

CPU = torch.device("cpu")
LAYOUT = PagedLayout(4, 2, 64, 16, 32, torch.bfloat16)


class FlashInferBatch(PagedBatch):
    """`PagedBatch` by FlashInfer's lists."""

    def metadata(self) -> Any:
        paged = triton_layout(self.layout, self.num_heads, dtype=self.dtype, device=CPU)
        features: dict[str, Any] = {"windows": (None, self.window), "scale": self.scale, "softcap": self.softcap}
        flashinfer = FlashInferAttention(stand_in_module(), paged, **features, device=CPU)
        spans = [sequence.span for sequence in self.sequences]
        return build_attention(
            spans, self.layout, windows=(self.window,), dtype=self.dtype, device=CPU, flashinfer=flashinfer
        )


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 1000),
    window=st.one_of(st.none(), st.integers(1, 50)),
    softcap=st.sampled_from([None, 0.5]),
)
def test_any_batch_equals_softmax_attention(lengths: list[tuple[int, int]], **options: Any) -> None:
    batch = FlashInferBatch(lengths, **options)
    with poisoned_empty():
        attended = batch.attend()
    torch.testing.assert_close(attended.double(), batch.expected(), rtol=1e-5, atol=1e-5)


def test_steps_that_only_decode_have_their_own_kernels() -> None:
    """The lists of one wrapper are those of the other, and rows of a prompt stay with it."""
    decoding = FlashInferBatch([(5, 1), (0, 1), (9, 1)]).metadata().planned
    mixed = FlashInferBatch([(5, 1), (0, 6)]).metadata().planned
    assert {type(wrapper) for wrapper in decoding.wrappers.values()} == {DecodeWrapper}
    assert DecodeWrapper not in {type(wrapper) for wrapper in mixed.wrappers.values()}


def test_lists_name_the_blocks_in_use() -> None:
    lists = PageLists.of([1, 3, 1], [4, 5, 9], [[7, 8], [2, 3], [4, 5, 6]], block_size=4)
    assert lists.row_offsets.tolist() == [0, 1, 4, 5]
    assert lists.page_offsets.tolist() == [0, 1, 3, 6]
    assert lists.pages.tolist() == [7, 2, 3, 4, 5, 6]
    assert lists.last_lengths.tolist() == [4, 1, 1]
    assert not lists.decodes
    with pytest.raises(AssertionError, match="2 blocks are in use, and a block table has 1"):
        PageLists.of([1], [5], [[0]], block_size=4)


@pytest.fixture
def on_flashinfer() -> Iterator[list[OperatorRecorder]]:
    """Runners made meanwhile are as on a device with Triton, graphs and FlashInfer."""
    with device_stand_in() as recorders, flashinfer_stand_in():
        yield recorders


@pytest.mark.usefixtures("on_flashinfer")
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_greedy_tokens_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """Gemma 2: every other layer has a window of 20 tokens, and scores are soft-capped."""
    base = tiny_model(tmp_path, architecture)
    driver = Driver(base, attention_backend="flashinfer")
    prompts: Sequence[Sequence[int]] = [PROMPT, PROMPT[:1], [*PROMPT, *PROMPT[::-1], 9]]
    requests = [driver.request(prompt) for prompt in prompts]
    driver.finish(requests, 6, chunk=4)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.token_ids[len(prompt) :] == reference_tokens(base, None, prompt, 6)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["one by one", "ahead"])
def test_graphs_read_each_steps_lists(runs_ahead: bool, on_flashinfer: list[OperatorRecorder], tmp_path: Path) -> None:
    """Requests come and go, so that the same recordings serve one to four rows, of growing lengths."""
    base = tiny_llama(tmp_path / "base", layers=1)
    names: Names = {
        "linear": make_adapter(base, tmp_path / "linear", seed=2),
        "attention": make_adapter(base, tmp_path / "attention", r=2, targets=ATTENTION_TARGETS, seed=1),
    }
    engine = make_engine(
        base,
        names,
        attention_backend="flashinfer",
        async_scheduling=runs_ahead,
        block_size=4,
        kv_cache_tokens=256,
        max_num_seqs=4,
    )
    engine.runner.capture_graphs()
    assert on_flashinfer[-1].num_recordings == 3 * 2
    answers: Answers = {}
    work: list[tuple[str | None, int]] = [(None, 7), ("linear", 3), ("attention", 12), (None, 1)]
    for index, (name, size) in enumerate(work):
        ask(engine, str(index), name, size, max_tokens=6)
        step(engine, answers)
    finish(engine, answers)
    for index, (name, size) in enumerate(work):
        expected = reference_tokens(base, None if name is None else names[name], PROMPTS[size], 6)
        assert answers[str(index)] == Answer(expected, "length")
    assert engine.runner.num_replays >= 5
    assert_nothing_left(engine)


def test_graphs_are_for_sequences_of_every_length(on_flashinfer: list[OperatorRecorder], tmp_path: Path) -> None:
    """The Triton kernels have one graph for up to 4096 tokens and one for what is longer."""
    base = tiny_llama(tmp_path, layers=1, max_position_embeddings=8192)
    for backend, num_graphs in (("triton", 2), ("flashinfer", 1)):
        runner = Driver(base, attention_backend=backend, max_num_seqs=1, kv_cache_tokens=5000).runner
        runner.capture_graphs()
        assert on_flashinfer[-1].num_recordings == num_graphs


@pytest.mark.parametrize("fault", ["wrong", "raises"])
@pytest.mark.usefixtures("on_flashinfer")
def test_a_library_that_does_not_do_is_left_alone(
    fault: str, tiny_base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(DecodeWrapper):
        def run(self, *arguments: Any, out: torch.Tensor) -> torch.Tensor:
            if fault == "raises":
                raise RuntimeError("nvcc was not found\nand more")
            return super().run(*arguments, out=out).mul_(1.5)

    module = stand_in_module()
    module.BatchDecodeWithPagedKVCacheWrapper = Wrong  # type: ignore[attr-defined]
    with flashinfer_stand_in(module), caplog.at_level(logging.WARNING):
        driver = Driver(tiny_base, attention_backend="flashinfer")
    (record,) = caplog.records
    why = {"wrong": "differs by 0.5 of the largest value", "raises": "failed with RuntimeError: nvcc was not found"}
    assert "attention on cpu is left to the Triton kernels, not to FlashInfer" in record.getMessage()
    assert why[fault] in record.getMessage()
    request = driver.request(PROMPT)
    driver.finish([request], 4)
    assert request.token_ids[len(PROMPT) :] == reference_tokens(tiny_base, None, PROMPT, 4)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"dtype": torch.float32}, "cache is torch.float32, none of torch.bfloat16, torch.float16"),
        ({"head_dim": 80}, "heads are 80 long, none of 64, 128, 256"),
        ({"block_size": 8}, "engine.block_size is 8, none of 16, 32, 64"),
    ],
)
def test_what_it_does_not_serve_is_named(
    changes: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert model_fault(LAYOUT) is None
    monkeypatch.setattr("kernels.flashinfer_attention.library_fault", lambda device: None)
    layout = LAYOUT._replace(**changes)
    assert open_flashinfer(layout, windows=(None,), scale=0.1, softcap=None, device=CPU) is None
    (record,) = caplog.records
    assert fault in record.getMessage()


def test_it_runs_on_nvidia_gpus_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "it is not installed; install flashinfer-python" in str(library_fault(CPU))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert library_fault(CPU) == "it runs on NVIDIA GPUs only"


def test_on_a_cpu_the_setting_changes_nothing(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_core.engine.runner, "open_flashinfer", lambda *_, **__: pytest.fail("it was opened"))
    runner: ModelRunner = Driver(tiny_base, attention_backend="flashinfer").runner
    assert runner.num_replays == 0


def test_its_memory_is_planned_for() -> None:
    assert workspace_bytes(2, 4, 1000) == WORKSPACE_BYTES + 12 * (8 << 20) + 4000
