"""Which strips hold a second copy of which decoding sequence, so that its keys and values are multiplied as they lie.

Pages are shared, and one sequence's are scattered over the cache: to attend to them they are gathered first, which
takes longer than the attention itself. A sequence that decodes is therefore copied once into strips of its own
(`KVLayout`), each of its next tokens is written to both, and a step's strips are multiplied together, whatever their
sequences.

A copy cannot be stale. Blocks are written by steps, and every step is laid out here: a block gets a new stamp
whenever it is written from its beginning, and what a copy holds of a block counts only while the block has the stamp it
had when it was copied.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from lora_core.engine.kv_cache import Ints, KVCache, KVLayout

LEAST_TOKENS, LEAST_LENGTH = 1024, 128
"""Steps whose decoding sequences have fewer tokens in all, or on average, gather them: what is gathered is then in the
processor's caches still when it is multiplied, and the products of strips take longer to start (measured on CPU)."""

_IDLE_STEPS = 16
"""A sequence that did not decode in so many steps loses its strips."""


@dataclass(eq=False)
class _Copy:
    """What is held of one sequence.

    Attributes:
        block_table: The sequence's own list. It tells sequences apart, and is empty once its sequence has ended.
        strips: In token order.
        num_tokens: Tokens that are in the strips, from the first.
        num_written: Tokens, from the first, that may have been there: behind them the strips hold zeros.
        stamps: Of the blocks that hold the `num_tokens`.
        used: The step in which it was last attended to.
    """

    block_table: Sequence[int]
    strips: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_written: int = 0
    stamps: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    used: int = 0


class StripStep(NamedTuple):
    """What a step reads from strips, and what is to be copied before it.

    Attributes:
        members: `[M]`, the step's sequences that attend to strips, rising.
        tables: Their strips, in token order.
        extent: The strips that are read are among the first so many.
        sources: `[n]`, blocks to be copied.
        targets: `[n, 2]`, where to: a strip, and the block's slot in it.
        cleared: `[c, 2]`, slots to be zeroed, in the same form.
    """

    members: Ints
    tables: list[list[int]]
    extent: int
    sources: list[int]
    targets: list[tuple[int, int]]
    cleared: list[tuple[int, int]]


