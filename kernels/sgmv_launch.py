"""Launches of the SGMV kernels: grids and compile-time arguments. Importing this module needs triton."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.launch import PRECISION, Launch
from kernels.pair_triton import pair_kernel
from kernels.rows_triton import gather_kernel, scale_kernel
from kernels.sgmv_triton import expand_kernel, shrink_kernel
from kernels.swiglu_triton import swiglu_kernel
from kernels.tuning import (
    ExpandTile,
    StepShape,
    device_name,
    expand_tile,
    gather_warps,
    rank_block,
    scale_tile,
    shrink_tile,
    swiglu_tile,
)


def shrink_launch(
    x: Tensor,
    a_stack: Tensor,
    tiles: Tensor,
    block_m: int,
    max_groups: int,
    projections: int,
    *,
    dependent: bool = False,
) -> tuple[Tensor, Launch]:
    """Allocate the planes and describe the launch that fills them.

    The arguments have been checked: see `kernels.sgmv.sgmv_shrink`, with a tile table of `block_m` rows a tile.
    `dependent` (programmatic dependent launch, NVIDIA from compute capability 9.0 on): this launch may start before
    what precedes it has ended, and a dependent launch of the planes' reader may start before this one has.
    """
    num_rows, in_features = x.shape
    width = a_stack.shape[1]
    rank = width // projections
    step = StepShape(device_name(x.device), num_rows, max_groups, block_m)
    tile = shrink_tile(step, rank, projections, in_features, x.element_size())
    planes = torch.empty(tile.splits, num_rows, width, dtype=torch.float32, device=x.device)
    return planes, Launch(
        shrink_kernel,
        tiles.shape[0] * -(-width // tile.block_n) * tile.splits,
        (x, a_stack, planes, tiles, num_rows, x.stride(0)),
        {
            "IN": in_features,
            "RANK": rank,
            "PROJECTIONS": projections,
            "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "SPLITS": tile.splits,
            "STAGES": tile.num_stages,
            "PRECISION": PRECISION,
            "num_warps": tile.num_warps,
            **_dependence(dependent),
        },
    )


def expand_launch(
    planes: Tensor,
    b_stack: Tensor,
    y: Tensor,
    tiles: Tensor,
    block_m: int,
    max_groups: int,
    slices: Sequence[int],
    *,
    dependent: bool = False,
) -> Launch:
    """Describe the launch that adds the planes' product with B to y.

    The arguments have been checked: see `kernels.sgmv.sgmv_expand`, with a tile table of `block_m` rows a tile.
    `dependent`: it directly follows a dependent launch of the shrink, and may start before that has ended.
    """
    splits, num_rows, _ = planes.shape
    _, out_features, rank = b_stack.shape
    step = StepShape(device_name(y.device), num_rows, max_groups, block_m)
    tile = expand_tile(step, rank, out_features, y.element_size())
    column_tiles = sum(-(-width // tile.block_n) for width in slices)
    return Launch(
        expand_kernel,
        tiles.shape[0] * column_tiles,
        (planes, b_stack, y, tiles, num_rows, y.stride(0)),
        {
            "RANK": rank,
            "PROJECTIONS": len(slices),
            "SLICE_END_0": slices[0],
            "SLICE_END_1": sum(slices[:2]),
            "OUT": out_features,
            "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_R": tile.block_r,
            "SPLITS": splits,
            "PRECISION": PRECISION,
            "num_warps": tile.num_warps,
            **_dependence(dependent),
        },
    )


def swiglu_launch(
    planes: Tensor,
    b_stack: Tensor,
    y: Tensor,
    tiles: Tensor,
    block_m: int,
    max_groups: int,
    activation: str,
    *,
    dependent: bool = False,
) -> tuple[Tensor, Launch]:
    """Allocate the gated activation `[T, I]` and describe the launch that computes it from the planes, B and y.

    The arguments have been checked: see `kernels.swiglu.sgmv_swiglu`, with a tile table of `block_m` rows a tile.
    `dependent`: it directly follows a dependent launch of the shrink, and may start before that has ended.
    """
    splits, num_rows, _ = planes.shape
    width, rank = y.shape[1] // 2, b_stack.shape[2]
    step = StepShape(device_name(y.device), num_rows, max_groups, block_m)
    tile = swiglu_tile(step, rank, width, y.element_size())
    act = torch.empty(num_rows, width, dtype=y.dtype, device=y.device)
    return act, Launch(
        swiglu_kernel,
        tiles.shape[0] * -(-width // tile.block_n),
        (planes, b_stack, y, act, tiles, num_rows, y.stride(0)),
        {
            "RANK": rank,
            "WIDTH": width,
            "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_R": tile.block_r,
            "SPLITS": splits,
            "PRECISION": PRECISION,
            "ACTIVATION": activation,
            "num_warps": tile.num_warps,
            **_dependence(dependent),
        },
    )


def pair_launch(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    tiles: Tensor,
    counters: Tensor,
    block_m: int,
    max_groups: int,
    slices: Sequence[int],
) -> Launch:
    """Describe the one launch that does the work of `shrink_launch` and of `expand_launch`.

    The arguments have been checked: see `kernels.sgmv.sgmv`, with a tile table of `block_m` rows a tile. `counters` is
    int32 `[num_tiles + 1]`, zero before the launch and after it; launches that share it may not overlap.
    """
    step = StepShape(device_name(y.device), x.shape[0], max_groups, block_m)
    tile = expand_tile(step, b_stack.shape[2], y.shape[1], y.element_size())
    column_tiles = sum(-(-width // tile.block_n) for width in slices)
    return _pair(x, a_stack, b_stack, y, y, tiles, counters, step, slices, tile, column_tiles, None)


def swiglu_pair_launch(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    tiles: Tensor,
    counters: Tensor,
    block_m: int,
    max_groups: int,
    activation: str,
) -> tuple[Tensor, Launch]:
    """Allocate the gated activation, and describe the one launch in place of `shrink_launch` and `swiglu_launch`.

    `counters` is as for `pair_launch`.
    """
    width = y.shape[1] // 2
    step = StepShape(device_name(y.device), x.shape[0], max_groups, block_m)
    tile = swiglu_tile(step, b_stack.shape[2], width, y.element_size())
    act = torch.empty(x.shape[0], width, dtype=y.dtype, device=y.device)
    column_tiles = -(-width // tile.block_n)
    slices = (width, width)
    launch = _pair(x, a_stack, b_stack, y, act, tiles, counters, step, slices, tile, column_tiles, activation)
    return act, launch


def _pair(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    act: Tensor,
    tiles: Tensor,
    counters: Tensor,
    step: StepShape,
    slices: Sequence[int],
    expand: ExpandTile,
    column_tiles: int,
    activation: str | None,
) -> Launch:
    (num_rows, in_features), width, rank = x.shape, a_stack.shape[1], b_stack.shape[2]
    shrink = shrink_tile(step, rank, len(slices), in_features, x.element_size())
    planes = torch.empty(shrink.splits, num_rows, width, dtype=torch.float32, device=x.device)
    return Launch(
        pair_kernel,
        tiles.shape[0] * (-(-width // shrink.block_n) * shrink.splits + column_tiles),
        (x, a_stack, b_stack, y, act, planes, tiles, counters, num_rows, x.stride(0), y.stride(0)),
        {
            "IN": in_features,
            "RANK": rank,
            "PROJECTIONS": len(slices),
            "SLICE_END_0": slices[0],
            "SLICE_END_1": sum(slices[:2]),
            "OUT": y.shape[1],
            "ACTIVATION": activation,
            "BLOCK_M": step.block_m,
            "SHRINK_N": shrink.block_n,
            "BLOCK_K": shrink.block_k,
            "SPLITS": shrink.splits,
            "STAGES": shrink.num_stages,
            "EXPAND_N": expand.block_n,
            "BLOCK_R": expand.block_r,
            "PRECISION": PRECISION,
            "num_warps": max(shrink.num_warps, expand.num_warps),
        },
    )


def sgmv_launches(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    tiles: Tensor,
    counters: Tensor | None,
    block_m: int,
    max_groups: int,
    slices: Sequence[int],
    *,
    dependent: bool,
) -> list[Launch]:
    """Describe, in order, the launches that are `kernels.sgmv.sgmv`.

    `dependent`: whether the second of two may start before the first has ended.
    """
    if counters is not None:
        return [pair_launch(x, a_stack, b_stack, y, tiles, counters, block_m, max_groups, slices)]
    planes, shrink = shrink_launch(x, a_stack, tiles, block_m, max_groups, len(slices), dependent=dependent)
    return [shrink, expand_launch(planes, b_stack, y, tiles, block_m, max_groups, slices, dependent=dependent)]


def gated_launches(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    tiles: Tensor,
    counters: Tensor | None,
    block_m: int,
    max_groups: int,
    activation: str,
    *,
    dependent: bool,
) -> tuple[Tensor, list[Launch]]:
    """Allocate the gated activation, and describe, in order, the launches that are `kernels.swiglu.sgmv_swiglu`.

    `dependent` is as for `sgmv_launches`.
    """
    if counters is not None:
        act, pair = swiglu_pair_launch(x, a_stack, b_stack, y, tiles, counters, block_m, max_groups, activation)
        return act, [pair]
    planes, shrink = shrink_launch(x, a_stack, tiles, block_m, max_groups, 2, dependent=dependent)
    act, gate = swiglu_launch(planes, b_stack, y, tiles, block_m, max_groups, activation, dependent=dependent)
    return act, [shrink, gate]


def gather_launch(ids: Tensor, a_stack: Tensor, tiles: Tensor, block_m: int) -> tuple[Tensor, Launch]:
    """Allocate the one plane and describe the launch that gathers A's rows into it.

    The arguments have been checked: see `kernels.embedding.sgmv_embed`, with a tile table of `block_m` rows a tile.
    """
    _, vocabulary, rank = a_stack.shape
    planes = torch.empty(1, ids.shape[0], rank, dtype=torch.float32, device=ids.device)
    return planes, Launch(
        gather_kernel,
        tiles.shape[0],
        (ids, a_stack, planes, tiles),
        {
            "VOCABULARY": vocabulary,
            "RANK": rank,
            "BLOCK_M": block_m,
            "BLOCK_R": rank_block(rank),
            "num_warps": gather_warps(block_m, rank),
        },
    )


def scale_launch(y: Tensor, gain_stack: Tensor, bias: Tensor | None, tiles: Tensor, block_m: int) -> Launch:
    """Describe the launch that applies the gains.

    The arguments have been checked: see `kernels.gain.scale_rows`, with a tile table of `block_m` rows a tile.
    """
    out_features = y.shape[1]
    tile = scale_tile(block_m)
    return Launch(
        scale_kernel,
        tiles.shape[0] * -(-out_features // tile.block_n),
        (y, gain_stack, y if bias is None else bias, tiles, y.stride(0)),
        {
            "OUT": out_features,
            "HAS_BIAS": bias is not None,
            "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n,
            "num_warps": tile.num_warps,
        },
    )


def _dependence(dependent: bool) -> dict[str, bool]:
    """The kernel's part of a dependent launch, and the launch's own; other GPUs' compilers do not know the option."""
    return {"PDL": True, "launch_pdl": True} if dependent else {"PDL": False}
