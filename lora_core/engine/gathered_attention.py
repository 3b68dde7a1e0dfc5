"""Attention over a paged KV cache without Triton: pages are gathered and multiplied in plain torch.

The query heads of one KV head are packed together. Runs on every device, where no kernel serves it or the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.support import cpu_multiplies
from lora_core.engine.kv_cache import Ints, KVLayout
from lora_core.engine.step_buffers import to_device

# Decoding sequences attend together, each padded to the longest. A further group of them costs about as much time in a
# layer as this many padded tokens (measured on CPU).
_GROUP_COST_TOKENS = 512


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each, attended together; B of them, padded to L tokens.

    With a window, L counts from the block that holds the first token of the window.

    Attributes:
        rows: int64 `[B]`, their token rows; None when they are all rows of the step, in order.
        pages: int64 `[2 * B * num_kv_heads * L / block_size]`, see `KVLayout.page_rows`.
        mask: `[B, 1, L]` in the data type that is multiplied, 0 or -inf past a sequence's end or before its window;
            None when all L tokens of each are attended to.
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
        mask: `[stop - start, kv_len]` in the data type that is multiplied, 0 or -inf; None when it is plain causal
            without a past.
    """

    start: int
    stop: int
    kv_len: int
    pages: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionReads:
    """What a step's rows attend to; every row is of exactly one decode group or prefill chunk."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillChunk, ...]


class StepSequences(NamedTuple):
    """A step's sequences, in row order.

    Attributes:
        q_lens: int64 `[N]`, rows of each sequence.
        kv_lens: int64 `[N]`, tokens of each, its rows last.
        row_offsets: int64 `[N + 1]`, first row of each, and the end.
        tables: int64 `[N, most blocks]`, blocks of each; past its last any block of its own.
        layout: Of the KV cache.
        dtype: Of the model's activations.
        device: Where the step runs.
    """

    q_lens: Ints
    kv_lens: Ints
    row_offsets: Ints
    tables: Ints
    layout: KVLayout
    dtype: torch.dtype
    device: torch.device


def attend_gathered(
    queries: Tensor,
    key_values: Tensor,
    cache: Tensor,
    reads: AttentionReads,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """`lora_core.engine.attention.attend` from gathered pages: `[T, num_heads, head_dim]` to the same."""
    if len(reads.decodes) == 1 and reads.decodes[0].rows is None:
        return _attend_decodes(queries, cache, reads.decodes[0], scale, softcap)
    out = queries.new_empty(queries.shape)
    for group in reads.decodes:
        assert group.rows is not None
        members = queries.index_select(0, group.rows)
        out.index_copy_(0, group.rows, _attend_decodes(members, cache, group, scale, softcap))
    for chunk in reads.prefills:
        rows = slice(chunk.start, chunk.stop)
        out[rows] = _attend_prefill(queries[rows], key_values[rows], cache, chunk, scale, softcap)
    return out


def _multiplied_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which data type a device attends to keys and values of another."""
    return torch.float32 if device.type == "cpu" and not cpu_multiplies(dtype) else dtype


def _multiplied(tensor: Tensor) -> Tensor:
    """A tensor in a data type that its device multiplies."""
    return tensor.to(_multiplied_dtype(tensor.dtype, tensor.device))


def _attend_decodes(queries: Tensor, cache: Tensor, group: DecodeGroup, scale: float, softcap: float | None) -> Tensor:
    """`[B, num_heads, head_dim]` to the same."""
    batch, num_heads, head_dim = queries.shape
    num_kv_heads = cache.shape[2]
    queries, gathered = _multiplied(queries), _multiplied(_gather(cache, group.pages))
    keys, values = gathered.view(2, batch * num_kv_heads, -1, head_dim)
    group_size = num_heads // num_kv_heads
    if batch == 1 and softcap is None:
        # Starting the two products costs more than they save (bf16 on CPU: 20 us each).
        mask = None if group.mask is None else group.mask[None]
        packed = queries.reshape(1, num_kv_heads, group_size, head_dim)
        out = F.scaled_dot_product_attention(packed, keys[None], values[None], attn_mask=mask, scale=scale)
        return out.view(1, num_heads, head_dim).to(cache.dtype)
    packed = (queries * scale).view(batch * num_kv_heads, group_size, head_dim)
    scores = torch.bmm(packed, keys.transpose(1, 2))
    if softcap is not None:
        _cap_(scores, softcap)
    if group.mask is not None:
        scores.view(batch, num_heads, -1).add_(group.mask)
    return torch.bmm(torch.softmax(scores, -1), values).view(batch, num_heads, head_dim).to(cache.dtype)


def _attend_prefill(
    queries: Tensor, key_values: Tensor, cache: Tensor, chunk: PrefillChunk, scale: float, softcap: float | None
) -> Tensor:
    """`[Tq, num_heads, head_dim]` to the same, in a data type that is multiplied."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = cache.shape[2]
    group = num_heads // num_kv_heads
    queries = _multiplied(queries)
    if chunk.pages is None:
        keys, values = _multiplied(key_values).view(num_rows, 2, num_kv_heads, 1, head_dim).permute(1, 2, 3, 0, 4)
    else:
        gathered = _multiplied(_gather(cache, chunk.pages)).view(2, num_kv_heads, 1, -1, head_dim)
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


def build_reads(step: StepSequences, window: int | None) -> AttentionReads:
    """What the step's rows attend to with a window, in tokens; None is the whole past.

    Args:
        step: Its sequences.
        window: Tokens a token attends to, itself included.
    """
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


def _skip_blocks(step: StepSequences, first_blocks: Ints) -> Ints:
    """Block tables that start with each sequence's `first_blocks`; the places behind its last repeat that one."""
    if not first_blocks.any():
        return step.tables
    last_blocks = (step.kv_lens - 1) // step.layout.block_size
    places = first_blocks[:, None] + np.arange(int((last_blocks - first_blocks).max()) + 1)
    return np.take_along_axis(step.tables, np.minimum(places, last_blocks[:, None]), 1)


def _decode_group(step: StepSequences, members: Ints, window: int | None, *, all_rows: bool) -> DecodeGroup:
    kv_lens = step.kv_lens[members]
    num_blocks = -(-int(kv_lens.max()) // step.layout.block_size)
    positions = np.arange(num_blocks * step.layout.block_size)
    ends = kv_lens[:, None, None]
    excluded = positions >= ends
    if window is not None:
        excluded |= positions < ends - window
    return DecodeGroup(
        rows=None if all_rows else to_device(step.row_offsets[members], step.device),
        pages=to_device(step.layout.page_rows(step.tables[members, :num_blocks]).reshape(-1), step.device),
        mask=_mask(excluded, step.dtype, step.device) if excluded.any() else None,
    )


def _prefill_chunk(step: StepSequences, index: int, window: int | None, *, has_past: bool) -> PrefillChunk:
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
        to_device(pages, step.device) if has_past else None,
        _mask(excluded, step.dtype, step.device),
    )


def _mask(excluded: npt.NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = to_device(np.where(excluded, np.float32("-inf"), np.float32(0)), device)
    return mask.to(_multiplied_dtype(dtype, device))
