"""Attention over a paged KV cache: where a step writes its keys and values, and which pages each sequence reads.

All of a step's index arithmetic is done once, on the host, by `build_attention`; layers with the same window share the
result. Plain torch on every device: pages are gathered and multiplied, with the query heads of one KV head packed
together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from lora_core.engine.kv_cache import Ints, KVLayout

# Decoding sequences attend together, each padded to the longest. A further group of them costs about as much time in a
# layer as this many padded tokens (measured on CPU).
_GROUP_COST_TOKENS = 512


class SequenceSpan(NamedTuple):
    """What one row of the batch computes: the last `q_len` of `kv_len` tokens, kept in the blocks of `block_table`."""

    q_len: int
    kv_len: int
    block_table: Sequence[int]


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each, attended together; B of them, padded to L tokens.

    With a window, L counts from the block that holds the first token of the window.

    Attributes:
        rows: int64 `[B]`, their token rows; None when they are all rows of the step, in order.
        pages: int64 `[2 * B * num_kv_heads * L / block_size]`, see `KVLayout.page_rows`.
        mask: `[B, 1, L]` in the model's data type, 0 or -inf past a sequence's end or before its window; None when all
            L tokens of each are attended to.
    """

    rows: Tensor | None
    pages: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class PrefillChunk:
    """Several new tokens of one sequence, in token rows `start:stop`.

    Attributes:
        kv_len: Tokens read, the new ones last: the sequence, or what windows reach of it, from the start of a block.
        pages: int64, pages of these tokens; None when there is no past, and the new keys and values are all.
        mask: `[stop - start, kv_len]` in the model's data type, 0 or -inf; None when it is plain causal without a past.
    """

    start: int
    stop: int
    kv_len: int
    pages: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionReads:
    """What a step's rows attend to; every row belongs to exactly one decode group or prefill chunk."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's attention, for T token rows.

    Attributes:
        write_rows: int64 `[T * 2 * num_kv_heads]`, where the step's keys and values go, see `KVLayout.token_rows`.
        fresh_blocks: int64, blocks whose first token this step writes: to be cleared before it; None without any.
        reads: By window, in tokens; None is the whole past. Windows that reach past every sequence share one object.
    """

    write_rows: Tensor
    fresh_blocks: Tensor | None
    reads: Mapping[int | None, AttentionReads]