class Strips:
    """Hands strips to decoding sequences; used by one thread, for every step that writes to the cache.

    A sequence is told by its block table: the very list, which is emptied, not dropped, when its blocks are given back.
    Sequences for which there are no strips gather their pages.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        # A heap, so that those in use stay close together.
        self._free = list(range(layout.num_strips))
        # By the identity of their block table, which the copy keeps alive.
        self._copies: dict[int, _Copy] = {}
        self._stamps = np.zeros(layout.num_blocks, np.int64)
        self._last_stamp = 0
        self._step = 0

    @property
    def num_free(self) -> int:
        """Strips that hold nothing."""
        return len(self._free)

    def place(
        self, block_tables: Sequence[Sequence[int]], q_lens: Ints, kv_lens: Ints, tables: Ints, fresh: Ints
    ) -> StripStep | None:
        """Lay out a step: N sequences, of which those with one new token may attend to strips.

        Args:
            block_tables: Of each sequence.
            q_lens: `[N]`, new tokens of each.
            kv_lens: `[N]`, tokens of each, the new ones included.
            tables: `[N, most blocks]`, the block tables as far as they are in use, padded.
            fresh: Blocks whose first token this step writes.

        Returns:
            None where the whole step gathers pages. The new tokens are the caller's to write, to strips as well.
        """
        self._step += 1
        self._stamps[fresh] = np.arange(self._last_stamp, self._last_stamp + len(fresh)) + 1
        self._last_stamp += len(fresh)
        self._drop_ended()
        # What a sequence writes anew counts no more.
        for block_table, start in zip(block_tables, (kv_lens - q_lens).tolist(), strict=True):
            if (copy := self._copies.get(id(block_table))) is not None:
                copy.num_tokens = min(copy.num_tokens, start)
        members = self._choose(block_tables, q_lens, kv_lens)
        if not members:
            return None
        step = StripStep(np.array(members), [], 0, [], [], [])
        copies = [self._copies.setdefault(id(table), _Copy(table)) for table in map(block_tables.__getitem__, members)]
        num_strips = (-(-kv_lens[members] // self._layout.strip_tokens)).tolist()
        # First what has become too much, of sequences that had to start again: there is no more than just enough.
        for copy, count in zip(copies, num_strips, strict=True):
            copy.used = self._step
            while len(copy.strips) > count:
                heapq.heappush(self._free, copy.strips.pop())
        moved = [self._grow(copy, count) for copy, count in zip(copies, num_strips, strict=True)]
        self._close_gaps(copies, moved)
        for copy, changed, index in zip(copies, moved, members, strict=True):
            self._fill(copy, changed, int(kv_lens[index]), tables[index], step)
            step.tables.append(copy.strips)
        return step._replace(extent=max(max(strips) for strips in step.tables) + 1)

    def check(self, cache: KVCache) -> None:
        """Assert that each strip is free or in one copy, and that copies are those of their blocks; for tests."""
        held = [strip for copy in self._copies.values() for strip in copy.strips]
        assert sorted([*self._free, *held]) == list(range(self._layout.num_strips)), "strips are lost or held twice"
        size, per_strip = self._layout.block_size, self._layout.strip_blocks
        pages = [layer.view(-1, size, self._layout.head_dim) for layer in cache.layers]
        for copy in self._copies.values():
            self._forget_rewritten(copy, np.array(copy.block_table[: len(copy.stamps)], dtype=np.int64))
            for index in range(-(-copy.num_tokens // size)):
                source = self._layout.page_rows(np.array([copy.block_table[index]])).reshape(-1)
                strip, slot = np.array([copy.strips[index // per_strip]]), np.array([index % per_strip])
                target = self._layout.strip_page_rows(strip, slot).reshape(-1)
                num_tokens = min(size, copy.num_tokens - index * size)
                for layer in pages:
                    same = torch.equal(layer[target, :num_tokens].nan_to_num(), layer[source, :num_tokens].nan_to_num())
                    assert same, f"block {copy.block_table[index]} has another copy in strip {strip[0]}"

    def _choose(self, block_tables: Sequence[Sequence[int]], q_lens: Ints, kv_lens: Ints) -> list[int]:
        """The sequences that attend to strips: as many as there is room for, those that have strips first."""
        decoding = np.flatnonzero(q_lens == 1).tolist()
        if not decoding or kv_lens[decoding].sum() < LEAST_TOKENS or kv_lens[decoding].mean() < LEAST_LENGTH:
            return []
        room = self._layout.num_strips
        chosen = []
        for index in sorted(decoding, key=lambda index: id(block_tables[index]) not in self._copies):
            num_strips = -(-int(kv_lens[index]) // self._layout.strip_tokens)
            if num_strips <= room:
                room -= num_strips
                chosen.append(index)
            else:
                self._drop(id(block_tables[index]))
        return sorted(chosen)

    def _grow(self, copy: _Copy, num_strips: int) -> set[int]:
        """Give a copy the strips it lacks; returns their places."""
        places = set(range(len(copy.strips), num_strips))
        for _ in places:
            while not self._free:
                # The step's sequences have room together, so that others hold some.
                key, idle = min(self._copies.items(), key=lambda item: item[1].used)
                assert idle.used < self._step, "the strips of a step are more than there are"
                self._drop(key)
            copy.strips.append(heapq.heappop(self._free))
        return places

    def _close_gaps(self, copies: Sequence[_Copy], moved: Sequence[set[int]]) -> None:
        """Move strips from the far end into gaps, if there are many: those between the first and the last are all read.

        A strip moves by being copied anew.
        """
        num_held = self._layout.num_strips - len(self._free)
        if max(max(copy.strips) for copy in copies) < num_held + max(4, num_held // 4):
            return
        for copy, changed in zip(copies, moved, strict=True):
            for place, strip in enumerate(copy.strips):
                if strip >= num_held and self._free[0] < num_held:
                    copy.strips[place] = heapq.heapreplace(self._free, strip)
                    changed.add(place)

    def _fill(self, copy: _Copy, moved: set[int], num_tokens: int, blocks: Ints, step: StripStep) -> None:
        """Add to the step what is missing of the first `num_tokens - 1` tokens, of a sequence that has so many."""
        size, per_strip = self._layout.block_size, self._layout.strip_blocks
        num_blocks = -(-num_tokens // size)
        self._forget_rewritten(copy, blocks[:num_blocks])
        # The block of the new token is copied too, if it holds others.
        end = -(-(num_tokens - 1) // size)
        wrong = set(range(copy.num_tokens // size, end)) if copy.num_tokens < num_tokens - 1 else set()
        wrong.update(block for place in moved for block in range(place * per_strip, (place + 1) * per_strip))
        if wrong or copy.num_written > num_tokens:
            wrong.update(range((num_tokens - 1) // size, len(copy.strips) * per_strip))
        for block in sorted(wrong):
            target = copy.strips[block // per_strip], block % per_strip
            if block < end:
                step.sources.append(int(blocks[block]))
                step.targets.append(target)
            else:
                step.cleared.append(target)
        copy.stamps = self._stamps[blocks[:num_blocks]]
        copy.num_tokens = copy.num_written = num_tokens

    def _forget_rewritten(self, copy: _Copy, blocks: Ints) -> None:
        """Count no more of a copy than its first blocks that have been its sequence's since they were copied."""
        num_known = min(len(blocks), len(copy.stamps))
        same = copy.stamps[:num_known] == self._stamps[blocks[:num_known]]
        num_same = num_known if same.all() else int(same.argmin())
        copy.num_tokens = min(copy.num_tokens, num_same * self._layout.block_size)

    def _drop_ended(self) -> None:
        for key, copy in list(self._copies.items()):
            if not copy.block_table or copy.used < self._step - _IDLE_STEPS:
                self._drop(key)

    def _drop(self, key: int) -> None:
        copy = self._copies.pop(key, None)
        for strip in () if copy is None else copy.strips:
            heapq.heappush(self._free, strip)


def padded(tables: Sequence[Sequence[int]]) -> Ints:
    """Strip tables as `[M, most strips]`; past its last strip a sequence's first is repeated."""
    width = max(map(len, tables))
    return np.array([[*table, *[table[0]] * (width - len(table))] for table in tables])
