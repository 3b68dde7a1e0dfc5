# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The gated activation of a layer without adapters, in one launch, as serving engines have it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _gate_kernel(y, act, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(y + row * 2 * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(y + row * 2 * WIDTH + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(act + row * WIDTH + columns, (gate * tl.sigmoid(gate) * up).to(act.dtype.element_ty), mask=mask)


def gate(y: Tensor) -> Tensor:
    """`silu(gate) * up` of contiguous `[T, 2*I]`, gate first; `[T, I]` in y's dtype, rounded once."""
    rows, width = y.shape[0], y.shape[1] // 2
    act = torch.empty(rows, width, dtype=y.dtype, device=y.device)
    _gate_kernel[(rows, triton.cdiv(width, _BLOCK))](y, act, width, _BLOCK, enable_fp_fusion=True)
    return act
