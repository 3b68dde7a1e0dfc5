"""Attention of decoding sequences over a paged KV cache on the CPU, in C: `decode_attention.c`, which this calls."""

import ctypes
import struct
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.native import checked_functions

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Data types of queries and cache that it takes, with the numbers by which the C source knows them."""

VECTOR = 8
"""A head's width is a multiple of this."""

_CALL = struct.Struct("=7Q4q10i2f")
"""The struct `Call` of the C source."""

_SMALLEST_SHARE = 1 << 15
"""Values of keys and values that a thread should have to read at least: about 5 us."""

_TOLERANCE = 1e-5


class Decodes(NamedTuple):
    """Sequences with one new token each, as the C source reads them.

    Attributes:
        rows: int32 `[count]`, the token row of each.
        lengths: int32 `[count]`, its tokens, the new one included: at least 1.
        tables: int32 `[count, most blocks]`, contiguous, its blocks.
        num_tokens: Sum of the lengths.
        longest: The largest of them.
    """

    rows: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    num_tokens: int
    longest: int

    @classmethod
    def of(cls, rows: npt.NDArray[Any], lengths: npt.NDArray[Any], tables: npt.NDArray[Any]) -> "Decodes":
        """From arrays of any whole numbers; at least one sequence."""
        return cls(
            np.ascontiguousarray(rows, np.int32),
            np.ascontiguousarray(lengths, np.int32),
            np.ascontiguousarray(tables, np.int32),
            int(lengths.sum()),
            int(lengths.max()),
        )


def can_decode(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `decode_attention` is there, and takes a cache of this data type and width of a head."""
    return dtype in DTYPES and head_dim % VECTOR == 0 and decode_function() is not None


def decode_attention(
    queries: Tensor,
    cache: Tensor,
    decodes: Decodes,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Attention of each sequence's new token to its sequence, into the same rows of `out`.

    Semantics, for query head h of a sequence of L tokens, with g = num_heads / num_kv_heads, cap(s) = s without a
    softcap or softcap * tanh(s / softcap), and from = 0 without a window or max(0, L - window):
        out[h] = softmax(cap(scale * q[h] @ K[from:L, h // g].T)) @ V[from:L, h // g]     (fp32, one rounding)

    Args:
        queries: `[T, num_heads, head_dim]`, fp32 or bf16 on the CPU, a row's values together.
        cache: `[2, blocks, num_kv_heads, block_size, head_dim]`, keys first, contiguous, of the same data type.
        decodes: The sequences. What a block holds past its sequence's tokens is not read.
        out: As queries; other rows are left alone.
        scale: Of the scores.
        window: Tokens a token attends to, itself included; None: all.
        softcap: Bound on the scores' absolute value; None: no bound.
    """
    function = decode_function()
    assert function is not None, "callers ask whether it is there"
    _call(function, queries, cache, decodes, out, scale, window or 0, softcap or 0.0)


def _call(
    function: Any,
    queries: Tensor,
    cache: Tensor,
    decodes: Decodes,
    out: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    _, num_heads, head_dim = queries.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    group, longest = num_heads // num_kv_heads, min(decodes.longest, window or decodes.longest)
    scratch_size = 2 * group * head_dim + group * -(-longest // VECTOR) * VECTOR
    num_values = 2 * decodes.num_tokens * num_kv_heads * head_dim
    num_threads = min(torch.get_num_threads(), 1 + num_values // _SMALLEST_SHARE)
    scratch = torch.empty(num_threads * scratch_size)
    # In the order of the C source's struct.
    call = ctypes.create_string_buffer(
        _CALL.pack(
            queries.data_ptr(), cache.data_ptr(), out.data_ptr(),
            decodes.rows.ctypes.data, decodes.lengths.ctypes.data, decodes.tables.ctypes.data, scratch.data_ptr(),
            queries.stride(0), out.stride(0), cache.stride(0), scratch_size,
            DTYPES[queries.dtype], len(decodes.rows), num_heads, num_kv_heads, head_dim, block_size,
            decodes.tables.shape[1], window, num_threads, 0,
            scale, softcap,
        )
    )  # fmt: skip
    function(call)


@cache
def decode_function() -> Any | None:
    """The compiled function, which takes a packed `Call`; None where there is none, or where it computes wrongly."""
    functions = checked_functions("decode_attention.c", ["lora_fleet_decode_attention"], _fault)
    return None if functions is None else functions[0]


def _fault(functions: tuple[Any, ...]) -> str | None:
    """What is wrong with the function, found by two short sequences; None where it is right."""
    (function,) = functions
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        queries, cache = (torch.randn(size, generator=generator) for size in ((2, 4, 16), (2, 3, 2, 16, 16)))
        out, lengths, tables = torch.empty_like(queries), (21, 3), ((2, 0), (1, 1))
        _call(function, queries, cache, Decodes.of(np.arange(2), np.array(lengths), np.array(tables)), out, 0.3, 0, 0.0)
        wrong = 0.0
        for row, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            for head in range(4):
                keys, values = (plane[list(table), head // 2].reshape(-1, 16)[:length].double() for plane in cache)
                expected = torch.softmax(0.3 * keys @ queries[row, head].double(), 0) @ values
                wrong = max(wrong, float((out[row, head].double() - expected).abs().max()))
    return None if wrong < _TOLERANCE else f"an output of its differs by {wrong:g} from what is right"
