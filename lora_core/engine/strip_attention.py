"""Attention of decoding sequences to their strips (`lora_core.engine.strips`), all strips of a step in two products.

The strips of a sequence are told apart only between the products: their scores are put side by side for the softmax,
and what they add to its output is summed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lora_core.engine.kv_cache import Ints, KVLayout
from lora_core.engine.step_buffers import to_device
from lora_core.engine.strips import StripStep, padded

# A further group of sequences costs about as much time in a layer as putting so many empty strips side by side.
_GROUP_COST_STRIPS = 40


@dataclass(frozen=True)
class StripGroup:
    """Sequences with about as many strips each: B of them, padded to n strips.

    Attributes:
        strips: int64 `[B * n]`, the strips of each; past its last its first is repeated.
        score_rows: int64 `[B * num_heads * n]`, the same for each head, of scores viewed as `[-1, strip_tokens]`.
        mask: `[B, 1, n * strip_tokens]` in the model's data type, 0 or -inf where nothing is attended to.
        weights: `[B, n, 1]`, 0 for strips that are repeated; None without any.
    """

    strips: Tensor
    score_rows: Tensor
    mask: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class StripReads:
    """Decoding sequences that attend to strips, M of them.

    Attributes:
        layout: Of the KV cache.
        extent: How many strips are multiplied, from the first of the cache.
        query_rows: int64 `[extent]`, the token row each strip belongs to; any for those of others.
        groups: The sequences, by their numbers of strips.
        weight_rows: int64 `[extent * num_heads]`, where each strip's weights are among those of the groups, viewed as
            `[-1, strip_tokens]`.
        rows: int64 `[M]`, the sequences' token rows, group by group; None when they are all rows of the step, in order.
    """

    layout: KVLayout
    extent: int
    query_rows: Tensor
    groups: tuple[StripGroup, ...]
    weight_rows: Tensor
    rows: Tensor | None


def attend_strips(queries: Tensor, cache: Tensor, reads: StripReads, scale: float, softcap: float | None) -> Tensor:
    """Attention of the sequences' new tokens, see `lora_core.engine.attention.attend`.

    Args:
        queries: Of all rows of the step, `[T, num_heads, head_dim]`.
        cache: One layer's.
        reads: Which strips are read for which rows.
        scale: Of the scores.
        softcap: Bound on the scores' absolute value.

    Returns:
        `[M, num_heads, head_dim]`, in the order of `reads.rows`.
    """
    _, num_heads, head_dim = queries.shape
    keys, values = reads.layout.first_strips(cache, reads.extent)
    num_strip_heads, width, _ = keys.shape
    # Sequences have fewer rows than strips, and are scaled first.
    packed = (queries * scale).index_select(0, reads.query_rows).view(num_strip_heads, -1, head_dim)
    scores = torch.bmm(packed, keys.transpose(1, 2)).view(-1, width)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    weights = _cat([_softmax(scores, group, num_heads).view(-1, width) for group in reads.groups])
    weights = weights.index_select(0, reads.weight_rows).view(num_strip_heads, -1, width)
    parts = torch.bmm(weights, values).view(reads.extent, num_heads * head_dim)
    return _cat([_sum(parts, group) for group in reads.groups]).view(-1, num_heads, head_dim)


def _softmax(scores: Tensor, group: StripGroup, num_heads: int) -> Tensor:
    """`[B, num_heads, n * strip_tokens]` from scores `[extent * num_heads, strip_tokens]`."""
    joined = scores.index_select(0, group.score_rows).view(len(group.mask), num_heads, -1)
    return torch.softmax(joined.add_(group.mask), -1)


def _sum(parts: Tensor, group: StripGroup) -> Tensor:
    """`[B, num_heads * head_dim]` from what each strip adds, `[extent, num_heads * head_dim]`."""
    batch = len(group.mask)
    chosen = parts.index_select(0, group.strips)
    if len(chosen) == batch:
        return chosen
    chosen = chosen.view(batch, -1, parts.shape[1])
    return (chosen if group.weights is None else chosen.mul_(group.weights)).sum(1)


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def build_strip_reads(
    step: StripStep,
    token_rows: Ints,
    kv_lens: Ints,
    num_heads: int,
    layout: KVLayout,
    *,
    window: int | None,
    all_rows: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> StripReads:
    """What the members of a step attend to.

    Args:
        step: Where their keys and values are.
        token_rows: `[M]`, the row of each.
        kv_lens: `[M]`, tokens of each.
        num_heads: Query heads.
        layout: Of the KV cache.
        window: Tokens a token attends to, itself included; None is the whole past.
        all_rows: Whether the members are the step's rows, in order.
        dtype: Of the model's activations.
        device: Where the step runs.
    """
    heads = np.arange(num_heads)
    query_rows = np.zeros(step.extent, np.int64)
    weight_rows = np.zeros((step.extent, num_heads), np.int64)
    groups, order, num_weight_rows = [], [], 0
    for members in _groups([len(table) for table in step.tables]):
        strips = padded([step.tables[member] for member in members])
        counts = np.array([len(step.tables[member]) for member in members])
        is_own = np.arange(strips.shape[1]) < counts[:, None]
        query_rows[strips] = token_rows[members, None]
        # Each head's strips of a sequence lie side by side in its group; the repeated ones are nobody's place.
        places = (np.arange(len(members))[:, None, None] * num_heads + heads) * strips.shape[1]
        places = num_weight_rows + places + np.arange(strips.shape[1])[None, :, None]
        weight_rows[strips[is_own]] = places[is_own]
        num_weight_rows += strips.size * num_heads
        positions = np.arange(strips.shape[1] * layout.strip_tokens)
        ends = kv_lens[members, None, None]
        excluded = positions >= ends
        if window is not None:
            excluded |= positions < ends - window
        groups.append(
            StripGroup(
                to_device(strips.reshape(-1), device),
                to_device((strips[:, None, :] * num_heads + heads[:, None]).reshape(-1), device),
                to_device(np.where(excluded, np.float32("-inf"), np.float32(0)), device).to(dtype),
                None if is_own.all() else to_device(is_own[:, :, None], device).to(dtype),
            )
        )
        order.append(token_rows[members])
    return StripReads(
        layout,
        step.extent,
        to_device(query_rows, device),
        tuple(groups),
        to_device(weight_rows.reshape(-1), device),
        None if all_rows and len(groups) == 1 else to_device(np.concatenate(order), device),
    )


def _groups(counts: Sequence[int]) -> Iterator[Ints]:
    """Split sequences by their numbers of strips, so that no group has many repeated ones."""
    order = np.argsort(np.array(counts), kind="stable")[::-1]
    descending = np.array(counts)[order]
    while len(order):
        saved = (len(order) - np.arange(len(order))) * (descending[0] - descending)
        cut = int(saved.argmax())
        if saved[cut] <= _GROUP_COST_STRIPS:
            yield np.sort(order)
            return
        yield np.sort(order[:cut])
        order, descending = order[cut:], descending[cut:]
