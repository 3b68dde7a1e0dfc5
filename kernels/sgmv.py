"""SGMV: each row of a batch through the LoRA adapter of its own request, added to the base layer's output.

`sgmv` is the whole operation. `sgmv_shrink` and `sgmv_expand` are its two halves on a device that runs Triton.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.schedule import Routing
from kernels.sgmv_cpu import sgmv_cpu
from kernels.tuning import StepShape, device_name, launches_dependently, shrink_tile

MAX_SLICES = 3
"""Most projections one fused site can have on a device (query, key and value)."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sgmv(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    routing: Routing,
    slices: Sequence[int],
    *,
    check: bool = True,
) -> None:
    """Add each adapter row's low-rank delta to y, in place.

    Semantics, for each group g with slot s and rows r, and each projection p with output columns c (slice p of OUT):
        v = x[r] @ a_stack[s, p*R : (p+1)*R].T           (fp32 accumulation, one rounding: see below)
        y[r, c] += v @ b_stack[s, c].T                   (fp32 accumulation, one rounding into y)

    v is rounded to B's type on a device, and to bf16 in long bf16 groups on the CPU, which else keeps it in fp32.

    Rows at or after `routing.end` are neither read nor written; nothing runs when `end` is 0. The adapter's scale is
    already part of B. Of a slot in use, rows of A and columns of B past its true rank must be zero: they are skipped
    where that pays. Slots not in use may hold anything.

    Args:
        x: Activations `[T, K]`, bf16, fp16 or fp32, rows grouped by adapter, base rows last.
        a_stack: One A per slot `[N, S*R, K]`: the S projections of a fused site one below the other, each padded to R
            rows. x's dtype; for fp16 on the CPU fp32 (`routing.stack_dtype`).
        b_stack: One B per slot `[N, OUT, R]`, same dtype as a_stack.
        y: The base layer's output `[T, OUT]`, x's dtype, updated in place.
        routing: The step's routing, on x's device. A graph is captured with one that has adapter rows, and replayed
            for any other of the same shapes that `build_routing` has written into its buffer.
        slices: Output widths of the S projections; they add up to OUT.
        check: Whether to compare the arguments, at 9 us a call. Callers may leave it out where tensors of the same
            shapes, dtypes, devices and layouts have passed with a routing of as many rows and slots, and of the path.

    Raises:
        ValueError: shapes, dtypes, devices or layouts disagree (both sides are named).
    """
    if routing.end == 0:
        return
    if check:
        check_sgmv(x, a_stack, b_stack, y, routing, slices)
    if routing.tiles is None:
        plain = sgmv_cpu if routing.path == "cpu" else reference.sgmv
        plain(x, a_stack, b_stack, y, routing, slices)
        return
    torch.ops.lora_fleet.sgmv(
        x, a_stack, b_stack, y, routing.tiles, routing.counters, routing.block_m, routing.max_groups, slices
    )


def sgmv_shrink(x: Tensor, a_stack: Tensor, routing: Routing, projections: int) -> Tensor:
    """Project each adapter row through its adapter's A matrices.

    Semantics, for each group g with slot s and rows r:
        sum over p of planes[p, r] = x[r] @ a_stack[s].T        (fp32 accumulation)

    Args:
        x: Activations `[T, K]`, bf16, fp16 or fp32, rows grouped by adapter, base rows last.
        a_stack: One A per slot `[N, S*R, K]`, same dtype as x.
        routing: The step's routing on x's device; one without a tile table runs plain torch.
        projections: S, the projections that share x.

    Returns:
        `[P, T, S*R]` fp32 partial sums over P splits of K. Rows at or after `end` are unspecified, and so are columns
        of a projection from the next multiple of 8 past a slot's true rank on.

    Raises:
        ValueError: shapes, dtypes, devices or layouts disagree (both sides are named).
    """
    _check_shrink(x, a_stack, routing, projections)
    if routing.tiles is None:
        return reference.sgmv_shrink(x, a_stack, routing, projections)
    planes: Tensor = torch.ops.lora_fleet.sgmv_shrink(
        x, a_stack, routing.tiles, routing.block_m, routing.max_groups, projections
    )
    return planes


