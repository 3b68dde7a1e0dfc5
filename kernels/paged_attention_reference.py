"""fp32 truth of `kernels.paged_attention`, in plain torch: one sequence after the other, from its pages."""

from collections.abc import Sequence

import torch
from torch import Tensor


def paged_attention(
    queries: Tensor,
    cache: Tensor,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What `kernels.paged_attention.paged_attention` computes, in fp32 and unrounded.

    Args:
        queries: `[T, num_heads, head_dim]`.
        cache: `[2, num_blocks, num_kv_heads, block_size, head_dim]`.
        q_lens: Rows of each sequence.
        kv_lens: Tokens of each sequence.
        block_tables: Blocks of each sequence.
        scale: Of the scores.
        window: Tokens a row attends to, its own included; None: all.
        softcap: Bound on the scores' absolute value; None: no bound.

    Returns:
        fp32 `[T, num_heads, head_dim]`; zeros for rows of no sequence.
    """
    group = queries.shape[1] // cache.shape[2]
    out = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)
    start = 0
    for q_len, kv_len, table in zip(q_lens, kv_lens, block_tables, strict=True):
        pages = cache[:, list(table)].float().transpose(2, 3).flatten(1, 2)[:, :kv_len]
        keys, values = pages.repeat_interleave(group, 2)
        scores = torch.einsum("qhd,khd->hqk", queries[start : start + q_len].float(), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        tokens = torch.arange(kv_len, device=queries.device)
        positions = tokens[kv_len - q_len :, None]
        excluded = tokens > positions
        if window is not None:
            excluded |= tokens <= positions - window
        weights = torch.softmax(scores.masked_fill(excluded, float("-inf")), -1)
        out[start : start + q_len] = torch.einsum("hqk,khd->qhd", weights, values)
        start += q_len
    return out
