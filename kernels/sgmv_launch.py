"""Launches of the SGMV kernels: grids and compile-time arguments. Importing this module needs triton."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.launch import Launch, precision
from kernels.sgmv_triton import expand_kernel, gather_kernel, scale_kernel, shrink_kernel
from kernels.tuning import StepShape, device_name, expand_tile, gather_warps, rank_block, scale_tile, shrink_tile


def shrink_launch(
    x: Tensor, a_stack: Tensor, tiles: Tensor, block_m: int, max_groups: int, projections: int
) -> tuple[Tensor, Launch]:
    """Allocate the planes and describe the launch that fills them.

    The arguments have been checked: see `kernels.sgmv.sgmv_shrink`, with a tile table of `block_m` rows a tile.
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
            "PRECISION": precision(x.dtype),
            "num_warps": tile.num_warps,
        },
    )


def expand_launch(
    planes: Tensor, b_stack: Tensor, y: Tensor, tiles: Tensor, block_m: int, max_groups: int, slices: Sequence[int]
) -> Launch:
    """Describe the launch that adds the planes' product with B to y.

    The arguments have been checked: see `kernels.sgmv.sgmv_expand`, with a tile table of `block_m` rows a tile.
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
            "PRECISION": precision(y.dtype),
            "num_warps": tile.num_warps,
        },
    )


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
