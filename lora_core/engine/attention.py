"""Attention over a paged KV cache: where a step writes its keys and values, and which pages each sequence reads.

All of a step's index arithmetic is done once, on the host, by `build_attention`; the layers share the result. Plain
torch on every device: pages are gathered and multiplied, with the query heads of one KV head packed together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Ints = npt.NDArray[np.int64]

# Decoding sequences attend together, each padded to the longest. A further group of them costs about as much time in a
# layer as this many padded tokens (measured on CPU).
_GROUP_COST_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Shape of one layer's KV cache: `[2, num_blocks, num_kv_heads, block_size, head_dim]`, keys first.

    The tokens of one head in one block lie together, so that gathering pages copies long rows and its result is
    contiguous per head. Every block may be used; none is reserved.
    """

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (2, self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim)

    def page_rows(self, blocks: Ints) -> Ints:
        """Rows of the cache viewed as `[-1, block_size * head_dim]` that hold blocks `[..., n]`.

        Returns:
            `[2, ..., num_kv_heads, n]`: keys and values of each head, in the order of the blocks.
        """
        planes = np.arange(2).reshape(2, *(1,) * (blocks.ndim + 1)) * self.num_blocks
        heads = np.arange(self.num_kv_heads)[:, None]
        return (planes + blocks[..., None, :]) * self.num_kv_heads + heads

    def token_rows(self, blocks: Ints, offsets: Ints) -> Ints:
        """Rows of the cache viewed as `[-1, head_dim]` that hold the tokens at `offsets` `[T]` of `blocks` `[T]`.

        Returns:
            `[T, 2, num_kv_heads]`.
        """
        planes = np.arange(2)[:, None] * self.num_blocks
        heads = np.arange(self.num_kv_heads)
        pages = (planes + blocks[:, None, None]) * self.num_kv_heads + heads
        return pages * self.block_size + offsets[:, None, None]


class KVCache:
    """The KV cache of all layers; `layers` is what the decoder reads and writes, one tensor of `layout.shape` each."""

    def __init__(self, layout: KVLayout, num_layers: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self._storage = torch.zeros((num_layers, *layout.shape), dtype=dtype, device=device)
        self.layers: list[Tensor] = list(self._storage.unbind(0))

    def clear(self, blocks: Tensor) -> None:
        """Zero whole blocks in every layer.

        A block's tail is multiplied by a weight of 0 before its owner fills it. If the last owner left a NaN or an
        infinity there, the product would carry it over to the new one.
        """
        self._storage.index_fill_(2, blocks, 0)


class SequenceSpan(NamedTuple):
    """What one row of the batch computes: the last `q_len` of `kv_len` tokens, kept in the blocks of `block_table`."""

    q_len: int
    kv_len: int
    block_table: Sequence[int]


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each, attended together; B of them, padded to L tokens.

    Attributes:
        rows: int64 `[B]`, their token rows; None when they are all rows of the step, in order.
        pages: int64 `[2 * B * num_kv_heads * L / block_size]`, see `KVLayout.page_rows`.
        mask: `[B, 1, L]` in the model's data type, 0 or -inf past a sequence's end; None when L fits all exactly.
    """

    rows: Tensor | None
    pages: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class PrefillChunk:
    """Several new tokens of one sequence, in token rows `start:stop`.

    Attributes:
        kv_len: Tokens of the sequence, the new ones last.
        pages: int64, pages of the whole sequence; None when it has no past, and the new keys and values are all.
        mask: `[stop - start, kv_len]` in the model's data type, 0 or -inf; None with `pages`, plain causal.
    """

    start: int
    stop: int
    kv_len: int
    pages: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's attention, for T token rows; every row belongs to exactly one decode group or prefill chunk.

    Attributes:
        write_rows: int64 `[T * 2 * num_kv_heads]`, where the step's keys and values go, see `KVLayout.token_rows`.
        fresh_blocks: int64, blocks whose first token this step writes: to be cleared before it; None without any.
    """

    write_rows: Tensor
    fresh_blocks: Tensor | None
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]


