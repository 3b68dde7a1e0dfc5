"""Low-rank adapters of a token embedding: A is a table too, so the first half of the product is a lookup."""

import torch
from torch import Tensor

from kernels import reference
from kernels.schedule import Routing
from kernels.sgmv import check_in_place
from kernels.sgmv_cpu import sgmv_embed_cpu

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sgmv_embed(
    ids: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, routing: Routing, *, check: bool = True
) -> None:
    """Add each adapter row's low-rank embedding to y, in place.

    Semantics, for each group g with slot s and rows r:
        y[r] += a_stack[s, ids[r]] @ b_stack[s].T        (fp32 accumulation, one rounding into y)

    Rows at or after `routing.end` are neither read nor written; nothing runs when `end` is 0. The adapter's scale is
    already part of B. Of a slot in use, columns of A and of B past its true rank must be zero: they are skipped where
    that pays. Slots not in use may hold anything.

    Args:
        ids: Token of each row, int64 `[T]`, rows grouped by adapter, base rows last.
        a_stack: One table per slot `[N, V, R]`, a row for each of the V tokens. y's dtype; for fp16 on the CPU fp32.
        b_stack: One B per slot `[N, OUT, R]`, same dtype as a_stack.
        y: The base embedding `[T, OUT]`, bf16, fp16 or fp32, updated in place.
        routing: The step's routing, on y's device.
        check: Whether to compare the arguments; see `kernels.sgmv.sgmv`.

    Raises:
        ValueError: shapes, dtypes, devices or layouts disagree (both sides are named).
        IndexError: without a tile table, an adapter row's token is not among the V.
    """
    if routing.end == 0:
        return
    if check:
        _check(ids, a_stack, b_stack, y, routing)
    if routing.tiles is None:
        plain = sgmv_embed_cpu if routing.path == "cpu" else reference.sgmv_embed
        plain(ids, a_stack, b_stack, y, routing)
        return
    planes = torch.ops.lora_fleet.sgmv_gather(ids, a_stack, routing.tiles, routing.block_m)
    torch.ops.lora_fleet.sgmv_expand(
        planes, b_stack, y, routing.tiles, routing.block_m, routing.max_groups, [y.shape[1]]
    )


def _check(ids: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, routing: Routing) -> None:
    if ids.dim() != 1 or ids.dtype != torch.int64 or not ids.is_contiguous():
        raise ValueError(f"ids is {ids.dtype} {list(ids.shape)}, expected contiguous torch.int64 [T]")
    if y.dim() != 2 or y.shape[0] != ids.shape[0]:
        raise ValueError(f"y has shape {list(y.shape)}, expected [{ids.shape[0]}, OUT] as there are ids")
    check_in_place(y)
    if ids.shape[0] < routing.end:
        raise ValueError(f"ids has {ids.shape[0]} rows, fewer than the routing's end, row {routing.end}")
    if a_stack.dim() != 3 or tuple(b_stack.shape) != (a_stack.shape[0], y.shape[1], a_stack.shape[2]):
        raise ValueError(
            f"a_stack has shape {list(a_stack.shape)} and b_stack {list(b_stack.shape)}, "
            f"expected [N, V, R] and [N, {y.shape[1]}, R]"
        )
    num_slots, _, rank = a_stack.shape
    if len(routing.slot_ranks) != num_slots or routing.max_rank > rank:
        raise ValueError(
            f"a_stack has {num_slots} slots of rank {rank}, the routing {len(routing.slot_ranks)} slot_ranks "
            f"up to {routing.max_rank}"
        )
    expected = routing.stack_dtype(y.dtype)
    if y.dtype not in _DTYPES or not a_stack.dtype == b_stack.dtype == expected:
        raise ValueError(
            f"y is {y.dtype}, a_stack {a_stack.dtype} and b_stack {b_stack.dtype}; expected y of "
            f"{', '.join(map(str, _DTYPES))} and stacks in {expected}: y's dtype, but fp32 for fp16 on the CPU"
        )
    if not ids.device == a_stack.device == b_stack.device == y.device == routing.buffer.device:
        raise ValueError(
            f"ids is on {ids.device}, a_stack on {a_stack.device}, b_stack on {b_stack.device}, y on {y.device} and "
            f"the routing on {routing.buffer.device}, expected one device"
        )
    if not a_stack.is_contiguous() or not b_stack.is_contiguous():
        raise ValueError(f"a_stack has strides {a_stack.stride()}, b_stack {b_stack.stride()}, expected contiguous")


def _triton_gather(ids: Tensor, a_stack: Tensor, tiles: Tensor, block_m: int) -> Tensor:
    from kernels.sgmv_launch import gather_launch

    planes, launch = gather_launch(ids, a_stack, tiles, block_m)
    launch.run()
    return planes


def _fake_gather(ids: Tensor, a_stack: Tensor, tiles: Tensor, block_m: int) -> Tensor:
    return ids.new_empty((1, ids.shape[0], a_stack.shape[2]), dtype=torch.float32)


torch.library.define("lora_fleet::sgmv_gather", "(Tensor ids, Tensor a_stack, Tensor tiles, int block_m) -> Tensor")
torch.library.impl("lora_fleet::sgmv_gather", ("cpu", "cuda"), _triton_gather)
torch.library.register_fake("lora_fleet::sgmv_gather", _fake_gather)
