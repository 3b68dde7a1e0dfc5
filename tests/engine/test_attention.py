"""Paged attention against plain softmax over each sequence's own keys and values, in fp64."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention_native import can_attend
from lora_core.engine import attention as module
from lora_core.engine import gathered_attention
from lora_core.engine.attention import (
    AttentionMetadata,
    SequenceSpan,
    attend,
    build_attention,
    token_positions,
    write_kv,
)
from lora_core.engine.gathered_attention import AttentionReads
from lora_core.engine.kv_cache import KVCache, KVLayout

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=["compiled", "gathered"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with the compiled kernel, and as where there is none."""
    assert can_attend(torch.float32, 8), "the project needs a C compiler"
    if request.param == "gathered":
        monkeypatch.setattr(module, "can_attend", lambda dtype, head_dim: False)
    return str(request.param)


ONLY_GATHERED = pytest.mark.parametrize("backend", ["gathered"], indirect=True)


@dataclass
class Sequence:
    """Keys and values of a whole text, and the queries of its last `q_len` tokens."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    span: SequenceSpan


class PagedBatch:
    """Random sequences in a cache whose unused memory is poison, the past of each one written already."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        num_kv_heads: int = 2,
        group: int = 3,
        head_dim: int = 8,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.num_kv_heads, self.num_heads, self.head_dim = num_kv_heads, num_kv_heads * group, head_dim
        self.dtype = dtype
        self.scale = head_dim**-0.5
        self.window, self.softcap = window, softcap
        counts = [math.ceil((past + new) / block_size) for past, new in lengths]
        self.layout = KVLayout(
            num_blocks=sum(counts) + 3, num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim
        )
        self.cache = KVCache(self.layout, 2, dtype=dtype, device=CPU)
        for layer in self.cache.layers:
            layer.fill_(float("nan"))
        free = np.random.default_rng(seed).permutation(self.layout.num_blocks).tolist()
        self.sequences = [
            self._sequence(past, new, [free.pop() for _ in range(n)])
            for (past, new), n in zip(lengths, counts, strict=True)
        ]
        self._write_past()

    def metadata(self) -> AttentionMetadata:
        spans = [s.span for s in self.sequences]
        return build_attention(spans, self.layout, windows=(self.window,), dtype=self.dtype, device=CPU)

    def reads(self) -> AttentionReads:
        return self.metadata().reads[self.window]

    def attend(self, layer: int = 1) -> Tensor:
        """The step's attention, as a decoder layer runs it."""
        attention = self.metadata()
        if attention.fresh_blocks is not None:
            self.cache.clear(attention.fresh_blocks)
        queries = torch.cat([s.queries for s in self.sequences])
        key_values = torch.cat([torch.cat((s.keys, s.values), 1)[-s.span.q_len :] for s in self.sequences])
        write_kv(self.cache.layers[layer], key_values, attention)
        cache = self.cache.layers[layer]
        features: dict[str, Any] = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        return attend(queries, key_values, cache, attention, **features)

    def expected(self) -> Tensor:
        return torch.cat([self._softmax_attention(s) for s in self.sequences])

    def _sequence(self, past: int, new: int, block_table: list[int]) -> Sequence:
        def heads(rows: int, count: int) -> Tensor:
            return torch.randn(rows, count, self.head_dim, generator=self.generator).to(self.dtype)

        return Sequence(
            heads(new, self.num_heads),
            heads(past + new, self.num_kv_heads),
            heads(past + new, self.num_kv_heads),
            SequenceSpan(new, past + new, block_table),
        )

    def _write_past(self) -> None:
        """Token by token, by the layout's definition alone."""
        size = self.layout.block_size
        for sequence in self.sequences:
            for position in range(sequence.span.kv_len - sequence.span.q_len):
                block = sequence.span.block_table[position // size]
                if position % size == 0:
                    self.cache.clear(torch.tensor([block]))
                for layer in self.cache.layers:
                    layer[0, block, :, position % size] = sequence.keys[position]
                    layer[1, block, :, position % size] = sequence.values[position]

    def _softmax_attention(self, sequence: Sequence) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        keys = sequence.keys.double().repeat_interleave(group, 1)
        values = sequence.values.double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", sequence.queries.double(), keys) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        positions = torch.arange(sequence.span.kv_len)
        queried = positions[-sequence.span.q_len :, None]
        excluded = positions > queried
        if self.window is not None:
            excluded |= queried - positions >= self.window
        weights = scores.masked_fill(excluded, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def check(batch: PagedBatch, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(batch.attend().double(), batch.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([(6, 1)], id="one decode"),
        pytest.param([(0, 1)], id="prompt of one token"),
        pytest.param([(3, 1), (4, 1), (5, 1)], id="decodes around a block's end"),
        pytest.param([(7, 1), (7, 1)], id="decodes that fill their blocks"),
        pytest.param([(0, 9)], id="prompt"),
        pytest.param([(8, 4)], id="chunk of whole blocks"),
        pytest.param([(3, 2), (5, 7)], id="chunks that start inside a block"),
        pytest.param([(0, 5), (9, 1), (4, 3), (2, 1), (0, 4)], id="everything, in no order"),
    ],
)
def test_equals_softmax_attention(lengths: list[tuple[int, int]]) -> None:
    check(PagedBatch(lengths))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=120, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), min_size=1, max_size=8),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    block_size=st.sampled_from([1, 3, 4, 16]),
    seed=st.integers(0, 1000),
    window=st.one_of(st.none(), st.integers(1, 50)),
    softcap=st.sampled_from([None, 0.5, 3.0]),
)
def test_equals_softmax_attention_for_any_batch(lengths: list[tuple[int, int]], **settings: Any) -> None:
    check(PagedBatch(lengths, **settings))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_half_precision_is_close(dtype: torch.dtype, tolerance: float) -> None:
    check(PagedBatch([(0, 5), (30, 1), (4, 3), (2, 1)], dtype=dtype), tolerance)


