"""Attention over a paged KV cache: where a step writes its keys and values, and which pages each sequence reads.

All of a step's index arithmetic is done once, on the host, by `build_attention`, and shared by its layers. Pages are
read where they lie by the Triton kernels of `kernels.paged_attention` or by FlashInfer, where a device runs them, and
on the CPU by `kernels.attention_native`; elsewhere they are gathered in plain torch. What `build_attention` was given
decides, and `attend` follows.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import PagedLayout, PagedSchedule, build_paged_schedule, paged_attention
from kernels.attention_native import PagedSequences, attend_native, can_attend
from kernels.flashinfer_attention import FlashInferAttention, FlashInferStep, PageLists
from kernels.paged_attention import layout_fault
from kernels.support import triton_fault, warn_of_fallback
from lora_core.engine.gathered_attention import (
    AttentionReads,
    StepSequences,
    attend_gathered,
    build_reads,
)
from lora_core.engine.kv_cache import Ints, KVLayout
from lora_core.engine.step_buffers import to_device

logger = logging.getLogger(__name__)


class SequenceSpan(NamedTuple):
    """What one row of the batch computes: the last `q_len` of `kv_len` tokens, kept in the blocks of `block_table`."""

    q_len: int
    kv_len: int
    block_table: Sequence[int]


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's attention, for T token rows.

    Attributes:
        write_rows: int64 `[T * 2 * num_kv_heads]`, where the step's keys and values go, see `KVLayout.token_rows`.
        fresh_blocks: int64, blocks whose first token this step writes: to be cleared before it; None without any, and
            where nothing reads what a block holds past its sequence's end, as the kernels do not.
        reads: What is gathered, by window in tokens; None is the whole past. Windows that reach past every sequence
            share one object. Empty where kernels read pages where they lie.
        schedule: What the Triton kernels read, for all windows; None where they do not attend.
        planned: What FlashInfer computes; None where it does not attend.
        sequences: What the C kernel reads, for all windows; None where it does not attend.
    """

    write_rows: Tensor
    fresh_blocks: Tensor | None
    reads: Mapping[int | None, AttentionReads]
    schedule: PagedSchedule | None = None
    planned: FlashInferStep | None = None
    sequences: PagedSequences | None = None


def paged_layout(layout: KVLayout, num_heads: int, *, dtype: torch.dtype, device: torch.device) -> PagedLayout | None:
    """What `build_attention` takes as `paged` for a model on a device: None where the Triton kernels do not attend.

    They do not on the CPU; nor where they do not serve the device or the model, of which the log says why.

    Args:
        layout: Of the KV cache.
        num_heads: Query heads.
        dtype: Of the cache and the activations.
        device: Where the model runs.
    """
    if device.type == "cpu":
        return None
    paged = PagedLayout(num_heads, layout.num_kv_heads, layout.head_dim, layout.block_size, layout.num_blocks, dtype)
    if (fault := triton_fault(device)) is not None:
        warn_of_fallback(device, fault)
        return None
    if (fault := layout_fault(paged)) is not None:
        logger.warning("attention on %s gathers pages in plain torch, which is slow: %s", device, fault)
        return None
    return paged


def build_attention(
    spans: Sequence[SequenceSpan],
    layout: KVLayout,
    *,
    windows: Sequence[int | None] = (None,),
    dtype: torch.dtype,
    device: torch.device,
    paged: PagedLayout | None = None,
    flashinfer: FlashInferAttention | None = None,
) -> AttentionMetadata:
    """Lay out a step's attention from its sequences, in row order.

    Args:
        spans: One for each sequence; its tokens take the next `q_len` rows of the step.
        layout: Of the KV cache.
        windows: The distinct windows of the model's layers: tokens a token attends to, itself included, or None for
            all before it. Of use where pages are gathered.
        dtype: Of the model's activations.
        device: Where the step runs.
        paged: What `paged_layout` gives for the model: the Triton kernels attend. None: on the CPU the C kernel does,
            where it serves the model; elsewhere pages are gathered.
        flashinfer: Attends in their place.
    """
    q_lens = np.array([span.q_len for span in spans])
    kv_lens = np.array([span.kv_len for span in spans])
    row_offsets = np.concatenate(([0], np.cumsum(q_lens)))
    tables = _padded_tables(spans, kv_lens, layout)

    sequence = np.repeat(np.arange(len(spans)), q_lens)
    positions = token_positions(q_lens, kv_lens)
    blocks, offsets = tables[sequence, positions // layout.block_size], positions % layout.block_size
    write_rows = to_device(layout.token_rows(blocks, offsets).reshape(-1), device)
    if flashinfer is not None:
        lists = PageLists.of(q_lens, kv_lens, [span.block_table for span in spans], layout.block_size)
        return AttentionMetadata(write_rows, None, {}, planned=flashinfer.plan(lists))
    if paged is not None:
        return AttentionMetadata(write_rows, None, {}, _schedule(spans, q_lens, kv_lens, paged, device))
    if device.type == "cpu" and can_attend(dtype, layout.head_dim):
        sequences = PagedSequences.of(row_offsets[:-1], q_lens, kv_lens, tables)
        return AttentionMetadata(write_rows, None, {}, sequences=sequences)

    longest = int(kv_lens.max())
    narrowed = {window: None if window is None or window >= longest else window for window in windows}
    step = StepSequences(q_lens, kv_lens, row_offsets, tables, layout, dtype, device)
    reads = {window: build_reads(step, window) for window in set(narrowed.values())}
    fresh = blocks[offsets == 0]
    return AttentionMetadata(
        write_rows=write_rows,
        fresh_blocks=to_device(fresh, device) if fresh.size else None,
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
    tokens, heads = cache.view(-1, head_dim), key_values.reshape(-1, head_dim)
    tokens.index_copy_(0, attention.write_rows, heads)


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
    if attention.planned is not None:
        out = attention.planned.attend(queries, cache, scale=scale, window=window, softcap=softcap)
    elif attention.schedule is not None:
        out = paged_attention(queries, cache, attention.schedule, scale=scale, window=window, softcap=softcap)
    elif attention.sequences is not None:
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        attend_native(queries, cache, attention.sequences, out, scale=scale, window=window, softcap=softcap)
    else:
        out = attend_gathered(queries, key_values, cache, attention.reads[window], scale, softcap)
    return out.flatten(1)


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


def _schedule(
    spans: Sequence[SequenceSpan], q_lens: Ints, kv_lens: Ints, paged: PagedLayout, device: torch.device
) -> PagedSchedule:
    """The kernels' tables of a step that no graph was captured for: what they have room for is near what it needs.

    Capacities are powers of two, so that few of them come up: the kernels are compiled for some of them.
    """
    num_decodes = int((q_lens == 1).sum())
    return build_paged_schedule(
        q_lens.tolist(),
        kv_lens.tolist(),
        [span.block_table for span in spans],
        layout=paged,
        num_rows=int(q_lens.sum()),
        max_sequences=_power_of_two(len(spans)),
        max_blocks=_power_of_two(-(-int(kv_lens.max()) // paged.block_size)),
        max_decodes=_power_of_two(num_decodes),
        max_chunks=_power_of_two(len(spans) - num_decodes),
        device=device,
    )


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not smaller; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0
