"""What a decoder layer does to each row beside its products, on the CPU in C: see `row_operations.c`, which this calls.

torch computes each of them in several passes over its input, in bf16 with copies to fp32 between.
"""

import struct
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.native import checked_functions

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Data types that the C source takes, with the numbers by which it knows them."""

_CALL = struct.Struct("=3Qq4i2f")
"""The struct `Call` of the C source."""

_SMALLEST_SHARE = 1 << 16
"""Values that a thread should have at least: about 10 us."""

_TOLERANCE = 1e-5


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Root-mean-square normalisation (arXiv 1910.07467).

    Semantics, for each row:
        out = x / sqrt(mean(x ** 2) + eps) * (offset + weight)          (fp32, one rounding)

    Args:
        x: `[..., size]`.
        weight: `[size]`, x's dtype.
        eps: What keeps a row of zeros finite.
        offset: 1 where the weight is stored as the difference from 1.

    Returns:
        A new contiguous tensor of x's shape and dtype.
    """
    # A gradient is torch's to compute.
    is_trained = torch.is_grad_enabled() and weight.requires_grad
    rows = _rows(x) if weight.dtype == x.dtype and weight.is_contiguous() and not is_trained else None
    functions = row_functions() if rows is not None else None
    if rows is None or functions is None:
        if offset:
            return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).type_as(x)
        return F.rms_norm(x, weight.shape, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype)
    _call(functions[0], rows, out, weight, rows.shape[1], eps, offset)
    return out


def gate(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` `[T, I]` of gate and up side by side `[T, 2*I]`; in C in fp32, with one rounding."""
    rows = _rows(gate_up)
    functions = row_functions() if rows is not None else None
    if rows is None or functions is None:
        gates, up = gate_up.chunk(2, -1)
        return F.silu(gates).mul_(up)
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype)
    _call(functions[1], rows, out, None, width, 0.0, 0.0)
    return out


def _rows(x: Tensor) -> Tensor | None:
    """x as a matrix, where the C source can read it."""
    if x.device.type != "cpu" or x.dtype not in DTYPES or x.requires_grad or torch.compiler.is_compiling():
        return None
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else None


def _call(function: Any, x: Tensor, out: Tensor, weight: Tensor | None, width: int, eps: float, offset: float) -> None:
    num_rows = x.shape[0]
    num_threads = min(torch.get_num_threads(), 1 + num_rows * width // _SMALLEST_SHARE)
    # In the order of the C source's struct.
    packed = _CALL.pack(
        x.data_ptr(), out.data_ptr(), 0 if weight is None else weight.data_ptr(), x.stride(0),
        DTYPES[x.dtype], num_rows, width, num_threads, eps, offset,
    )  # fmt: skip
    function(packed)


@cache
def row_functions() -> tuple[Any, ...] | None:
    """The compiled functions of `rms_norm` and `gate`; None where there are none, or where they compute wrongly."""
    return checked_functions("row_operations.c", ["lora_fleet_rms_norm", "lora_fleet_gate"], _fault)


def _fault(functions: tuple[Any, ...]) -> str | None:
    """What is wrong with the functions, found by a few rows; None where they are right."""
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x, weight = torch.randn(3, 74, generator=generator), torch.randn(74, generator=generator)
        normed, gated = torch.empty(3, 74), torch.empty(3, 37)
        _call(functions[0], x, normed, weight, 74, 1e-5, 1.0)
        _call(functions[1], x, gated, None, 37, 0.0, 0.0)
        exact = x.double()
        expected = exact * torch.rsqrt((exact**2).mean(1, keepdim=True) + 1e-5) * (weight.double() + 1)
        wrong = float((normed.double() - expected).abs().max())
        gates, up = exact.chunk(2, 1)
        wrong = max(wrong, float((gated.double() - F.silu(gates) * up).abs().max()))
    return None if wrong < _TOLERANCE else f"an output of theirs differs by {wrong:g} from what is right"
