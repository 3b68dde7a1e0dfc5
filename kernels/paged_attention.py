"""Attention over a paged KV cache, for decoding rows and chunks of prompts alike, on a device that runs Triton."""

import math

import torch
from torch import Tensor

from kernels.paged_attention_tiles import PagedLayout
from kernels.paged_schedule import PagedSchedule

MAX_HEAD_DIM = 256
MAX_GROUP = 128
"""Most query heads of one KV head."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def layout_fault(layout: PagedLayout) -> str | None:
    """Why these kernels cannot serve a model, as the end of a sentence; None if they can."""
    if layout.num_heads % layout.num_kv_heads:
        return f"its {layout.num_heads} query heads are not a multiple of its {layout.num_kv_heads} KV heads"
    if layout.head_dim > MAX_HEAD_DIM:
        return f"its heads are {layout.head_dim} long, more than {MAX_HEAD_DIM}"
    if layout.group > MAX_GROUP:
        return f"{layout.group} query heads share a KV head, more than {MAX_GROUP}"
    if layout.dtype not in _DTYPES:
        return f"its cache is {layout.dtype}, none of {', '.join(map(str, _DTYPES))}"
    return None


def paged_attention(
    queries: Tensor,
    cache: Tensor,
    schedule: PagedSchedule,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of each row to its own sequence, through one layer's pages.

    Semantics, for query head h of a row at position p of a sequence whose keys and values K, V `[tokens, num_kv_heads,
    head_dim]` are in its blocks, with g = num_heads / num_kv_heads, cap(s) = s without a softcap or
    softcap * tanh(s / softcap), and from = 0 without a window or max(0, p + 1 - window):
        out[h] = softmax(cap(scale * q[h] @ K[from:p + 1, h // g].T)) @ V[from:p + 1, h // g]

    Sums are fp32; in 16 bits the softmax's weights are rounded before the second product. Rows of no sequence get
    zeros. Of the cache only the tokens above are read: the rest, such as the tail of a last block, may hold anything.
    The grid and all compile-time arguments depend on shapes only, so a captured graph serves every schedule that is
    written into the same buffer.

    Args:
        queries: `[T, num_heads, head_dim]`, bf16, fp16 or fp32; its rows may be those of a wider tensor.
        cache: `[2, num_blocks, num_kv_heads, block_size, head_dim]`, keys first, queries' dtype, contiguous. The keys
            and values of these rows are there already.
        schedule: The step's, on queries' device.
        scale: Of the scores, positive.
        window: Tokens a row attends to, its own included; None: all.
        softcap: Bound on the scores' absolute value; None: no bound.

    Returns:
        `[T, num_heads, head_dim]`, contiguous, queries' dtype.

    Raises:
        ValueError: shapes, dtypes, devices or layouts disagree (both sides are named), or are not served.
    """
    _check(queries, cache, schedule)
    _check_features(scale, window, softcap)
    out: Tensor = torch.ops.lora_fleet.paged_attention(
        queries, cache, schedule.decodes, schedule.tiles, schedule.block_tables, scale, window, softcap
    )
    return out


def _check(queries: Tensor, cache: Tensor, schedule: PagedSchedule) -> None:
    layout = schedule.layout
    expected = (schedule.num_rows, layout.num_heads, layout.head_dim)
    if tuple(queries.shape) != expected or tuple(cache.shape) != layout.cache_shape:
        raise ValueError(
            f"queries has shape {list(queries.shape)} and cache {list(cache.shape)}, the schedule is for "
            f"{list(expected)} and {list(layout.cache_shape)}"
        )
    if not queries.dtype == cache.dtype == layout.dtype:
        raise ValueError(f"queries is {queries.dtype} and cache {cache.dtype}, the schedule is for {layout.dtype}")
    if not queries.device == cache.device == schedule.buffer.device:
        raise ValueError(
            f"queries is on {queries.device}, cache on {cache.device} and the schedule on {schedule.buffer.device}, "
            "expected one device"
        )
    if queries.stride()[1:] != (layout.head_dim, 1) or not cache.is_contiguous():
        raise ValueError(
            f"queries has strides {queries.stride()} and cache {cache.stride()}, expected a row's heads and the cache "
            "to be contiguous"
        )
    if (fault := layout_fault(layout)) is not None:
        raise ValueError(f"the kernels do not serve this model: {fault}")


def _check_features(scale: float, window: int | None, softcap: float | None) -> None:
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}, expected a positive number")
    if window is not None and window < 1:
        raise ValueError(f"window is {window} tokens, expected 1 or more: a row attends to its own token")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}, expected a finite bound over 0, or None")


def _triton_paged_attention(
    queries: Tensor,
    cache: Tensor,
    decodes: Tensor,
    tiles: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    from kernels.paged_attention_launch import decode_launches, prefill_launch

    out = _fake_paged_attention(queries, cache, decodes, tiles, block_tables, scale, window, softcap)
    prefill = prefill_launch(queries, cache, out, tiles, block_tables, scale=scale, window=window, softcap=softcap)
    prefill.run()
    for launch in decode_launches(
        queries, cache, out, decodes, block_tables, scale=scale, window=window, softcap=softcap
    ):
        launch.run()
    return out


def _fake_paged_attention(
    queries: Tensor,
    cache: Tensor,
    decodes: Tensor,
    tiles: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    return torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)


# Triton is imported at the first launch, so that the CPU path needs none (there is no Triton for macOS).
torch.library.define(
    "lora_fleet::paged_attention",
    "(Tensor queries, Tensor cache, Tensor decodes, Tensor tiles, Tensor block_tables, float scale, int? window, "
    "float? softcap) -> Tensor",
)
torch.library.impl("lora_fleet::paged_attention", ("cpu", "cuda"), _triton_paged_attention)
torch.library.register_fake("lora_fleet::paged_attention", _fake_paged_attention)
