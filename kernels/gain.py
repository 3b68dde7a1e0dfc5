"""Per-adapter gains on a layer's output: what DoRA (arXiv 2402.09353) adds to a LoRA adapter."""

import torch
from torch import Tensor

from kernels import reference
from kernels.schedule import Routing
from kernels.sgmv import check_in_place

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_MAX_GATHERED_ROWS = 64
"""Rows of several adapters up to which the CPU path computes all of them at once."""


def scale_rows(y: Tensor, gain_stack: Tensor, bias: Tensor | None, routing: Routing, *, check: bool = True) -> None:
    """Scale each adapter row of a layer's output by its adapter's gains, leaving out the bias, in place.

    Semantics, for each group g with slot s, rows r and a true rank that is not 0:
        y[r] += gain_stack[s] * (y[r] - bias)            (in fp32, one rounding into y)

    Values whose gain is zero keep their bits, also infinities. Rows at or after `routing.end` are neither read nor
    written; nothing runs when there is no group. Slots not in use may hold anything.

    Args:
        y: The base layer's output `[T, OUT]`, bf16, fp16 or fp32, updated in place.
        gain_stack: fp32 `[N, OUT]`, DoRA's factor of each output, less one.
        bias: The base layer's bias `[OUT]` of y's dtype, which is part of y and not scaled; or None.
        routing: The step's routing, on y's device.
        check: Whether to compare the arguments; see `kernels.sgmv.sgmv`.

    Raises:
        ValueError: shapes, dtypes, devices or layouts disagree (both sides are named).
    """
    if not routing.groups:
        return
    if check:
        _check(y, gain_stack, bias, routing)
    if routing.tiles is None:
        plain = _scale_rows_cpu if routing.path == "cpu" else reference.scale_rows
        plain(y, gain_stack, bias, routing)
    else:
        torch.ops.lora_fleet.scale_rows(y, gain_stack, bias, routing.tiles, routing.block_m)


def _scale_rows_cpu(y: Tensor, gain_stack: Tensor, bias: Tensor | None, routing: Routing) -> None:
    groups = [group for group in routing.groups if routing.slot_ranks[group.slot]]
    num_rows = sum(stop - start for _, start, stop in groups)
    if len(groups) == 1 or num_rows > _MAX_GATHERED_ROWS:
        for slot, start, stop in groups:
            rows = y[start:stop]
            rows.add_(_change(rows, gain_stack[slot], bias))
    elif groups:
        # A step decodes a row or two of each adapter: what an operator costs counts, not a copy of its gains.
        index, slots = routing.row_slots
        rows = y.index_select(0, index)
        y.index_copy_(0, index, rows.add_(_change(rows, gain_stack.index_select(0, slots), bias)))


def _change(rows: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 `gain * (rows - bias)`; -0.0, which changes no bit of a sum, where the gain is 0, also of infinity."""
    wide = rows.float()
    return torch.where(gain == 0, -0.0, (wide if bias is None else wide - bias).mul(gain))


def _check(y: Tensor, gain_stack: Tensor, bias: Tensor | None, routing: Routing) -> None:
    if y.dim() != 2 or gain_stack.dim() != 2 or y.shape[1] != gain_stack.shape[1]:
        raise ValueError(
            f"y has shape {list(y.shape)} and gain_stack {list(gain_stack.shape)}, expected [T, OUT], [N, OUT]"
        )
    if y.dtype not in _DTYPES or gain_stack.dtype != torch.float32:
        raise ValueError(
            f"y is {y.dtype} and gain_stack {gain_stack.dtype}, "
            f"expected one of {', '.join(map(str, _DTYPES))}, and torch.float32"
        )
    if bias is not None and (tuple(bias.shape) != (y.shape[1],) or bias.dtype != y.dtype or bias.device != y.device):
        raise ValueError(
            f"bias is {bias.dtype} {list(bias.shape)} on {bias.device}, "
            f"expected {y.dtype} [{y.shape[1]}] on {y.device} as y is"
        )
    if not y.device == gain_stack.device == routing.buffer.device:
        raise ValueError(
            f"y is on {y.device}, gain_stack on {gain_stack.device} and the routing on {routing.buffer.device}, "
            "expected one device"
        )
    check_in_place(y)
    if not gain_stack.is_contiguous():
        raise ValueError(f"gain_stack has strides {gain_stack.stride()}, expected contiguous")
    if len(routing.slot_ranks) != gain_stack.shape[0]:
        raise ValueError(
            f"gain_stack has {gain_stack.shape[0]} slots, the routing {len(routing.slot_ranks)} slot_ranks"
        )
    if y.shape[0] < routing.end:
        raise ValueError(f"y has {y.shape[0]} rows, fewer than the routing's end, row {routing.end}")


def _triton_scale_rows(y: Tensor, gain_stack: Tensor, bias: Tensor | None, tiles: Tensor, block_m: int) -> None:
    from kernels.sgmv_launch import scale_launch

    scale_launch(y, gain_stack, None if bias is None else bias.contiguous(), tiles, block_m).run()


def _fake_scale_rows(y: Tensor, gain_stack: Tensor, bias: Tensor | None, tiles: Tensor, block_m: int) -> None:
    return None


torch.library.define(
    "lora_fleet::scale_rows", "(Tensor(y!) y, Tensor gain_stack, Tensor? bias, Tensor tiles, int block_m) -> ()"
)
torch.library.impl("lora_fleet::scale_rows", ("cpu", "cuda"), _triton_scale_rows)
torch.library.register_fake("lora_fleet::scale_rows", _fake_scale_rows)
