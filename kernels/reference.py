"""The fp32 truth of every operation, in plain torch: one loop, no tiles, no tricks. Tests compare with it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.schedule import Routing

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Of the gate of `sgmv_swiglu`, by the names transformers gives them."""


def sgmv_shrink(x: Tensor, a_stack: Tensor, routing: Routing, projections: int) -> Tensor:
    """As `kernels.sgmv.sgmv_shrink`, with one plane; columns past a slot's true rank and rows at `end` on are zero."""
    width = a_stack.shape[1]
    planes = torch.zeros(1, x.shape[0], width, dtype=torch.float32, device=x.device)
    for slot, start, stop in routing.groups:
        for first in range(0, width, width // projections):
            live = slice(first, first + routing.slot_ranks[slot])
            planes[0, start:stop, live] = x[start:stop].float() @ a_stack[slot, live].float().t()
    return planes


def sgmv_expand(planes: Tensor, b_stack: Tensor, y: Tensor, routing: Routing, slices: Sequence[int]) -> None:
    """As `kernels.sgmv.sgmv_expand`: the planes' sum is rounded once to B's dtype, the result once to y's."""
    v = planes.sum(0)
    for slot, start, stop in routing.groups:
        rank = routing.slot_ranks[slot]
        for projection, column, width in _spans(slices):
            first = projection * b_stack.shape[2]
            low = v[start:stop, first : first + rank].to(b_stack.dtype).float()
            target = y[start:stop, column : column + width]
            target.copy_(target.float() + low @ b_stack[slot, column : column + width, :rank].float().t())


def sgmv(x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, routing: Routing, slices: Sequence[int]) -> None:
    """As `kernels.sgmv.sgmv`, on any device."""
    sgmv_expand(sgmv_shrink(x, a_stack, routing, len(slices)), b_stack, y, routing, slices)


def sgmv_swiglu(
    x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, routing: Routing, activation: str = "silu"
) -> Tensor:
    """As `kernels.swiglu.sgmv_swiglu`, on any device."""
    adapted = y.clone()
    width = y.shape[1] // 2
    sgmv(x, a_stack, b_stack, adapted, routing, (width, width))
    return gate(adapted, activation)


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """`activation(gate) * up` of `[T, 2*I]`, with torch's own operators and their roundings."""
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate).mul_(up)


def sgmv_embed(ids: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, routing: Routing) -> None:
    """As `kernels.embedding.sgmv_embed`, on any device: v is A's rows, exact in B's dtype, the result rounded once."""
    for slot, start, stop in routing.groups:
        rank = routing.slot_ranks[slot]
        v = a_stack[slot, ids[start:stop], :rank].float()
        y[start:stop] = (y[start:stop].float() + v @ b_stack[slot, :, :rank].float().t()).to(y.dtype)


def scale_rows(y: Tensor, gain_stack: Tensor, bias: Tensor | None, routing: Routing) -> None:
    """As `kernels.gain.scale_rows`, on any device: in fp32, rounded once; a gain of zero keeps y's bits."""
    for slot, start, stop in routing.groups:
        if routing.slot_ranks[slot]:
            rows, gain = y[start:stop].float(), gain_stack[slot]
            scaled = rows + gain * (rows if bias is None else rows - bias.float())
            y[start:stop] = torch.where(gain == 0, rows, scaled).to(y.dtype)


def _spans(slices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Index, first column and width of each slice."""
    column = 0
    for index, width in enumerate(slices):
        yield index, column, width
        column += width
