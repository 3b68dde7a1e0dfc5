"""SGMV for short groups on the CPU, in C: see `sgmv_native.c`, which this calls."""

import ctypes
import struct
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.loops import Loop, Segment
from kernels.native import checked_functions

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Data types that it takes, one for x, y and the stacks, with the numbers by which the C source knows them."""

_CALL = struct.Struct("=7Q2q8i")
"""The struct `Call` of the C source."""

MAX_RANK = 256
"""Of a slot, as in the C source."""

_SMALLEST_SHARE = 1 << 15
"""Products that a thread should have at least: about 5 us, three times what waking it up takes."""

_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-8}
"""Of sums of 41 and 13 products of numbers about 1, added up in fp32: those of bf16, but for the result's rounding."""


def sgmv_native(x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, loop: Loop, slices: tuple[int, ...]) -> None:
    """Add the deltas of a loop's segments to `y` in place; see `kernels.sgmv.sgmv` for the semantics.

    Args:
        x: The loop's rows of activations `[rows, K]`, fp32 or bf16.
        a_stack: `[N, S*R, K]`, x's dtype, contiguous.
        b_stack: `[N, OUT, R]`, x's dtype, contiguous; R is at most `MAX_RANK`.
        y: The loop's rows `[rows, OUT]`, x's dtype, updated in place with one rounding.
        loop: Their slots.
        slices: Output widths of the S projections; they add up to OUT.
    """
    _call(_function(), x, a_stack, b_stack, y, loop, slices)


def expand_native(low: Tensor, b_stack: Tensor, y: Tensor, loop: Loop) -> None:
    """Add `low @ b_stack[s].T` of each segment's rows and slot to `y` in place.

    Args:
        low: fp32 `[rows, R]`, contiguous; columns past a slot's true rank may hold anything.
        b_stack: `[N, OUT, R]`, fp32 or bf16, contiguous; R is at most `MAX_RANK`.
        y: The loop's rows `[rows, OUT]`, b_stack's dtype, updated in place with one rounding.
        loop: Their slots.
    """
    _, out, max_rank = b_stack.shape
    packed = _CALL.pack(
        0, y.data_ptr(), 0, b_stack.data_ptr(), loop.array[0], _int32((out,))[0], low.data_ptr(), 0, y.stride(0),
        DTYPES[y.dtype], 0, out, max_rank, 1, len(loop.segments), _num_threads(loop, out), 0,
    )  # fmt: skip
    _function()(packed)


def _call(
    function: Any, x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, loop: Loop, slices: tuple[int, ...]
) -> None:
    (num_rows, width), (_, out, max_rank), projections = x.shape, b_stack.shape, len(slices)
    scratch = torch.empty(num_rows * projections * max_rank)
    # In the order of the C source's struct.
    packed = _CALL.pack(
        x.data_ptr(), y.data_ptr(), a_stack.data_ptr(), b_stack.data_ptr(), loop.array[0], _int32(slices)[0],
        scratch.data_ptr(), x.stride(0), y.stride(0),
        DTYPES[x.dtype], width, out, max_rank, projections,
        len(loop.segments), _num_threads(loop, projections * width + out), 0,
    )  # fmt: skip
    function(packed)


def _num_threads(loop: Loop, width: int) -> int:
    return min(torch.get_num_threads(), 1 + loop.num_rank_rows * width // _SMALLEST_SHARE)


def _function() -> Any:
    function = sgmv_function()
    assert function is not None, "callers ask whether there is one"
    return function


@cache
def sgmv_function() -> Any | None:
    """The compiled function, which takes a packed `Call`; None where there is none, or where it computes wrongly."""
    functions = checked_functions("sgmv_native.c", ["lora_fleet_sgmv"], _fault)
    return None if functions is None else functions[0]


def _fault(functions: tuple[Any, ...]) -> str | None:
    """What is wrong with the function, found by a small product in each data type; None where it is right."""
    (function,) = functions
    slices, rank, slots = (9, 24), 14, ((1, 0, 1, 14), (0, 1, 6, 5), (1, 6, 8, 13))
    for dtype, tolerance in _TOLERANCES.items():
        with torch.inference_mode(False), torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            sizes = (8, 41), (2, 2 * rank, 41), (2, 33, rank), (8, 33)
            x, a, b, y = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
            expected = y.double()
            for slot, start, stop, live in slots:
                for p, (target, weights) in enumerate(
                    zip(expected.split_with_sizes(slices, 1), b[slot].split_with_sizes(slices), strict=True)
                ):
                    low = x[start:stop].double() @ a[slot, p * rank : p * rank + live].double().t()
                    target[start:stop] += low @ weights[:, :live].double().t()
            _call(function, x, a, b, y, Loop(tuple(Segment(*slot) for slot in slots)), slices)
            wrong = float(((y.double() - expected).abs() / expected.abs().clamp(min=1)).max())
        if not wrong < tolerance:
            return f"a product of its in {dtype} differs by {wrong:g} from what is right"
    return None


@lru_cache(maxsize=256)
def _int32(numbers: tuple[int, ...]) -> "tuple[int, ctypes.Array[Any]]":
    """The numbers as C reads them, and their address."""
    array = (ctypes.c_int32 * len(numbers))(*numbers)
    return ctypes.addressof(array), array