def build_attention(
    spans: Sequence[SequenceSpan],
    layout: KVLayout,
    *,
    windows: Sequence[int | None] = (None,),
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionMetadata:
    """Lay out a step's attention from its sequences, in row order.

    Args:
        spans: One for each sequence; its tokens take the next `q_len` rows of the step.
        layout: Of the KV cache.
        windows: The distinct windows of the model's layers: tokens a token attends to, itself included, or None for
            all before it.
        dtype: Of the model's activations.
        device: Where the step runs.
    """
    q_lens = np.array([span.q_len for span in spans])
    kv_lens = np.array([span.kv_len for span in spans])
    row_offsets = np.concatenate(([0], np.cumsum(q_lens)))
    tables = _padded_tables(spans, kv_lens, layout)

    sequence = np.repeat(np.arange(len(spans)), q_lens)
    positions = token_positions(q_lens, kv_lens)
    blocks, offsets = tables[sequence, positions // layout.block_size], positions % layout.block_size
    fresh = blocks[offsets == 0]

    longest = int(kv_lens.max())
    narrowed = {window: None if window is None or window >= longest else window for window in windows}
    reads = {
        window: _reads(_Step(q_lens, kv_lens, row_offsets, tables, layout, dtype, device), window)
        for window in set(narrowed.values())
    }
    return AttentionMetadata(
        write_rows=_to_device(layout.token_rows(blocks, offsets).reshape(-1), device),
        fresh_blocks=_to_device(fresh, device) if fresh.size else None,
        reads={window: reads[narrow] for window, narrow in narrowed.items()},
    )


def token_positions(q_lens: Ints, kv_lens: Ints) -> Ints:
    """Position of each token row in its sequence `[T]`: sequence i has the last `q_lens[i]` of `kv_lens[i]`."""
    ends = np.cumsum(q_lens)
    return np.arange(ends[-1]) + np.repeat(kv_lens - ends, q_lens)


def write_kv(cache: Tensor, key_values: Tensor, attention: AttentionMetadata) -> None:
    """Store the step's keys and values in one layer's cache.

    Args:
        cache: `KVLayout.shape`, changed in place.
        key_values: `[T, 2 * num_kv_heads, head_dim]`, key heads first.
        attention: The step's metadata.
    """
    head_dim = cache.shape[-1]
    cache.view(-1, head_dim).index_copy_(0, attention.write_rows, key_values.reshape(-1, head_dim))


def attend(
    queries: Tensor,
    key_values: Tensor,
    cache: Tensor,
    attention: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of each token row to its own sequence, through one layer's cache.

    Semantics, for query head h of a row at position p, with g = num_heads / num_kv_heads, cap(s) = s without a softcap
    or softcap * tanh(s / softcap), and from = 0 without a window or max(0, p + 1 - window):
        out[h] = softmax(cap(scale * q[h] @ K[from:p + 1, h // g].T)) @ V[from:p + 1, h // g]

    Args:
        queries: `[T, num_heads, head_dim]`.
        key_values: The step's own, `[T, 2 * num_kv_heads, head_dim]`, which `write_kv` has stored already.
        cache: `KVLayout.shape`.
        attention: The step's metadata, built for this window among others.
        scale: Of the scores.
        window: Tokens a token attends to, itself included; None: all.
        softcap: Bound on the scores' absolute value; None: no bound.

    Returns:
        `[T, num_heads * head_dim]`.
    """
    num_rows, num_heads, head_dim = queries.shape
    reads = attention.reads[window]
    if len(reads.decodes) == 1 and reads.decodes[0].rows is None:
        return _attend_decodes(queries, cache, reads.decodes[0], scale, softcap).view(num_rows, -1)
    out = queries.new_empty(num_rows, num_heads, head_dim)
    for group in reads.decodes:
        assert group.rows is not None
        members = queries.index_select(0, group.rows)
        out.index_copy_(0, group.rows, _attend_decodes(members, cache, group, scale, softcap))
    for chunk in reads.prefills:
        rows = slice(chunk.start, chunk.stop)
        out[rows] = _attend_prefill(queries[rows], key_values[rows], cache, chunk, scale, softcap)
    return out.view(num_rows, -1)


def _attend_decodes(queries: Tensor, cache: Tensor, group: DecodeGroup, scale: float, softcap: float | None) -> Tensor:
    """`[B, num_heads, head_dim]` to the same."""
    batch, num_heads, head_dim = queries.shape
    num_kv_heads = cache.shape[2]
    keys, values = _gather(cache, group.pages).view(2, batch * num_kv_heads, -1, head_dim)
    group_size = num_heads // num_kv_heads
    if batch == 1 and softcap is None:
        # Starting the two products costs more than they save (bf16 on CPU: 20 us each).
        mask = None if group.mask is None else group.mask[None]
        packed = queries.reshape(1, num_kv_heads, group_size, head_dim)
        out = F.scaled_dot_product_attention(packed, keys[None], values[None], attn_mask=mask, scale=scale)
        return out.view(1, num_heads, head_dim)
    packed = (queries * scale).view(batch * num_kv_heads, group_size, head_dim)
    scores = torch.bmm(packed, keys.transpose(1, 2))
    if softcap is not None:
        _cap_(scores, softcap)
    if group.mask is not None:
        scores.view(batch, num_heads, -1).add_(group.mask)
    return torch.bmm(torch.softmax(scores, -1), values).view(batch, num_heads, head_dim)


def _attend_prefill(
    queries: Tensor, key_values: Tensor, cache: Tensor, chunk: PrefillChunk, scale: float, softcap: float | None
) -> Tensor:
    """`[Tq, num_heads, head_dim]` to the same."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = cache.shape[2]
    group = num_heads // num_kv_heads
    if chunk.pages is None:
        keys, values = key_values.view(num_rows, 2, num_kv_heads, 1, head_dim).permute(1, 2, 3, 0, 4)
    else:
        gathered = _gather(cache, chunk.pages).view(2, num_kv_heads, 1, -1, head_dim)
        keys, values = gathered[:, :, :, : chunk.kv_len]
    # KV heads are the batch, so that each one is shared by its query heads without a copy.
    packed = queries.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if softcap is not None:
        return _attend_capped(packed, keys, values, chunk.mask, scale, softcap).permute(2, 0, 1, 3).flatten(1, 2)
    out = F.scaled_dot_product_attention(
        packed,
        keys.expand(-1, group, -1, -1),
        values.expand(-1, group, -1, -1),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _attend_capped(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """What fused attention kernels lack: `[num_kv_heads, group, Tq, head_dim]` to the same, scores soft-capped."""
    scores = _cap_(torch.matmul(queries * scale, keys.transpose(2, 3)), softcap)
    if mask is None:
        mask = scores.new_full(scores.shape[2:], float("-inf")).triu_(1)
    return torch.matmul(torch.softmax(scores.add_(mask), -1), values)


def _cap_(scores: Tensor, softcap: float) -> Tensor:
    return scores.div_(softcap).tanh_().mul_(softcap)


def _gather(cache: Tensor, pages: Tensor) -> Tensor:
    return cache.view(-1, cache.shape[3] * cache.shape[4]).index_select(0, pages)


def _padded_tables(spans: Sequence[SequenceSpan], kv_lens: Ints, layout: KVLayout) -> Ints:
    """Block tables `[len(spans), most blocks]`, cut to the blocks in use and padded with the sequence's first block.

    Its own block, not just any: what is read there is masked, and must be finite.
    """
    num_blocks = -(-kv_lens // layout.block_size)
    tables = np.empty((len(spans), int(num_blocks.max())), dtype=np.int64)
    for table, span, count in zip(tables, spans, num_blocks.tolist(), strict=True):
        assert len(span.block_table) >= count, f"{span.kv_len} tokens do not fit {len(span.block_table)} blocks"
        table[:count] = span.block_table[:count]
        table[count:] = span.block_table[0]
    return tables


def _groups_of_near_length(members: Ints, lengths: Ints) -> Iterator[Ints]:
    """Split sequences so that padding each group to its longest wastes less time than a further group costs."""
    if not members.size:
        return
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    saved = (len(order) - np.arange(len(order))) * (descending[0] - descending)
    cut = int(saved.argmax())
    if saved[cut] <= _GROUP_COST_TOKENS:
        yield members
        return
    for part in (order[:cut], order[cut:]):
        yield from _groups_of_near_length(members[part], lengths[part])


class _Step(NamedTuple):
    """The step's sequences as `build_attention` has laid them out."""

    q_lens: Ints
    kv_lens: Ints
    row_offsets: Ints
    tables: Ints
    layout: KVLayout
    dtype: torch.dtype
    device: torch.device


def _reads(step: _Step, window: int | None) -> AttentionReads:
    if window is None:
        first_positions = np.zeros_like(step.kv_lens)
    else:
        # Of a sequence's new tokens the first one reaches back furthest.
        first_positions = np.maximum(step.kv_lens - step.q_lens + 1 - window, 0)
    first_blocks = first_positions // step.layout.block_size
    shifted = step._replace(
        kv_lens=step.kv_lens - first_blocks * step.layout.block_size, tables=_skip_blocks(step, first_blocks)
    )
    decoding = np.flatnonzero(step.q_lens == 1)
    whole_step = len(decoding) == len(step.q_lens)
    block_size = step.layout.block_size
    groups = list(_groups_of_near_length(decoding, -(-shifted.kv_lens[decoding] // block_size) * block_size))
    return AttentionReads(
        decodes=tuple(
            _decode_group(shifted, members, window, all_rows=whole_step and len(groups) == 1) for members in groups
        ),
        prefills=tuple(
            _prefill_chunk(shifted, index, window, has_past=bool(step.kv_lens[index] > step.q_lens[index]))
            for index in np.flatnonzero(step.q_lens > 1).tolist()
        ),
    )


def _skip_blocks(step: _Step, first_blocks: Ints) -> Ints:
    """Block tables that start with each sequence's `first_blocks`; the places behind its last repeat that one."""
    if not first_blocks.any():
        return step.tables
    last_blocks = (step.kv_lens - 1) // step.layout.block_size
    places = first_blocks[:, None] + np.arange(int((last_blocks - first_blocks).max()) + 1)
    return np.take_along_axis(step.tables, np.minimum(places, last_blocks[:, None]), 1)


def _decode_group(step: _Step, members: Ints, window: int | None, *, all_rows: bool) -> DecodeGroup:
    kv_lens = step.kv_lens[members]
    num_blocks = -(-int(kv_lens.max()) // step.layout.block_size)
    positions = np.arange(num_blocks * step.layout.block_size)
    ends = kv_lens[:, None, None]
    excluded = positions >= ends
    if window is not None:
        excluded |= positions < ends - window
    return DecodeGroup(
        rows=None if all_rows else _to_device(step.row_offsets[members], step.device),
        pages=_to_device(step.layout.page_rows(step.tables[members, :num_blocks]).reshape(-1), step.device),
        mask=_mask(excluded, step.dtype, step.device) if excluded.any() else None,
    )


def _prefill_chunk(step: _Step, index: int, window: int | None, *, has_past: bool) -> PrefillChunk:
    q_len, kv_len = int(step.q_lens[index]), int(step.kv_lens[index])
    start = int(step.row_offsets[index])
    if not has_past and (window is None or window >= kv_len):
        return PrefillChunk(start, start + q_len, kv_len, None, None)
    positions = np.arange(kv_len - q_len, kv_len)[:, None]
    excluded = np.arange(kv_len) > positions
    if window is not None:
        excluded |= np.arange(kv_len) <= positions - window
    pages = step.layout.page_rows(step.tables[index, : -(-kv_len // step.layout.block_size)]).reshape(-1)
    return PrefillChunk(
        start,
        start + q_len,
        kv_len,
        _to_device(pages, step.device) if has_past else None,
        _mask(excluded, step.dtype, step.device),
    )


def _mask(excluded: npt.NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _to_device(np.where(excluded, np.float32("-inf"), np.float32(0)), device).to(dtype)


def _to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
