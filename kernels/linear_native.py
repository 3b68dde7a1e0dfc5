"""Linear layers of 16 bits on processors that multiply fp32 alone, in C: see `linear_native.c`, which this calls.

torch multiplies bf16 there, and fp16 nearly everywhere, value by value: many rows at a seventh of the rate of fp32.
"""

import struct
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from kernels.native import checked_functions

DTYPES = {torch.bfloat16: 1, torch.float16: 2}
"""Data types that the C source takes, with the numbers by which it knows them."""

_CALL = struct.Struct("=4Qq6i")
"""The struct `Call` of the C source."""

_SMALLEST_SHARE = 1 << 16
"""Products that a thread should have at least: about 5 us."""


def linear_native(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, summed in fp32 and rounded once; what a row gets does not depend on the others.

    Args:
        x: `[rows, in_features]`, bf16 or fp16, a row's values side by side.
        weight: `[out_features, in_features]` of the same data type, contiguous.
        bias: `[out_features]`, likewise; None: nothing is added.

    Returns:
        `[rows, out_features]`, a new tensor.
    """
    function = linear_function(x.dtype)
    assert function is not None, "callers ask whether there is one"
    return _call(function, x, weight, bias)


@cache
def linear_function(dtype: torch.dtype) -> Any | None:
    """The compiled function, which takes a packed `Call`; None where it serves the data type wrongly, or not at all."""
    if dtype not in DTYPES:
        return None
    functions = checked_functions("linear_native.c", ["lora_fleet_linear"], partial(_fault, dtype))
    return None if functions is None else functions[0]


def _call(function: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (num_rows, width), num_outs = x.shape, weight.shape[0]
    y = torch.empty(num_rows, num_outs, dtype=x.dtype)
    num_threads = min(torch.get_num_threads(), 1 + num_rows * width * num_outs // _SMALLEST_SHARE)
    # In the order of the C source's struct.
    packed = _CALL.pack(
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(),
        x.stride(0), DTYPES[x.dtype], num_rows, width, num_outs, num_threads, 0,
    )  # fmt: skip
    function(packed)
    return y


def _fault(dtype: torch.dtype, functions: tuple[Any, ...]) -> str | None:
    """What is wrong with the function, found by a small product; None where it is right."""
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((38, 43), (29, 43), (29,)))
        found = _call(functions[0], x, weight, bias).double()
        expected = x.double() @ weight.double().t() + bias.double()
        wrong = float(((found - expected).abs() / expected.abs().clamp(min=1)).max())
    return (
        None
        if wrong < torch.finfo(dtype).eps
        else f"a product of its in {dtype} differs by {wrong:g} from what is right"
    )
