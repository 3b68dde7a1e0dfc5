"""Steps in which every sequence has one new token, replayed from graphs that were captured at a few sizes.

A graph is the decoder without its head. It reads the step from buffers at fixed addresses: token ids, positions and
cache rows; the tables of attention; the tables of adapters. A step is written there, padded to the size of a graph, and
the graph launched. Rows that pad it belong to no sequence: they attend to nothing, use no adapter, and their keys and
values go to a block of the cache that is nobody's.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import Routing
from lora_core.engine.attention import AttentionMetadata
from lora_core.engine.buckets import block_buckets, row_buckets, smallest
from lora_core.engine.decode_tables import DecodeTables
from lora_core.engine.kernel_variants import Progress
from lora_core.engine.kv_cache import Ints, KVLayout
from lora_core.engine.recorder import Recorder, Run
from lora_core.engine.step_buffers import PendingTokens, StepBuffers, fill_pending, upload_step
from lora_core.engine.step_input import StepInput
from lora_core.layers import Adapted, LoRAModelWrapper
from lora_core.manager import LoRAManagerV3

Forward = Callable[[StepBuffers, AttentionMetadata], Tensor]
"""The decoder's hidden states `[T, hidden_size]` of a step."""


class GraphSizes(NamedTuple):
    """The sizes that graphs are captured at, and for which adapters.

    Attributes:
        rows: Rows of a step, ascending.
        blocks: Cache blocks of its longest sequence, ascending.
        adapted: Which layers apply adapters.
    """

    rows: tuple[int, ...]
    blocks: tuple[int, ...]
    adapted: tuple[Adapted, ...]

    @classmethod
    def choose(
        cls, setting: str, *, max_rows: int, max_model_len: int, block_size: int, has_lora: bool
    ) -> "GraphSizes":
        """The sizes for the setting `cuda_graphs`: "none", "common" or "all"."""
        kinds = {"none": (), "common": (Adapted.NOTHING, Adapted.LAYERS), "all": tuple(Adapted)}[setting]
        if not has_lora:
            kinds = kinds[:1]
        return cls(row_buckets(max_rows), block_buckets(max_model_len, block_size), kinds)

    @property
    def num_graphs(self) -> int:
        """How many graphs there are."""
        return len(self.rows) * len(self.blocks) * len(self.adapted)

    @property
    def tables(self) -> Iterator[tuple[int, int]]:
        """Rows and blocks of each graph's attention tables, the largest first."""
        return ((rows, blocks) for rows in reversed(self.rows) for blocks in reversed(self.blocks))


class _Shape(NamedTuple):
    rows: int
    blocks: int
    adapted: Adapted


