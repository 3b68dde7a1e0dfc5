"""Launches of the paged attention kernels: grids and compile-time arguments. Importing this module needs triton."""

import math

import torch
from torch import Tensor

from kernels.launch import PRECISION, Launch
from kernels.paged_attention_tiles import DecodeTile, PagedLayout, decode_tile, prefill_tile
from kernels.paged_attention_triton import combine_kernel, decode_kernel, prefill_kernel

_COMBINED_COLUMNS = 256
"""Columns a program of the combine kernel adds up."""


def layout_of(queries: Tensor, cache: Tensor) -> PagedLayout:
    """The layout that queries `[T, num_heads, head_dim]` and a cache have."""
    _, num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    return PagedLayout(queries.shape[1], num_kv_heads, head_dim, block_size, num_blocks, queries.dtype)


def decode_launch(
    queries: Tensor,
    cache: Tensor,
    out: Tensor,
    decodes: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Launch]:
    """Allocate what the splits of the past give, and describe the launch that fills it; or fills out, with one split.

    The arguments have been checked: see `kernels.paged_attention.paged_attention`, of whose schedule `decodes` and
    `block_tables` are.

    Returns:
        fp32 `[slots, splits, num_heads, head_dim]` and `[slots, splits, num_heads]`, and the launch. With one split
        the two hold nothing, and there is nothing to combine.
    """
    layout = layout_of(queries, cache)
    tile = decode_tile(layout, decodes.shape[0], block_tables.shape[1], window)
    planes = (decodes.shape[0] if tile.splits > 1 else 0, tile.splits, layout.num_heads)
    partials = torch.empty(*planes, layout.head_dim, dtype=torch.float32, device=queries.device)
    logsums = torch.empty(planes, dtype=torch.float32, device=queries.device)
    keys, values = cache.unbind(0)
    tanh_scale, exponent_scale = _score_factors(scale, softcap)
    return (
        partials,
        logsums,
        Launch(
            decode_kernel,
            decodes.shape[0] * layout.num_kv_heads * tile.splits,
            (
                queries,
                keys,
                values,
                out,
                partials,
                logsums,
                decodes,
                block_tables,
                queries.stride(0),
                block_tables.shape[1],
                tanh_scale,
                exponent_scale,
            ),
            {
                **_model_constants(layout, window, softcap),
                **_split_constants(tile),
                "BLOCK_M": tile.block_m,
                "BLOCK_D": tile.block_d,
                "STAGES": tile.num_stages,
                "PRECISION": PRECISION,
                "num_warps": tile.num_warps,
            },
        ),
    )


def combine_launch(
    partials: Tensor,
    logsums: Tensor,
    cache: Tensor,
    out: Tensor,
    decodes: Tensor,
    block_tables: Tensor,
    window: int | None = None,
) -> Launch:
    """Describe the launch that adds up what the splits of `decode_launch` gave, of equal arguments, into out."""
    layout = layout_of(out, cache)
    tile = decode_tile(layout, decodes.shape[0], block_tables.shape[1], window)
    return Launch(
        combine_kernel,
        decodes.shape[0] * -(-layout.num_heads * layout.head_dim // _COMBINED_COLUMNS),
        (partials, logsums, out, decodes),
        {
            "HEADS": layout.num_heads,
            "HEAD_DIM": layout.head_dim,
            "WINDOW": window or 0,
            **_split_constants(tile),
            "BLOCK_C": _COMBINED_COLUMNS,
            "UNROLLED": min(8, tile.splits),
            "num_warps": 1,
        },
    )


def decode_launches(
    queries: Tensor,
    cache: Tensor,
    out: Tensor,
    decodes: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> list[Launch]:
    """Describe, in order, the launches that attend the rows of `decodes`: see `decode_launch`."""
    partials, logsums, decode = decode_launch(
        queries, cache, out, decodes, block_tables, scale=scale, window=window, softcap=softcap
    )
    if not partials.numel():
        return [decode]
    return [decode, combine_launch(partials, logsums, cache, out, decodes, block_tables, window)]


def prefill_launch(
    queries: Tensor,
    cache: Tensor,
    out: Tensor,
    tiles: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Launch:
    """Describe the launch that attends the query tiles.

    The arguments have been checked: see `kernels.paged_attention.paged_attention`, of whose schedule `tiles` and
    `block_tables` are.
    """
    layout = layout_of(queries, cache)
    tile = prefill_tile(layout)
    keys, values = cache.unbind(0)
    tanh_scale, exponent_scale = _score_factors(scale, softcap)
    return Launch(
        prefill_kernel,
        tiles.shape[0] * layout.num_kv_heads,
        (
            queries,
            keys,
            values,
            out,
            tiles,
            block_tables,
            queries.stride(0),
            block_tables.shape[1],
            tanh_scale,
            exponent_scale,
        ),
        {
            **_model_constants(layout, window, softcap),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": tile.block_d,
            "STAGES": tile.num_stages,
            "PRECISION": PRECISION,
            "num_warps": tile.num_warps,
        },
    )


def _model_constants(layout: PagedLayout, window: int | None, softcap: float | None) -> dict[str, int | bool]:
    return {
        "KV_HEADS": layout.num_kv_heads,
        "GROUP": layout.group,
        "HEAD_DIM": layout.head_dim,
        "BLOCK_SIZE": layout.block_size,
        "WINDOW": window or 0,
        "HAS_SOFTCAP": softcap is not None,
    }


def _split_constants(tile: DecodeTile) -> dict[str, int]:
    return {"BLOCK_N": tile.block_n, "SPLITS": tile.splits, "MIN_BLOCKS": tile.min_blocks}


def _score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """What turns a product into tanh's argument, doubled and for exp2; and what turns its result, or without a softcap
    the product itself, into an exponent of two."""
    log2_e = math.log2(math.e)
    if softcap is None:
        return 0.0, scale * log2_e
    return 2 * scale / softcap * log2_e, softcap * log2_e
