"""What a decoder layer does to each row beside its products, on the CPU in C: see `row_operations.c`, which this calls.

torch computes each of them in several passes over its input, in bf16 with copies to fp32 between.
"""

import struct
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.native import checked_functions

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Data types that the C source takes, with the numbers by which it knows them."""

_NAMES = ("rms_norm", "join", "gate", "rotate")

_CALL = struct.Struct("=7Q2q6i3f")
"""The struct `Call` of the C source."""

_SMALLEST_SHARE = 1 << 16
"""Values that a thread should have at least: about 10 us."""

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 5e-3}


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
    rows = _rows(x) if _is_served(x) and _is_weight(weight, x) else None
    if rows is None:
        if offset:
            return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).type_as(x)
        return F.rms_norm(x, weight.shape, weight, eps)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _call("rms_norm", rows, rows.shape[1], out=out, weight=weight, eps=eps, offset=offset)
    return out


def join(
    x: Tensor, part: Tensor, scale: float, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, and normalise that.

    Semantics:
        joined = x + scale * part;  normed = rms_norm(joined, weight, eps, offset)

    Args:
        x: `[T, size]`.
        part: As x.
        scale: Of what is added.
        weight: As in `rms_norm`.
        eps: The same.
        offset: The same.

    Returns:
        joined, normed: new contiguous tensors.
    """
    is_served = _is_served(x) and _is_served(part) and _is_weight(weight, x) and x.shape == part.shape
    if not is_served or x.dtype != part.dtype or x.stride(1) != 1 or part.stride(1) != 1:
        joined = torch.add(x, part, alpha=scale)
        return joined, rms_norm(joined, weight, eps, offset)
    joined, normed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    _call(
        "join", x, x.shape[1], out=normed, weight=weight, part=part, joined=joined, eps=eps, offset=offset, scale=scale
    )
    return joined, normed


def gate(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` `[T, I]` of gate and up side by side `[T, 2*I]`; in C in fp32, with one rounding."""
    rows = _rows(gate_up) if _is_served(gate_up) else None
    if rows is None:
        gates, up = gate_up.chunk(2, -1)
        return F.silu(gates).mul_(up)
    width = gate_up.shape[-1] // 2
    out = torch.empty(rows.shape[0], width, dtype=gate_up.dtype)
    _call("gate", rows, width, out=out)
    return out if gate_up.dim() == 2 else out.view(*gate_up.shape[:-1], width)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads in place, in pairs of channels: of the n that turn, i together with i + n / 2.

    Semantics, for each row and head, with j = (i + n / 2) mod n:
        head[i] = head[i] * cos[i] + head[j] * sin[i]                   (in C in fp32, one rounding)

    Args:
        heads: `[T, heads, head_dim]`, of which the first n channels turn.
        cos: `[T, 1, n]`, heads' dtype.
        sin: The same, negative for the first half of the channels.
    """
    num_rotated = cos.shape[-1]
    is_packed = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    if is_packed and _is_served(heads) and cos.dtype == heads.dtype and cos.is_contiguous() and sin.is_contiguous():
        _call("rotate", heads, num_rotated, cos=cos, sin=sin, heads=heads.shape[1], dim=heads.shape[2])
        return
    heads = heads[..., :num_rotated]
    partners = heads.roll(num_rotated // 2, -1)
    heads.mul_(cos).addcmul_(partners, sin)


def _is_served(x: Tensor) -> bool:
    """Whether the C source is for this tensor; a gradient is torch's to compute, and compiled code the compiler's."""
    is_plain = x.is_cpu and x.dtype in DTYPES and not x.requires_grad and not torch.compiler.is_compiling()
    return is_plain and row_functions(x.dtype) is not None


def _is_weight(weight: Tensor, x: Tensor) -> bool:
    is_trained = weight.requires_grad and torch.is_grad_enabled()
    return weight.dtype == x.dtype and weight.is_contiguous() and not is_trained


def _rows(x: Tensor) -> Tensor | None:
    """x as a matrix, where the C source can read it."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else None


def _call(
    name: str, x: Tensor, width: int, *,
    out: Tensor | None = None, weight: Tensor | None = None, part: Tensor | None = None, joined: Tensor | None = None,
    cos: Tensor | None = None, sin: Tensor | None = None, heads: int = 1, dim: int = 0,
    eps: float = 0.0, offset: float = 0.0, scale: float = 0.0, functions: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Call a function of the C source, whose struct names the arguments; `functions` are those of `row_functions`."""
    num_rows = x.shape[0]
    num_threads = min(torch.get_num_threads(), 1 + num_rows * heads * width // _SMALLEST_SHARE)
    functions = functions or row_functions(x.dtype)
    assert functions is not None, "callers ask whether they are there"
    # In the order of the C source's struct.
    packed = _CALL.pack(
        x.data_ptr(), 0 if out is None else out.data_ptr(), 0 if weight is None else weight.data_ptr(),
        0 if part is None else part.data_ptr(), 0 if joined is None else joined.data_ptr(),
        0 if cos is None else cos.data_ptr(), 0 if sin is None else sin.data_ptr(),
        x.stride(0), 0 if part is None else part.stride(0), DTYPES[x.dtype], num_rows, width, heads, dim, num_threads,
        eps, offset, scale,
    )  # fmt: skip
    functions[name](packed)


@cache
def row_functions(dtype: torch.dtype) -> dict[str, Any] | None:
    """The compiled functions by the names of `_NAMES`; None where they serve the data type wrongly, or not at all."""
    names = [f"lora_fleet_{name}" for name in _NAMES]
    functions = checked_functions("row_operations.c", names, partial(_fault, dtype))
    return None if functions is None else dict(zip(_NAMES, functions, strict=True))


def _fault(dtype: torch.dtype, found: tuple[Any, ...]) -> str | None:
    """What is wrong with the functions, found by a few rows; None where they are right."""
    functions = dict(zip(_NAMES, found, strict=True))
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x, part, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((3, 74), (3, 74), (74,)))
        normed, joined, joined_normed, gated = (torch.empty(3, width, dtype=dtype) for width in (74, 74, 74, 37))
        norm: dict[str, Any] = {"weight": weight, "eps": 1e-5, "offset": 1.0, "functions": functions}
        _call("rms_norm", x, 74, out=normed, **norm)
        _call("join", x, 74, out=joined_normed, part=part, joined=joined, scale=0.5, **norm)
        _call("gate", x, 37, out=gated, functions=functions)
        heads, cos, sin = x.clone(), part, part.flip(0).contiguous()
        _call("rotate", heads, 74, cos=cos, sin=sin, heads=1, dim=74, functions=functions)
        exact, both = x.double(), x.double() + 0.5 * part.double()
        gates, up = exact.chunk(2, 1)
        pairs = (
            (normed, _normed(exact, weight)),
            (joined, both),
            (joined_normed, _normed(both, weight)),
            (gated, F.silu(gates) * up),
            (heads, exact * cos.double() + exact.roll(37, 1) * sin.double()),
        )
        # The largest as torch sees it: what is no number is.
        wrong = float(torch.stack([(got.double() - expected).abs().max() for got, expected in pairs]).max())
    if wrong < _TOLERANCE[dtype]:
        return None
    return f"an output of theirs in {dtype} differs by {wrong:g} from what is right"


def _normed(exact: Tensor, weight: Tensor) -> Tensor:
    """`rms_norm` in fp64, with an offset of 1."""
    return exact * torch.rsqrt((exact**2).mean(1, keepdim=True) + 1e-5) * (weight.double() + 1)
