"""The engine with the Triton kernels in place of those of the CPU: the same tokens, from the same runner."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lora_core.engine.runner
from kernels.support import warn_of_fallback
from lora_core.engine.attention import SequenceSpan, build_attention, paged_layout
from lora_core.engine.kv_cache import KVLayout
from tests.engine.device_stand_in import triton_layout
from tests.engine.driver import PROMPT, Driver
from tests.engine.test_attention import PagedBatch
from tests.factories import make_adapter, reference_tokens, tiny_model
from tests.kernels import interpreter
from tests.kernels.scratch import poisoned_empty

pytest.importorskip("triton")
interpreter.install()

CPU = torch.device("cpu")


class TritonBatch(PagedBatch):
    """`PagedBatch` through the kernels."""

    def metadata(self) -> Any:
        paged = triton_layout(self.layout, self.num_heads, dtype=self.dtype, device=CPU)
        spans = [sequence.span for sequence in self.sequences]
        return build_attention(spans, self.layout, windows=(self.window,), dtype=self.dtype, device=CPU, paged=paged)


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runners made meanwhile attend through the kernels, whose scratch memory holds NaN."""
    monkeypatch.setattr(lora_core.engine.runner, "paged_layout", triton_layout)
    with poisoned_empty():
        yield


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("chunk", [1000, 4], ids=["whole prompts", "prompts in chunks"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_greedy_tokens_are_those_of_transformers(architecture: str, chunk: int, tmp_path: Path) -> None:
    """Gemma 2: every other layer has a window of 20 tokens, and scores are soft-capped."""
    base = tiny_model(tmp_path, architecture)
    driver = Driver(base)
    prompts: Sequence[Sequence[int]] = [PROMPT, PROMPT[:1], [*PROMPT, *PROMPT[::-1], 9]]
    requests = [driver.request(prompt) for prompt in prompts]
    driver.finish(requests, 6, chunk=chunk)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.token_ids[len(prompt) :] == reference_tokens(base, None, prompt, 6)


@pytest.mark.usefixtures("on_triton")
def test_no_block_is_cleared_and_what_its_last_owner_left_does_not_leak(tiny_base: Path, tmp_path: Path) -> None:
    driver = Driver(tiny_base, {"adapter": make_adapter(tiny_base, tmp_path / "adapter")}, kv_cache_tokens=64)
    for layer in driver.runner.kv_cache.layers:
        layer.fill_(float("nan"))
    requests = [driver.request(PROMPT[:3]), driver.request(PROMPT, "adapter")]
    driver.finish(requests, 6, chunk=2)
    for request, prompt, adapter in zip(requests, (PROMPT[:3], PROMPT), (None, tmp_path / "adapter"), strict=True):
        assert request.token_ids[len(prompt) :] == reference_tokens(tiny_base, adapter, prompt, 6)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 1000),
    window=st.one_of(st.none(), st.integers(1, 50)),
    softcap=st.sampled_from([None, 0.5]),
)
def test_any_batch_equals_softmax_attention(lengths: list[tuple[int, int]], **options: Any) -> None:
    batch = TritonBatch(lengths, **options)
    with poisoned_empty():
        attended = batch.attend()
    torch.testing.assert_close(attended.double(), batch.expected(), rtol=1e-5, atol=1e-5)


def test_the_kernels_tables_have_few_shapes() -> None:
    """Powers of two near what a step needs; of its rows there are as many as it has."""
    layout = KVLayout(num_blocks=64, num_kv_heads=2, block_size=4, head_dim=8)
    paged = triton_layout(layout, 4, dtype=torch.float32, device=CPU)

    def shapes(lengths: list[tuple[int, int]]) -> tuple[torch.Size, torch.Size, int]:
        spans = [SequenceSpan(rows, past + rows, list(range(-(-(past + rows) // 4)))) for past, rows in lengths]
        schedule = build_attention(spans, layout, dtype=torch.float32, device=CPU, paged=paged).schedule
        assert schedule is not None
        return schedule.decodes.shape, schedule.block_tables.shape, len(schedule.tiles)

    assert shapes([(8, 1)] * 5) == shapes([(8, 1)] * 4 + [(15, 1)]) == ((8, 4), (8, 4), 0)
    assert shapes([(20, 1)] * 2 + [(0, 6)]) == ((2, 4), (4, 8), shapes([(20, 1)] * 2 + [(18, 6)])[2])


def test_the_kernels_are_not_for_the_cpu_nor_for_where_they_do_not_run(caplog: pytest.LogCaptureFixture) -> None:
    layout = KVLayout(num_blocks=64, num_kv_heads=2, block_size=4, head_dim=8)
    assert paged_layout(layout, 4, dtype=torch.float32, device=CPU) is None
    assert not caplog.records
    # The device is at fault, which is said once in a process, with its adapters' warning.
    warn_of_fallback.cache_clear()
    meta = torch.device("meta")
    assert [paged_layout(layout, 4, dtype=torch.float32, device=meta) for _ in range(2)] == [None, None]
    assert caplog.text.count("adapters and attention on meta run in plain torch, which is slow") == 1


def test_schedule_and_gathered_pages_agree_on_where_tokens_go() -> None:
    batch, gathered = TritonBatch([(5, 1), (0, 6)]), PagedBatch([(5, 1), (0, 6)])
    metadata = batch.metadata()
    assert metadata.fresh_blocks is None
    assert np.array_equal(metadata.write_rows, gathered.metadata().write_rows)