@ONLY_GATHERED
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-3), (torch.float16, 5e-4)])
def test_what_the_processor_does_not_multiply_is_widened(
    dtype: torch.dtype, tolerance: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rounded once: scores as large as these, rounded to 16 bits, give other weights."""
    monkeypatch.setattr(gathered_attention, "cpu_multiplies", lambda dtype: False)
    for lengths in ([(30, 1)], [(0, 20)], [(0, 5), (30, 1), (4, 3), (2, 1)]):
        batch = PagedBatch(lengths, dtype=dtype, softcap=softcap, window=7)
        batch.scale = 4.0
        check(batch, tolerance)


@ONLY_GATHERED
def test_decodes_of_very_different_lengths_are_padded_apart() -> None:
    """Thirty short texts are not padded to one long one."""
    batch = PagedBatch([*[(10, 1)] * 15, (900, 1), *[(10, 1)] * 15])
    gathered = sum(group.pages.numel() for group in batch.reads().decodes)
    tokens = gathered * batch.layout.block_size // (2 * batch.num_kv_heads)
    assert tokens == 30 * 12 + 904
    check(batch)


@ONLY_GATHERED
def test_decodes_of_near_lengths_share_one_group() -> None:
    (group,) = PagedBatch([(10, 1), (30, 1), (20, 1)]).reads().decodes
    assert group.rows is None


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([(30, 1)], id="one decode"),
        pytest.param([(3, 1), (30, 1), (12, 1), (7, 1)], id="decodes inside, at and past the window"),
        pytest.param([(0, 20)], id="prompt"),
        pytest.param([(17, 9), (2, 2), (8, 4)], id="chunks"),
        pytest.param([(0, 5), (29, 1), (16, 12), (2, 1), (0, 14)], id="everything"),
    ],
)
def test_windows_equal_softmax_attention(lengths: list[tuple[int, int]], window: int) -> None:
    check(PagedBatch(lengths, window=window))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("lengths", [[(30, 1)], [(0, 9)], [(3, 1), (30, 1)], [(0, 5), (9, 1), (14, 3)]])
def test_soft_capped_scores_equal_softmax_attention(lengths: list[tuple[int, int]], window: int | None) -> None:
    batch = PagedBatch(lengths, window=window, softcap=0.5)
    check(batch)
    capped = batch.attend()
    batch.softcap = None
    assert (capped - batch.attend()).abs().max() > 1e-2


@ONLY_GATHERED
def test_only_pages_inside_the_window_are_gathered() -> None:
    batch = PagedBatch([(900, 1), (700, 1), (500, 6)], window=6)
    reads = batch.reads()
    (group,), (chunk,) = reads.decodes, reads.prefills
    planes = 2 * batch.num_kv_heads
    # Positions 895 to 900 and 695 to 700 are in three blocks of four, 495 to 505 in four.
    assert group.pages.numel() == planes * 2 * 3
    assert chunk.pages is not None
    assert chunk.pages.numel() == planes * 4
    check(batch)


@ONLY_GATHERED
def test_a_prompt_inside_its_window_needs_no_mask() -> None:
    assert PagedBatch([(0, 6)], window=6).reads().prefills[0].mask is None
    assert PagedBatch([(0, 7)], window=6).reads().prefills[0].mask is not None
    check(PagedBatch([(0, 7)], window=6))


@ONLY_GATHERED
def test_windows_that_reach_past_every_sequence_cost_nothing() -> None:
    spans = PagedBatch([(8, 4), (11, 1)]).sequences
    layout = KVLayout(num_blocks=16, num_kv_heads=1, block_size=4, head_dim=8)
    reads = build_attention(
        [s.span for s in spans], layout, windows=(None, 12, 4096, 11), dtype=torch.float32, device=CPU
    ).reads
    assert reads[None] is reads[12] is reads[4096]
    assert reads[11] is not reads[None]


@ONLY_GATHERED
def test_a_step_touches_only_its_own_tokens() -> None:
    batch = PagedBatch([(5, 1), (0, 6)])
    kept = batch.cache.layers[0].clone()
    before = batch.cache.layers[1].clone()
    batch.attend(layer=1)
    attention = batch.metadata()
    written = torch.zeros(batch.cache.layers[1].numel() // batch.head_dim, dtype=torch.bool)
    written[attention.write_rows] = True
    assert attention.fresh_blocks is not None
    changed = written.view(batch.layout.shape[:-1])
    changed[:, attention.fresh_blocks] = True
    assert torch.equal(batch.cache.layers[1][~changed].nan_to_num(7), before[~changed].nan_to_num(7))
    untouched = [block for block in range(batch.layout.num_blocks) if block not in attention.fresh_blocks.tolist()]
    assert torch.equal(batch.cache.layers[0][:, untouched].nan_to_num(7), kept[:, untouched].nan_to_num(7))


def test_keys_and_values_of_another_request_in_a_reused_block_do_not_leak() -> None:
    """The last owner's NaN is behind the new owner's last token, in the same block."""
    batch = PagedBatch([(0, 1), (0, 2)])
    for layer in batch.cache.layers:
        layer.fill_(float("inf"))
    check(batch)


@ONLY_GATHERED
def test_fresh_blocks_are_those_whose_first_token_is_new() -> None:
    batch = PagedBatch([(3, 1), (4, 1), (2, 7), (0, 4)], block_size=4)
    tables = [sequence.span.block_table for sequence in batch.sequences]
    fresh = batch.metadata().fresh_blocks
    assert fresh is not None
    assert sorted(fresh.tolist()) == sorted([tables[1][1], tables[2][1], tables[2][2], tables[3][0]])
    assert PagedBatch([(3, 1), (5, 2)], block_size=4).metadata().fresh_blocks is None


def test_the_compiled_kernel_reads_no_more_than_a_sequences_own_tokens(backend: str) -> None:
    """So that no block is cleared for its sake, whose tail holds what its last owner left."""
    attention = PagedBatch([(3, 1), (4, 1), (2, 7), (0, 4)], block_size=4).metadata()
    assert (attention.fresh_blocks is None) is (backend == "compiled")


def test_a_block_table_too_short_is_a_fault() -> None:
    layout = KVLayout(num_blocks=4, num_kv_heads=1, block_size=4, head_dim=8)
    with pytest.raises(AssertionError, match="5 tokens do not fit 1 blocks"):
        build_attention([SequenceSpan(1, 5, [0])], layout, dtype=torch.float32, device=CPU)


def test_token_positions_count_from_each_sequences_past() -> None:
    assert token_positions(np.array([3, 1, 2]), np.array([3, 8, 6])).tolist() == [0, 1, 2, 7, 4, 5]
