"""Attention in C, against a plain loop in fp64."""

import logging
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels import native
from kernels.attention_native import PagedSequences, attend_native, attention_function, can_attend
from kernels.native import CACHE_VARIABLE, native_library

BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 0.01, torch.float16: 1.5e-3}
"""Largest error, for outputs of up to 1."""


class Batch:
    """Sequences `(tokens, rows)` whose pages lie in any order; what is in pages past their ends is no number."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        generator = torch.Generator().manual_seed(len(spans))
        self.lengths, self.counts = (np.array(numbers) for numbers in zip(*spans, strict=True))
        blocks = [-(-length // block_size) for length, _ in spans]
        pages = torch.randperm(sum(blocks), generator=generator).split_with_sizes(blocks)
        self.tables = np.zeros((len(spans), max(blocks)), np.int64)
        self.cache = torch.full((2, sum(blocks), kv_heads, block_size, head_dim), torch.nan).to(dtype)
        self.past: list[Tensor] = []
        for table, mine, (length, _) in zip(self.tables, pages, spans, strict=True):
            table[: len(mine)] = mine
            past = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(dtype)
            for position in range(length):
                self.cache[:, mine[position // block_size], :, position % block_size] = past[:, position]
            self.past.append(past)
        # Rows in another order than sequences, and one that belongs to none.
        self.rows = np.cumsum(self.counts[::-1])[::-1] - self.counts
        self.queries = torch.randn(int(self.counts.sum()) + 1, heads, head_dim, generator=generator).to(dtype)

    def attend(self, *, scale: float = 0.2, window: int | None = None, softcap: float | None = None) -> Tensor:
        """Every row in one step; the row of no sequence is left alone."""
        out = torch.full_like(self.queries, 7)
        sequences = PagedSequences.of(self.rows, self.counts, self.lengths, self.tables)
        attend_native(self.queries, self.cache, sequences, out, scale=scale, window=window, softcap=softcap)
        assert (out[-1] == 7).all()
        return out

    def check(self, *, scale: float = 0.2, window: int | None = None, softcap: float | None = None) -> None:
        """Compare each row with softmax over its own tokens."""
        out = self.attend(scale=scale, window=window, softcap=softcap)
        for first, count, past in zip(self.rows, self.counts, self.past, strict=True):
            for row in range(count):
                end = past.shape[1] - count + row + 1
                seen = past[:, max(0, end - window) if window else 0 : end]
                expected = attended(self.queries[first + row], seen, scale, softcap)
                bound = BOUNDS[out.dtype] * max(1.0, float(expected.abs().max()))
                assert float((out[first + row].double() - expected).abs().max()) <= bound


def attended(queries: Tensor, past: Tensor, scale: float, softcap: float | None) -> Tensor:
    """`[heads, head_dim]` in fp64."""
    keys, values = past.double().repeat_interleave(queries.shape[0] // past.shape[2], 2)
    scores = scale * torch.einsum("thd,hd->ht", keys, queries.double())
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("ht,thd->hd", torch.softmax(scores, 1), values)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (8, 1, 128, 16), (4, 4, 72, 5), (2, 2, 256, 64), (12, 2, 8, 1)],
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (40, None), (None, 2.0), (16, 30.0)])
def test_it_equals_softmax(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> None:
    spans = [(1, 1), (8, 1), (70, 70), (100, 1), (77, 2), (300, 20), (5, 3), (150, 1)]
    batch = Batch(spans, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    batch.check(window=window, softcap=softcap)


@given(
    spans=st.lists(st.tuples(st.integers(0, 150), st.just(1) | st.integers(1, 60)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 6),
    head_dim=st.sampled_from([8, 16, 40, 64, 96]),
    block_size=st.integers(1, 40),
    window=st.none() | st.integers(1, 160),
    softcap=st.none() | st.floats(0.5, 50),
    dtype=st.sampled_from(list(BOUNDS)),
)
@settings(deadline=None, max_examples=60)
def test_any_batch_equals_softmax(
    spans: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> None:
    lengths = [(past + rows, rows) for past, rows in spans]
    Batch(
        lengths, heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    ).check(window=window, softcap=softcap)


def test_a_group_of_more_heads_than_a_tile_has_queries() -> None:
    Batch([(9, 9), (4, 1)], heads=71, kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32).check()


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("window", [None, 100])
def test_how_a_prompt_is_cut_into_steps_changes_no_bit(window: int | None, softcap: float | None) -> None:
    """A prompt of 400 tokens at once, and in chunks beside other sequences."""
    batch = Batch([(400, 400), (300, 2)], heads=6, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    whole = batch.attend(window=window, softcap=softcap)
    for cuts in ([0, 2, 31, 131, 260, 400], [0, 128, 256, 400], [0, 397, 400]):
        for start, end in pairwise(cuts):
            part = PagedSequences.of(
                batch.rows + np.array([start, 0]), np.array([end - start, 2]), np.array([end, 300]), batch.tables
            )
            out = torch.zeros_like(whole)
            attend_native(batch.queries, batch.cache, part, out, scale=0.2, window=window, softcap=softcap)
            rows = slice(int(batch.rows[0]) + start, int(batch.rows[0]) + end)
            assert torch.equal(out[rows], whole[rows])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_scores_of_any_size_are_weighed(scale: float) -> None:
    """Alike, ordinary, and so far apart that all weights but one vanish."""
    Batch([(50, 1), (3, 1)], heads=2, kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32).check(scale=scale)


@pytest.mark.parametrize("scale", [1e-3, 0.125, 1.0, 300.0])
def test_prompts_come_as_near_as_those_of_torch(scale: float) -> None:
    batch = Batch([(200, 40)], heads=2, kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32)
    out, (past,) = batch.attend(scale=scale)[:-1], batch.past
    expected = torch.stack(
        [attended(query, past[:, : 161 + row], scale, None) for row, query in enumerate(batch.queries[:-1])]
    )
    keys, values = past.movedim(1, 2).expand(-1, 2, -1, -1)
    mask = torch.arange(200) <= torch.arange(160, 200)[:, None]
    ours = (out - expected).abs().max()
    theirs = scaled_dot_product_attention(batch.queries[:-1].movedim(0, 1), keys, values, mask, scale=scale)
    assert ours <= 1.5 * (theirs.movedim(0, 1) - expected).abs().max() + 1e-7


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 1e4])
def test_soft_caps_of_any_size(softcap: float) -> None:
    spans = [(50, 1), (3, 1), (200, 40)]
    Batch(spans, heads=2, kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32).check(softcap=softcap)


def test_what_is_no_number_reaches_its_own_row_only() -> None:
    batch = Batch([(20, 1), (20, 1), (20, 9)], heads=2, kv_heads=1, head_dim=16, block_size=8, dtype=torch.float32)
    batch.queries[[4, 9]] = torch.nan
    out = batch.attend()
    assert out.isnan().flatten(1).all(1).nonzero().flatten().tolist() == [4, 9]
    assert int(out.isnan().sum()) == 2 * 2 * 16


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("plane", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("token", [0, 130, 199])
def test_what_is_not_finite_reaches_the_rows_that_attend_to_it(
    token: int, plane: int, number: float, window: int | None
) -> None:
    """No other row of their prompt, whose keys and values later requests may share."""
    batch = Batch([(200, 200), (7, 1)], heads=2, kv_heads=1, head_dim=16, block_size=8, dtype=torch.float32)
    rows = slice(int(batch.rows[0]), int(batch.rows[0]) + 200)
    batch.queries.abs_()  # An infinite key's score is infinite, too.
    before = batch.attend(window=window)[rows]
    batch.cache[plane, batch.tables[0, token // 8], :, token % 8] = number
    out = batch.attend(window=window)[rows]
    attends = [token <= row < token + (window or 200) for row in range(200)]
    assert (~out.isfinite()).flatten(1).any(1).tolist() == attends
    others = ~torch.tensor(attends)
    assert torch.equal(out[others], before[others])


@pytest.mark.parametrize("rows", [1, 30])
def test_what_lies_before_the_window_is_not_read(rows: int) -> None:
    """Nor weighed: blocks of another request may be there by then."""
    batch = Batch([(400, rows)], heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32)
    right = batch.attend(window=50)
    for token in range(400 - rows - 49):
        batch.cache[:, batch.tables[0, token // 16], :, token % 16] = torch.nan
    assert torch.equal(batch.attend(window=50), right)


@pytest.mark.parametrize("rows", [1, 30])
def test_scores_may_all_be_far_below_zero(rows: int) -> None:
    """A weight is relative to the largest score, not to 0, and not to what a row that is masked could have."""
    batch = Batch([(200, rows)], heads=2, kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32)
    batch.queries[..., 0] = 40
    batch.past[0][0, :, :, 0] = -40
    for token in range(200):
        batch.cache[0, batch.tables[0, token // 16], :, token % 16, 0] = -40
    out, (past,) = batch.attend(), batch.past
    for row, query in enumerate(batch.queries[:-1]):
        expected = attended(query, past[:, : 200 - rows + row + 1], 0.2, None)
        # fp32 has steps of 3e-5 at scores of -320.
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_rows_may_lie_apart(dtype: torch.dtype) -> None:
    """Those of queries are, within what is projected for queries, keys and values."""
    batch = Batch([(30, 1), (90, 40)], heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=dtype)
    right, wide = batch.attend(), torch.full((len(batch.queries), 11, 32), torch.nan).to(dtype)
    wide[:, 2:6] = batch.queries
    out = torch.full((len(batch.queries), 9, 32), 7).to(dtype)
    sequences = PagedSequences.of(batch.rows, batch.counts, batch.lengths, batch.tables)
    attend_native(wide[:, 2:6], batch.cache, sequences, out[:, 3:7], scale=0.2)
    assert torch.equal(out[:, 3:7], right)
    assert (out[:, [0, 1, 2, 7, 8]] == 7).all()


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_change_no_bit(num_threads: int) -> None:
    spans = [(400, 1), (3, 1), (250, 90), (250, 1)]
    batch = Batch(spans, heads=9, kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16)
    results, before = [], torch.get_num_threads()
    for count in (1, num_threads):
        torch.set_num_threads(count)
        try:
            results.append(batch.attend(scale=0.1))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*results)


def test_what_it_takes() -> None:
    assert can_attend(torch.float32, 64)
    assert can_attend(torch.bfloat16, 8)
    assert not can_attend(torch.float64, 64)
    assert not can_attend(torch.float32, 12)


@pytest.mark.parametrize("wrong", ["(call->scale + 0.1f)", "NAN"])
def test_a_kernel_that_computes_wrongly_is_not_used(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(native.__file__).parent
    for name in ("attention_native.c", "native_vectors.h"):
        text = (folder / name).read_text()
        (tmp_path / name).write_text(text.replace("* call->scale", f"* {wrong}"))
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    native_library.cache_clear()
    attention_function.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not can_attend(torch.float32, 64)
        (record,) = caplog.records
        assert "attention_native.c, as compiled here, is not used" in record.message
    finally:
        native_library.cache_clear()
        attention_function.cache_clear()