def sgmv_expand(planes: Tensor, b_stack: Tensor, y: Tensor, routing: Routing, slices: Sequence[int]) -> None:
    """Project the low-rank rows through each adapter's B matrices and add them to y, in place.

    Semantics, for each group g with slot s and rows r, and each projection p with output columns c:
        v = round(sum over q of planes[q, r, p*R : (p+1)*R])    (once, to B's dtype)
        y[r, c] += v @ b_stack[s, c].T                          (fp32 accumulation, one rounding into y)

    Args:
        planes: fp32 `[P, T, S*R]`, what `sgmv_shrink` returned for the same routing.
        b_stack: One B per slot `[N, OUT, R]`.
        y: `[T, OUT]`, updated in place; B's dtype where Triton runs.
        routing: The step's routing, on y's device.
        slices: Output widths of the S projections; they add up to OUT.

    Raises:
        ValueError: shapes, dtypes, devices or layouts disagree (both sides are named).
    """
    _check_expand(b_stack, y, routing, slices)
    expected = (y.shape[0], len(slices) * b_stack.shape[2])
    if planes.dtype != torch.float32 or planes.dim() != 3 or tuple(planes.shape[1:]) != expected:
        raise ValueError(
            f"planes is {planes.dtype} {list(planes.shape)}, expected torch.float32 [splits, {expected[0]}, "
            f"{expected[1]}] from y's rows and {len(slices)} projections of rank {b_stack.shape[2]}"
        )
    if not planes.is_contiguous() or planes.device != y.device:
        raise ValueError(
            f"planes is on {planes.device} with strides {planes.stride()}, expected contiguous on {y.device}"
        )
    if routing.tiles is None:
        reference.sgmv_expand(planes, b_stack, y, routing, slices)
        return
    torch.ops.lora_fleet.sgmv_expand(planes, b_stack, y, routing.tiles, routing.block_m, routing.max_groups, slices)


def check_sgmv(x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, routing: Routing, slices: Sequence[int]) -> None:
    """Raise ValueError, with both sides, unless these are arguments of `sgmv`."""
    _check_shrink(x, a_stack, routing, len(slices))
    _check_expand(b_stack, y, routing, slices)
    _check_pair(x, a_stack, b_stack, y, slices)


def check_in_place(y: Tensor) -> None:
    """Raise ValueError unless the kernels can write to y `[T, OUT]`: a row's values together, and rows apart."""
    if y.stride(1) != 1 or (y.shape[0] > 1 and y.stride(0) < y.shape[1]):
        raise ValueError(
            f"y has strides {y.stride()} for shape {list(y.shape)}, expected 1 along the features and rows that do not "
            "overlap: it is written in place"
        )


