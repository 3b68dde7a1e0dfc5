"""Causal attention over a paged KV cache on the CPU, in C: `attention_native.c`, which this calls."""

import ctypes
import struct
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.native import checked_functions

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Data types of queries and cache that it takes, with the numbers by which the C source knows them."""

VECTOR = 8
"""A head's width is a multiple of this."""

_CALL = struct.Struct("=7Q3q10i2f")
"""The struct `Call` of the C source."""

_SMALLEST_SHARE = 1 << 15
"""Values of keys and values that a thread should have to read at least: about 5 us."""

_LONGEST_WINDOW = 1 << 30
"""Longer ones, which reach past any sequence, are taken for this."""

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class PagedSequences(NamedTuple):
    """A step's sequences, as the C source reads them.

    Attributes:
        rows: int32 `[count]`, first token row of each.
        counts: int32 `[count]`, its rows: at least 1.
        lengths: int32 `[count]`, its tokens, those of its rows last.
        tables: int32 `[count, most blocks]`, contiguous, its blocks.
        addresses: Of these four arrays, which numpy takes a while to tell: once a step, not in every layer.
        num_reads: Tokens that are read for each KV head, at most.
    """

    rows: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    addresses: tuple[int, ...]
    num_reads: int

    @classmethod
    def of(
        cls, rows: npt.NDArray[Any], counts: npt.NDArray[Any], lengths: npt.NDArray[Any], tables: npt.NDArray[Any]
    ) -> "PagedSequences":
        """From arrays of any whole numbers; at least one sequence."""
        arrays = tuple(np.ascontiguousarray(array, np.int32) for array in (rows, counts, lengths, tables))
        addresses = tuple(array.ctypes.data for array in arrays)
        num_reads = int((counts * lengths).sum())
        return cls(arrays[0], arrays[1], arrays[2], arrays[3], addresses, num_reads)


def can_attend(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `attend_native` is there, and takes a cache of this data type and width of a head."""
    return head_dim % VECTOR == 0 and attention_function(dtype) is not None


def attend_native(
    queries: Tensor,
    cache: Tensor,
    sequences: PagedSequences,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Attention of each row to its sequence, as far as itself, into the same rows of `out`.

    Semantics, for query head h of a row at position p of its sequence, with g = num_heads / num_kv_heads, cap(s) = s
    without a softcap or softcap * tanh(s / softcap), and from = 0 without a window or max(0, p + 1 - window):
        out[h] = softmax(cap(scale * q[h] @ K[from:p + 1, h // g].T)) @ V[from:p + 1, h // g]   (fp32, one rounding)

    What a row gets does not depend on the other sequences, nor on how many rows its own has beside it, if any.

    Args:
        queries: `[T, num_heads, head_dim]`, fp32, bf16 or fp16 on the CPU, a row's values together.
        cache: `[2, blocks, num_kv_heads, block_size, head_dim]`, keys first, contiguous, of the same data type.
        sequences: Those of the step. What a block holds past its sequence's tokens is not read.
        out: As queries; rows of no sequence are left alone.
        scale: Of the scores.
        window: Tokens a token attends to, itself included; None: all.
        softcap: Bound on the scores' absolute value; None: no bound.
    """
    function = attention_function(queries.dtype)
    assert function is not None, "callers ask whether it is there"
    _call(function, queries, cache, sequences, out, scale, min(window or 0, _LONGEST_WINDOW), softcap or 0.0)


def _call(
    function: Any,
    queries: Tensor,
    cache: Tensor,
    sequences: PagedSequences,
    out: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    _, num_heads, head_dim = queries.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    num_values = 2 * sequences.num_reads * num_kv_heads * head_dim
    num_threads = min(torch.get_num_threads(), 1 + num_values // _SMALLEST_SHARE)
    # In the order of the C source's struct, which counts in it the units of work that were taken.
    call = ctypes.create_string_buffer(
        _CALL.pack(
            queries.data_ptr(), cache.data_ptr(), out.data_ptr(), *sequences.addresses,
            queries.stride(0), out.stride(0), cache.stride(0),
            DTYPES[queries.dtype], len(sequences.rows), num_heads, num_kv_heads, head_dim, block_size,
            sequences.tables.shape[1], window, num_threads, 0,
            scale, softcap,
        )
    )  # fmt: skip
    function(call)


@cache
def attention_function(dtype: torch.dtype) -> Any | None:
    """The compiled function, which takes a packed `Call`; None where it serves the data type wrongly, or not at all."""
    if dtype not in DTYPES:
        return None
    functions = checked_functions("attention_native.c", ["lora_fleet_attention"], partial(_fault, dtype))
    return None if functions is None else functions[0]


def _fault(dtype: torch.dtype, functions: tuple[Any, ...]) -> str | None:
    """What is wrong with the function, found by three short sequences; None where it is right."""
    (function,) = functions
    # The last one has more tokens than are packed at a time.
    counts, lengths, tables = np.array([1, 1, 20]), np.array([21, 3, 140]), 26 - np.arange(27).reshape(3, 9)
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        sizes = (22, 4, 16), (2, 27, 2, 16, 16)
        queries, cache = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
        out, rows = torch.empty_like(queries), np.cumsum(counts) - counts
        _call(function, queries, cache, PagedSequences.of(rows, counts, lengths, tables), out, 0.3, 0, 0.0)
        errors = []
        for row, count, length, table in zip(rows, counts, lengths, tables, strict=True):
            keys, values = (plane[table].transpose(1, 2).reshape(-1, 2, 16).double() for plane in cache)
            for index, head in np.ndindex(count, 4):
                end, query = length - count + index + 1, queries[row + index, head].double()
                expected = torch.softmax(0.3 * keys[:end, head // 2] @ query, 0) @ values[:end, head // 2]
                errors.append((out[row + index, head].double() - expected).abs().max())
        # The largest as torch sees it: what is no number is.
        wrong = float(torch.stack(errors).max())
    if wrong < _TOLERANCE[dtype]:
        return None
    return f"an output of its in {dtype} differs by {wrong:g} from what is right"
