"""What attention reads of a step that is replayed from a graph, at addresses that stay."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels import PagedLayout, PagedSchedule, build_paged_schedule
from kernels.flashinfer_attention import FlashInferAttention, PageLists
from lora_core.engine.attention import AttentionMetadata
from lora_core.engine.kv_cache import Ints, KVLayout


class DecodeTables(Protocol):
    """The tables of steps in which every sequence has one new token, for each size of a graph.

    Rows that pad a step attend to nothing that matters.
    """

    def make(self, rows: int, blocks: int, write_rows: Tensor) -> AttentionMetadata:
        """What a graph is captured with: a step of padding alone.

        Args:
            rows: Of the graph.
            blocks: Most cache blocks of a sequence.
            write_rows: Where the graph's rows put their keys and values, see `AttentionMetadata`.
        """

    def fill(self, rows: int, blocks: int, kv_lens: Ints, block_tables: Sequence[list[int]]) -> None:
        """Put a step where the graph of this size reads it.

        Args:
            rows: Of the graph.
            blocks: As given to `make`.
            kv_lens: Tokens of each sequence; no more sequences than rows.
            block_tables: Its blocks; no more in use than `blocks`.
        """


class TritonTables:
    """Those of the Triton kernels; implements `DecodeTables`."""

    def __init__(self, paged: PagedLayout, device: torch.device) -> None:
        self._paged, self._device = paged, device
        self._schedules: dict[tuple[int, int], PagedSchedule] = {}

    def make(self, rows: int, blocks: int, write_rows: Tensor) -> AttentionMetadata:
        """As `DecodeTables`."""
        self._schedules[rows, blocks] = self._schedule(rows, blocks, [], [], None)
        return AttentionMetadata(write_rows, None, {}, self._schedules[rows, blocks])

    def fill(self, rows: int, blocks: int, kv_lens: Ints, block_tables: Sequence[list[int]]) -> None:
        """As `DecodeTables`."""
        self._schedule(rows, blocks, kv_lens.tolist(), block_tables, self._schedules[rows, blocks].buffer)

    def _schedule(
        self, rows: int, blocks: int, kv_lens: list[int], block_tables: Sequence[list[int]], into: Tensor | None
    ) -> PagedSchedule:
        return build_paged_schedule(
            [1] * len(kv_lens),
            kv_lens,
            block_tables,
            layout=self._paged,
            num_rows=rows,
            max_sequences=rows,
            max_blocks=blocks,
            max_decodes=rows,
            max_chunks=0,
            device=self._device,
            into=into,
        )


class FlashInferTables:
    """Those of FlashInfer, which are the same whatever the longest sequence; implements `DecodeTables`."""

    def __init__(self, flashinfer: FlashInferAttention, layout: KVLayout, *, max_rows: int, max_blocks: int) -> None:
        """Take memory for the largest step.

        Args:
            flashinfer: For the model.
            layout: Of the KV cache; its last block is nobody's.
            max_rows: Of the largest graph.
            max_blocks: Most cache blocks of a sequence.
        """
        self._flashinfer, self._layout = flashinfer, layout
        flashinfer.reserve_graphs(max_rows, max_blocks)

    def make(self, rows: int, blocks: int, write_rows: Tensor) -> AttentionMetadata:
        """As `DecodeTables`."""
        planned = self._flashinfer.plan_graph(self._lists(rows, np.zeros(0, np.int64), []))
        return AttentionMetadata(write_rows, None, {}, planned=planned)

    def fill(self, rows: int, blocks: int, kv_lens: Ints, block_tables: Sequence[list[int]]) -> None:
        """As `DecodeTables`."""
        self._flashinfer.plan_graph(self._lists(rows, kv_lens, block_tables))

    def _lists(self, rows: int, kv_lens: Ints, block_tables: Sequence[list[int]]) -> PageLists:
        # A row that pads the step reads the token that it writes itself.
        num_padding = rows - len(kv_lens)
        lengths = np.concatenate((kv_lens, np.ones(num_padding, np.int64)))
        tables = [*block_tables, *[[self._layout.num_blocks - 1]] * num_padding]
        return PageLists.of([1] * rows, lengths, tables, self._layout.block_size)