def _check_shrink(x: Tensor, a_stack: Tensor, routing: Routing, projections: int) -> None:
    if x.dim() != 2 or a_stack.dim() != 3 or x.shape[1] != a_stack.shape[2]:
        raise ValueError(
            f"x has shape {list(x.shape)} and a_stack {list(a_stack.shape)}, expected [T, K] and [N, S*R, K]"
        )
    if x.dtype not in _DTYPES:
        raise ValueError(f"x is {x.dtype}, expected one of {', '.join(map(str, _DTYPES))}")
    if projections < 1 or a_stack.shape[1] % projections:
        raise ValueError(f"a_stack has {a_stack.shape[1]} rows a slot, not a multiple of {projections} projections")
    if x.shape[0] < routing.end:
        raise ValueError(f"x has {x.shape[0]} rows, fewer than the routing's end, row {routing.end}")
    if x.stride(1) != 1:
        raise ValueError(f"x has strides {x.stride()}, expected 1 along the features: pass x.contiguous()")
    _check_stack("a_stack", a_stack, a_stack.shape[1] // projections, "x", x, routing)


def _check_expand(b_stack: Tensor, y: Tensor, routing: Routing, slices: Sequence[int]) -> None:
    if b_stack.dim() != 3 or y.dim() != 2 or y.shape[1] != b_stack.shape[1] or sum(slices) != y.shape[1]:
        raise ValueError(
            f"b_stack has shape {list(b_stack.shape)}, y {list(y.shape)} and slices {list(slices)}, "
            "expected [N, OUT, R], [T, OUT] and widths that add up to OUT"
        )
    if any(width < 1 for width in slices):
        raise ValueError(f"slices has widths {list(slices)}, expected each to be 1 or more")
    if y.dtype not in _DTYPES:
        raise ValueError(f"y is {y.dtype}, expected one of {', '.join(map(str, _DTYPES))}")
    if y.shape[0] < routing.end:
        raise ValueError(f"y has {y.shape[0]} rows, fewer than the routing's end, row {routing.end}")
    check_in_place(y)
    if routing.tiles is not None and not 1 <= len(slices) <= MAX_SLICES:
        raise ValueError(f"slices has {len(slices)} widths, expected 1 to {MAX_SLICES}")
    _check_stack("b_stack", b_stack, b_stack.shape[2], "y", y, routing)


def _check_stack(name: str, stack: Tensor, rank: int, rows_name: str, rows: Tensor, routing: Routing) -> None:
    expected = routing.stack_dtype(rows.dtype)
    if stack.dtype != expected:
        raise ValueError(
            f"{name} is {stack.dtype} and {rows_name} {rows.dtype}, expected {name} in {expected}: "
            "the activations' dtype, but fp32 for fp16 on the CPU"
        )
    if not rows.device == stack.device == routing.buffer.device:
        raise ValueError(
            f"{rows_name} is on {rows.device}, {name} on {stack.device} and the routing on {routing.buffer.device}, "
            "expected one device"
        )
    if not stack.is_contiguous():
        raise ValueError(f"{name} has strides {stack.stride()} for shape {list(stack.shape)}, expected contiguous")
    if len(routing.slot_ranks) != stack.shape[0]:
        raise ValueError(f"{name} has {stack.shape[0]} slots, the routing {len(routing.slot_ranks)} slot_ranks")
    if routing.max_rank > rank:
        raise ValueError(f"the routing has a slot of rank {routing.max_rank}, {name} holds at most rank {rank}")


def _check_pair(x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, slices: Sequence[int]) -> None:
    if x.shape[0] != y.shape[0] or x.dtype != y.dtype:
        raise ValueError(f"x is {x.dtype} of {x.shape[0]} rows and y {y.dtype} of {y.shape[0]}, expected the same")
    if a_stack.shape[1] != len(slices) * b_stack.shape[2]:
        raise ValueError(
            f"a_stack has {a_stack.shape[1]} rows a slot, expected {len(slices)} slices times b_stack's rank "
            f"{b_stack.shape[2]}"
        )


def _triton_sgmv(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    tiles: Tensor,
    counters: Tensor | None,
    block_m: int,
    max_groups: int,
    slices: Sequence[int],
) -> None:
    from kernels.sgmv_launch import sgmv_launches

    dependent = launches_dependently(x.device, x.shape[0], max_groups)
    for launch in sgmv_launches(
        x, a_stack, b_stack, y, tiles, counters, block_m, max_groups, slices, dependent=dependent
    ):
        launch.run()


def _triton_shrink(
    x: Tensor, a_stack: Tensor, tiles: Tensor, block_m: int, max_groups: int, projections: int
) -> Tensor:
    from kernels.sgmv_launch import shrink_launch

    planes, launch = shrink_launch(x, a_stack, tiles, block_m, max_groups, projections)
    launch.run()
    return planes


def _triton_expand(
    planes: Tensor, b_stack: Tensor, y: Tensor, tiles: Tensor, block_m: int, max_groups: int, slices: Sequence[int]
) -> None:
    from kernels.sgmv_launch import expand_launch

    expand_launch(planes, b_stack, y, tiles, block_m, max_groups, slices).run()


def _fake_in_place(*_arguments: Any) -> None:
    """Of operators that change y and return nothing."""


def _fake_shrink(x: Tensor, a_stack: Tensor, tiles: Tensor, block_m: int, max_groups: int, projections: int) -> Tensor:
    # How many planes there are follows from the sizes: a compiler that keeps one open has to settle it here.
    num_rows, in_features, width = int(x.shape[0]), int(x.shape[1]), int(a_stack.shape[1])
    step = StepShape(device_name(x.device), num_rows, max_groups, block_m)
    tile = shrink_tile(step, width // projections, projections, in_features, x.element_size())
    return x.new_empty((tile.splits, num_rows, width), dtype=torch.float32)


# The whole is one operator, so that nothing comes between its launches: the second may start before the first has
# ended. It leaves its counters as it found them, so they are no output.
torch.library.define(
    "lora_fleet::sgmv",
    "(Tensor x, Tensor a_stack, Tensor b_stack, Tensor(y!) y, Tensor tiles, Tensor? counters, int block_m, "
    "int max_groups, int[] slices) -> ()",
)
torch.library.define(
    "lora_fleet::sgmv_shrink",
    "(Tensor x, Tensor a_stack, Tensor tiles, int block_m, int max_groups, int projections) -> Tensor",
)
torch.library.define(
    "lora_fleet::sgmv_expand",
    "(Tensor planes, Tensor b_stack, Tensor(y!) y, Tensor tiles, int block_m, int max_groups, int[] slices) -> ()",
)
# Triton is imported at the first launch, so that the CPU path needs none (there is no Triton for macOS).
torch.library.impl("lora_fleet::sgmv", ("cpu", "cuda"), _triton_sgmv)
torch.library.impl("lora_fleet::sgmv_shrink", ("cpu", "cuda"), _triton_shrink)
torch.library.impl("lora_fleet::sgmv_expand", ("cpu", "cuda"), _triton_expand)
torch.library.register_fake("lora_fleet::sgmv", _fake_in_place)
torch.library.register_fake("lora_fleet::sgmv_shrink", _fake_shrink)
torch.library.register_fake("lora_fleet::sgmv_expand", _fake_in_place)
