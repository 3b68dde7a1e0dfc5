"""Attention of decoding sequences in C, against a plain loop in fp64."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import decode_attention as module
from kernels import native
from kernels.decode_attention import Decodes, can_decode, decode_attention, decode_function
from kernels.native import CACHE_VARIABLE, native_library

BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 0.01}


class Batch:
    """Sequences whose pages lie in any order; what is in pages past their ends is no number."""

    def __init__(
        self, lengths: list[int], *, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        counts = [-(-length // block_size) for length in lengths]
        pages = torch.randperm(sum(counts), generator=generator).split_with_sizes(counts)
        tables = np.zeros((len(lengths), max(counts)), np.int64)
        self.cache = torch.full((2, sum(counts), kv_heads, block_size, head_dim), torch.nan).to(dtype)
        self.past: list[Tensor] = []
        for table, mine, length in zip(tables, pages, lengths, strict=True):
            table[: len(mine)] = mine
            past = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(dtype)
            for position in range(length):
                self.cache[:, mine[position // block_size], :, position % block_size] = past[:, position]
            self.past.append(past)
        # Rows in another order than sequences, and one that belongs to none.
        self.rows = list(range(len(lengths)))[::-1]
        self.queries = torch.randn(len(lengths) + 1, heads, head_dim, generator=generator).to(dtype)
        self.decodes = Decodes.of(np.array(self.rows), np.array(lengths), tables)

    def check(self, *, scale: float = 0.2, window: int | None = None, softcap: float | None = None) -> None:
        """Compare each sequence with softmax over its own tokens."""
        out = torch.full_like(self.queries, 7)
        decode_attention(self.queries, self.cache, self.decodes, out, scale=scale, window=window, softcap=softcap)
        assert (out[-1] == 7).all()
        for row, past in zip(self.rows, self.past, strict=True):
            expected = attended(self.queries[row], past[:, -window:] if window else past, scale, softcap)
            bound = BOUNDS[out.dtype] * max(1.0, float(expected.abs().max()))
            assert float((out[row].double() - expected).abs().max()) <= bound


def attended(queries: Tensor, past: Tensor, scale: float, softcap: float | None) -> Tensor:
    """`[heads, head_dim]` in fp64, one head at a time."""
    group = queries.shape[0] // past.shape[2]
    outputs = []
    for head, query in enumerate(queries.double()):
        keys, values = past[:, :, head // group].double()
        scores = scale * keys @ query
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        outputs.append(torch.softmax(scores, 0) @ values)
    return torch.stack(outputs)


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
    batch = Batch(
        [1, 8, 33, 100, 77], heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    batch.check(window=window, softcap=softcap)


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 6),
    head_dim=st.sampled_from([8, 16, 40, 64, 96]),
    block_size=st.integers(1, 40),
    window=st.none() | st.integers(1, 100),
    dtype=st.sampled_from(list(BOUNDS)),
)
@settings(deadline=None, max_examples=60)
def test_any_batch_equals_softmax(
    lengths: list[int],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    Batch(
        lengths, heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    ).check(window=window)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_scores_of_any_size_are_weighed(scale: float) -> None:
    """Alike, ordinary, and so far apart that all weights but one vanish."""
    Batch([50, 3], heads=2, kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32).check(scale=scale)


def test_what_is_no_number_reaches_its_own_row_only() -> None:
    batch = Batch([20, 20, 20], heads=2, kv_heads=1, head_dim=16, block_size=8, dtype=torch.float32)
    batch.queries[1] = torch.nan
    out = torch.zeros_like(batch.queries)
    decode_attention(batch.queries, batch.cache, batch.decodes, out, scale=1.0)
    assert [bool(row.isnan().all()) for row in out] == [False, True, False, False]
    assert not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_change_no_bit(num_threads: int) -> None:
    batch = Batch([400, 3, 250], heads=9, kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16)
    results, before = [], torch.get_num_threads()
    for count in (1, num_threads):
        torch.set_num_threads(count)
        try:
            out = torch.zeros_like(batch.queries)
            decode_attention(batch.queries, batch.cache, batch.decodes, out, scale=0.1)
        finally:
            torch.set_num_threads(before)
        results.append(out)
    assert torch.equal(*results)


def test_what_it_takes() -> None:
    assert can_decode(torch.float32, 64)
    assert can_decode(torch.bfloat16, 8)
    assert not can_decode(torch.float16, 64)
    assert not can_decode(torch.float32, 12)


def test_a_kernel_that_computes_wrongly_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(native.__file__).parent
    for name in ("decode_attention.c", "native_vectors.h"):
        text = (folder / name).read_text()
        (tmp_path / name).write_text(text.replace("* call->scale", "* (call->scale + 0.1f)"))
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    native_library.cache_clear()
    decode_function.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not module.can_decode(torch.float32, 64)
        (record,) = caplog.records
        assert "decode_attention.c, as compiled here, is not used" in record.message
    finally:
        native_library.cache_clear()
        decode_function.cache_clear()