class DecodeGraphs:
    """Captured graphs, and the buffers they read; for the thread that runs the model.

    The tensors that the model reads besides must stay where they are: weights, slots, and the KV cache.
    """

    def __init__(
        self,
        forward: Forward,
        sizes: GraphSizes,
        layout: KVLayout,
        tables: DecodeTables,
        recorder: Recorder,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        manager: LoRAManagerV3,
        wrapper: LoRAModelWrapper | None,
    ) -> None:
        """Allocate the buffers.

        Args:
            forward: What is captured.
            sizes: At which sizes.
            layout: Of the KV cache; its last block is nobody's.
            tables: What attention reads of a step.
            recorder: Captures.
            hidden_size: Of the hidden states.
            dtype: Of the same.
            device: Where steps run.
            manager: Routes the steps.
            wrapper: Puts a routing in force; None where adapters are not served.
        """
        self._forward, self._sizes, self._recorder = forward, sizes, recorder
        self._layout, self._tables, self._device = layout, tables, device
        self._manager, self._wrapper = manager, wrapper
        self.num_replays = 0
        """Steps that were replayed, since the start."""
        self._hidden = torch.zeros(sizes.rows[-1], hidden_size, dtype=dtype, device=device)
        self._buffers: dict[int, StepBuffers] = {}
        self._routings: dict[int, Routing] = {}
        self._replays: dict[_Shape, Run] = {}
        for rows in sizes.rows:
            # Each array anew: a buffer on the CPU shares its memory.
            self._buffers[rows] = upload_step(*self._padded([], [], [], rows), device)
            if wrapper is not None:
                self._routings[rows] = manager.full_routing(rows, device)

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Capture every graph: the largest first, whose memory the others use again."""
        done = 0
        for rows, blocks in self._sizes.tables:
            attention = self._tables.make(rows, blocks, self._buffers[rows].write_rows)
            for adapted in self._sizes.adapted:
                progress("capturing graphs", done, self._sizes.num_graphs)
                self._replays[_Shape(rows, blocks, adapted)] = self._record(rows, attention, adapted)
                done += 1
        progress("capturing graphs", done, self._sizes.num_graphs)

    def run(self, step: StepInput, pending: PendingTokens | None = None) -> tuple[Tensor, Routing | None] | None:
        """Replay the graph of a step.

        Args:
            step: Any step.
            pending: Those of its tokens that only the device knows.

        Returns:
            Hidden states `[T, hidden_size]`, which the next replay overwrites, and the step's routing, of more rows
            than those; None for a step that there is no graph for.
        """
        size = self._size(step)
        if size is None:
            return None
        rows, blocks = size
        routing = self._route(step, rows)
        slots = frozenset[int]() if routing is None else routing.slots
        adapted = Adapted.NOTHING if self._wrapper is None else self._wrapper.needs(slots)
        replay = self._replays.get(_Shape(rows, blocks, adapted))
        if replay is None:
            return None
        num_rows = len(step.q_lens)
        buffers = self._buffers[rows]
        upload_step(*self._padded(step.token_ids, step.kv_lens, step.block_tables, rows), self._device, buffers)
        if pending is not None:
            fill_pending(buffers.token_ids, pending)
        self._tables.fill(rows, blocks, step.kv_lens, step.block_tables)
        replay()
        self.num_replays += 1
        return self._hidden[:num_rows], routing

    def _size(self, step: StepInput) -> tuple[int, int] | None:
        """Rows and blocks of the smallest graph that holds a step; None if none does."""
        if (step.q_lens != 1).any():
            return None
        rows = smallest(self._sizes.rows, len(step.q_lens))
        blocks = smallest(self._sizes.blocks, -(-int(step.kv_lens.max()) // self._layout.block_size))
        return None if rows is None or blocks is None else (rows, blocks)

    def _route(self, step: StepInput, rows: int) -> Routing | None:
        """The step's routing, in the buffer that graphs of so many rows read; None without adapters."""
        if self._wrapper is None or all(slot is None for slot in step.slots):
            return None
        return self._manager.route(
            step.slots,
            step.row_offsets,
            step.slot_ranks,
            self._device,
            num_rows=rows,
            into=self._routings[rows].buffer,
        )

    def _padded(
        self, token_ids: Sequence[int] | Ints, kv_lens: Sequence[int] | Ints, tables: Sequence[list[int]], rows: int
    ) -> tuple[Ints, Ints, Ints]:
        """Token ids, positions and cache rows of sequences with one new token each, padded to `rows`."""
        count, size = len(token_ids), self._layout.block_size
        ids, positions = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        blocks = np.full(rows, self._layout.num_blocks - 1, np.int64)
        ids[:count] = token_ids
        positions[:count] = np.asarray(kv_lens, np.int64) - 1
        places = (positions[:count] // size).tolist()
        blocks[:count] = [table[place] for table, place in zip(tables, places, strict=True)]
        return ids, positions, self._layout.token_rows(blocks, positions % size).reshape(-1)

    def _record(self, rows: int, attention: AttentionMetadata, adapted: Adapted) -> Run:
        def run() -> None:
            self._hidden[:rows].copy_(self._forward(self._buffers[rows], attention))

        if self._wrapper is None:
            return self._recorder.record(run)
        routing = None if adapted is Adapted.NOTHING else self._routings[rows]
        with self._wrapper.routed(routing, adapted):
            return self._recorder.record(run)