def build_attention(
    spans: Sequence[SequenceSpan], layout: KVLayout, *, dtype: torch.dtype, device: torch.device
) -> AttentionMetadata:
    """Lay out a step's attention from its sequences, in row order.

    Args:
        spans: One for each sequence; its tokens take the next `q_len` rows of the step.
        layout: Of the KV cache.
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

    decoding = np.flatnonzero(q_lens == 1)
    whole_step = len(decoding) == len(spans)
    groups = list(_groups_of_near_length(decoding, -(-kv_lens[decoding] // layout.block_size) * layout.block_size))
    return AttentionMetadata(
        write_rows=_to_device(layout.token_rows(blocks, offsets).reshape(-1), device),
        fresh_blocks=_to_device(fresh, device) if fresh.size else None,
        decodes=tuple(
            _decode_group(
                None if whole_step and len(groups) == 1 else row_offsets[members],
                tables[members],
                kv_lens[members],
                layout,
                dtype,
                device,
            )
            for members in groups
        ),
        prefills=tuple(
            _prefill_chunk(int(row_offsets[index]), spans[index], tables[index], layout, dtype, device)
            for index in np.flatnonzero(q_lens > 1).tolist()
        ),
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


def attend(queries: Tensor, key_values: Tensor, cache: Tensor, attention: AttentionMetadata, *, scale: float) -> Tensor:
    """Causal attention of each token row to its own sequence, through one layer's cache.

    Semantics, for query head h of a row at position p, with g = num_heads / num_kv_heads:
        out[h] = softmax(scale * q[h] @ K[:p + 1, h // g].T) @ V[:p + 1, h // g]

    Args:
        queries: `[T, num_heads, head_dim]`.
        key_values: The step's own, `[T, 2 * num_kv_heads, head_dim]`, which `write_kv` has stored already.
        cache: `KVLayout.shape`.
        attention: The step's metadata.
        scale: Of the scores.

    Returns:
        `[T, num_heads * head_dim]`.
    """
    num_rows, num_heads, head_dim = queries.shape
    if len(attention.decodes) == 1 and attention.decodes[0].rows is None:
        return _attend_decodes(queries, cache, attention.decodes[0], scale).view(num_rows, -1)
    out = queries.new_empty(num_rows, num_heads, head_dim)
    for group in attention.decodes:
        assert group.rows is not None
        members = queries.index_select(0, group.rows)
        out.index_copy_(0, group.rows, _attend_decodes(members, cache, group, scale))
    for chunk in attention.prefills:
        rows = slice(chunk.start, chunk.stop)
        out[rows] = _attend_prefill(queries[rows], key_values[rows], cache, chunk, scale)
    return out.view(num_rows, -1)


def _attend_decodes(queries: Tensor, cache: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    """`[B, num_heads, head_dim]` to the same."""
    batch, num_heads, head_dim = queries.shape
    num_kv_heads = cache.shape[2]
    keys, values = _gather(cache, group.pages).view(2, batch * num_kv_heads, -1, head_dim)
    group_size = num_heads // num_kv_heads
    if batch == 1:
        # Starting the two products costs more than they save (bf16 on CPU: 20 us each).
        mask = None if group.mask is None else group.mask[None]
        packed = queries.reshape(1, num_kv_heads, group_size, head_dim)
        out = F.scaled_dot_product_attention(packed, keys[None], values[None], attn_mask=mask, scale=scale)
        return out.view(1, num_heads, head_dim)
    packed = (queries * scale).view(batch * num_kv_heads, group_size, head_dim)
    scores = torch.bmm(packed, keys.transpose(1, 2))
    if group.mask is not None:
        scores.view(batch, num_heads, -1).add_(group.mask)
    return torch.bmm(torch.softmax(scores, -1), values).view(batch, num_heads, head_dim)


def _attend_prefill(queries: Tensor, key_values: Tensor, cache: Tensor, chunk: PrefillChunk, scale: float) -> Tensor:
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
    out = F.scaled_dot_product_attention(
        queries.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3),
        keys.expand(-1, group, -1, -1),
        values.expand(-1, group, -1, -1),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


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


def _decode_group(
    rows: Ints | None, tables: Ints, kv_lens: Ints, layout: KVLayout, dtype: torch.dtype, device: torch.device
) -> DecodeGroup:
    num_blocks = -(-int(kv_lens.max()) // layout.block_size)
    padded_len = num_blocks * layout.block_size
    past_end = np.arange(padded_len) >= kv_lens[:, None, None]
    return DecodeGroup(
        rows=None if rows is None else _to_device(rows, device),
        pages=_to_device(layout.page_rows(tables[:, :num_blocks]).reshape(-1), device),
        mask=_mask(past_end, dtype, device) if past_end.any() else None,
    )


def _prefill_chunk(
    start: int, span: SequenceSpan, table: Ints, layout: KVLayout, dtype: torch.dtype, device: torch.device
) -> PrefillChunk:
    stop = start + span.q_len
    if span.q_len == span.kv_len:
        return PrefillChunk(start, stop, span.kv_len, None, None)
    num_blocks = -(-span.kv_len // layout.block_size)
    positions = np.arange(span.kv_len - span.q_len, span.kv_len)
    return PrefillChunk(
        start,
        stop,
        span.kv_len,
        _to_device(layout.page_rows(table[:num_blocks]).reshape(-1), device),
        _mask(np.arange(span.kv_len) > positions[:, None], dtype, device),
    )


def _mask(excluded: npt.NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _to_device(np.where(excluded, np.float32("-inf"), np.float32(0)), device).to(dtype)


def _to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
