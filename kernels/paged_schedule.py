"""What each row of a step attends to, as tables on the device that the paged attention kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.paged_attention_tiles import PagedLayout, tokens_per_tile
from kernels.step_buffer import upload

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PagedSchedule:
    """The attention of one step of `num_rows` rows.

    The tables are views of `buffer`, which `build_paged_schedule` fills with one copy. Their lengths follow from shapes
    alone (the layout and the bounds), never from the sequences' lengths. Every row is in exactly one table.

    Attributes:
        layout: The model's and the cache's.
        num_rows: Rows of the step, those of no sequence included.
        decodes: int32 `[max_decodes, 4]` rows of `(row, kv_len, sequence, 0)`: sequences with one row; then rows of no
            sequence, with `kv_len` 0; then unused ones, with row -1.
        tiles: int32 `[num_tiles, 4]` rows of `(sequence, row0, row_end, position0)`: consecutive rows of a sequence
            that has several, the first one at `position0` in it; then rows of no sequence, with sequence -1; then
            unused ones, with no rows. Those with the longest past come first.
        block_tables: int32 `[max_sequences, max_blocks]`, the cache blocks of each sequence, in order; 0 past its last.
        buffer: int32, the memory the tables are views of.
    """

    layout: PagedLayout
    num_rows: int
    decodes: Tensor
    tiles: Tensor
    block_tables: Tensor
    buffer: Tensor


def build_paged_schedule(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    layout: PagedLayout,
    num_rows: int,
    max_sequences: int,
    max_blocks: int,
    max_decodes: int | None = None,
    max_chunks: int | None = None,
    device: torch.device,
    into: Tensor | None = None,
) -> PagedSchedule:
    """Check a step's sequences and put what the kernels read of them on the device with one copy.

    Sequence i has the next `q_lens[i]` rows of the step: the last of its `kv_lens[i]` tokens, whose keys and values are
    in the blocks of `block_tables[i]`. Rows past the last sequence's attend to nothing.

    Args:
        q_lens: Rows of each sequence, 1 or more.
        kv_lens: Tokens of each sequence, those of its rows included.
        block_tables: Blocks of each sequence; only those that its tokens fill are used.
        layout: The model's and the cache's.
        num_rows: Rows of the step.
        max_sequences: Most sequences of a step of these shapes.
        max_blocks: Most blocks of a sequence.
        max_decodes: Most sequences with one row; unset: `max_sequences`, or `num_rows` if that is less.
        max_chunks: Most sequences with several rows; unset: `max_sequences`. With 0 there are no query tiles and
            nothing is launched for them.
        device: Where the tables live.
        into: A `buffer` of an earlier schedule of the same shapes, overwritten instead of allocating (so that a
            captured graph finds the new tables at the old addresses).

    Raises:
        ValueError: the arguments disagree with each other (both are named).
    """
    if max_decodes is None:
        max_decodes = min(max_sequences, num_rows)
    if max_chunks is None:
        max_chunks = max_sequences
    q, kv = np.asarray(q_lens, dtype=np.int64), np.asarray(kv_lens, dtype=np.int64)
    _check_lengths(q, kv, len(block_tables), num_rows, max_sequences)
    tables = _filled_tables(kv, block_tables, layout, max_sequences, max_blocks)
    num_chunks = int((q > 1).sum())
    unowned = num_rows - int(q.sum())
    needed = len(q) - num_chunks + (0 if max_chunks else unowned)
    if needed > max_decodes or num_chunks > max_chunks:
        raise ValueError(
            f"the step has {len(q) - num_chunks} sequences of one row, {num_chunks} of several and {unowned} rows of "
            f"none, more than max_decodes={max_decodes} and max_chunks={max_chunks} provide for"
        )
    starts = np.cumsum(q) - q
    decodes = _decode_table(q, kv, starts, max_decodes)
    if max_chunks:
        length = num_query_tiles(num_rows, max_chunks, tokens_per_tile(layout))
        tiles = _tile_table(q, kv, starts, num_rows, tokens_per_tile(layout), length)
    else:
        tiles = np.zeros((0, 4), dtype=np.int64)
        one = len(q)
        decodes[one : one + unowned, 0] = np.arange(num_rows - unowned, num_rows)
    buffer, parts = upload(
        [decodes.astype(np.int32), tiles.astype(np.int32), tables],
        device,
        into,
        "layout, num_rows, max_sequences, max_blocks, max_decodes and max_chunks",
    )
    return PagedSchedule(
        layout=layout,
        num_rows=num_rows,
        decodes=parts[0].view(-1, 4),
        tiles=parts[1].view(-1, 4),
        block_tables=parts[2].view(max_sequences, max_blocks),
        buffer=buffer,
    )


def num_query_tiles(num_rows: int, max_chunks: int, tile_tokens: int) -> int:
    """Most tiles that sequences of several rows each, and the rows of none, need.

    Each may end in a partial tile, so the worst case is as many of them as there can be, and the rest in whole tiles.
    """
    parts = min(num_rows, min(max_chunks, num_rows // 2) + 1)
    return parts + (num_rows - parts) // tile_tokens


def _check_lengths(q: _Ints, kv: _Ints, num_tables: int, num_rows: int, max_sequences: int) -> None:
    if not len(q) == len(kv) == num_tables:
        raise ValueError(
            f"q_lens has {len(q)} entries, kv_lens {len(kv)} and block_tables {num_tables}, expected one a sequence"
        )
    if len(q) > max_sequences:
        raise ValueError(f"q_lens has {len(q)} sequences, more than max_sequences={max_sequences}")
    for index in np.flatnonzero((q < 1) | (kv < q))[:1].tolist():
        raise ValueError(
            f"sequence {index} has q_len {q[index]} and kv_len {kv[index]}, expected 1 <= q_len <= kv_len: "
            "a sequence's own rows are the last of its tokens"
        )
    if q.sum() > num_rows:
        raise ValueError(f"q_lens add up to {q.sum()} rows, more than num_rows={num_rows}")


def _filled_tables(
    kv: _Ints, block_tables: Sequence[Sequence[int]], layout: PagedLayout, max_sequences: int, max_blocks: int
) -> npt.NDArray[np.int32]:
    tables = np.zeros((max_sequences, max_blocks), dtype=np.int64)
    for index, (count, table) in enumerate(zip((-(-kv // layout.block_size)).tolist(), block_tables, strict=True)):
        if count > max_blocks or count > len(table):
            raise ValueError(
                f"sequence {index} has {kv[index]} tokens, which fill {count} blocks of {layout.block_size}; its block "
                f"table has {len(table)} and max_blocks is {max_blocks}"
            )
        tables[index, :count] = table[:count]
    outside = (tables < 0) | (tables >= layout.num_blocks)
    if outside.any():
        index, place = np.argwhere(outside)[0].tolist()
        raise ValueError(
            f"block_tables names block {tables[index, place]} for sequence {index}, outside the cache's "
            f"{layout.num_blocks} blocks"
        )
    return tables.astype(np.int32)


def _decode_table(q: _Ints, kv: _Ints, starts: _Ints, length: int) -> _Ints:
    decodes = np.zeros((length, 4), dtype=np.int64)
    decodes[:, 0] = -1
    sequences = np.flatnonzero(q == 1)
    decodes[: len(sequences), :3] = np.stack((starts[sequences], kv[sequences], sequences), 1)
    return decodes


def _tile_table(q: _Ints, kv: _Ints, starts: _Ints, num_rows: int, tile_tokens: int, length: int) -> _Ints:
    """Tiles of the sequences with several rows, longest past first, then of the rows past the last sequence's."""
    chunks = np.flatnonzero(q > 1)
    counts = -(-q[chunks] // tile_tokens)
    sequence = np.repeat(chunks, counts)
    skipped = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_tokens
    row0 = starts[sequence] + skipped
    row_end = np.minimum(row0 + tile_tokens, starts[sequence] + q[sequence])
    position0 = kv[sequence] - q[sequence] + skipped
    used = np.stack((sequence, row0, row_end, position0), 1)
    used = used[np.argsort(-position0, kind="stable")]
    unowned0 = np.arange(int(q.sum()), num_rows, tile_tokens)
    unowned = np.stack(
        (np.full_like(unowned0, -1), unowned0, np.minimum(unowned0 + tile_tokens, num_rows), 0 * unowned0), 1
    )
    unused = np.tile(np.array([-1, 0, 0, 0]), (length - len(used) - len(unowned), 1))
    return np.concatenate((used, unowned, unused))
