"""What one step computes, in numbers: all that a rank needs to know of it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_core.engine.kv_cache import Ints
from lora_core.engine.prompt_scores import logit_rows
from lora_core.engine.request import ScheduledRow


@dataclass(frozen=True)
class StepInput:
    """A step of N sequences and T token rows, the sequences in row order, those of the base model last.

    Attributes:
        token_ids: int64 `[T]`.
        q_lens: int64 `[N]`, new tokens of each sequence.
        kv_lens: int64 `[N]`, its tokens, the new ones included.
        block_tables: Its KV blocks; the sequence's own list, which is emptied when it gives them back.
        logit_rows: int64, ascending: the rows whose logits are asked for.
        slots: Of each sequence's adapter, None for the base model; empty where adapters are not served.
        slot_ranks: True rank of each slot's adapter, 0 for an empty slot.
    """

    token_ids: Ints
    q_lens: Ints
    kv_lens: Ints
    block_tables: Sequence[list[int]]
    logit_rows: Ints
    slots: Sequence[int | None] = ()
    slot_ranks: Sequence[int] = ()

    @property
    def row_offsets(self) -> list[int]:
        """First row of each sequence and, last, the number of rows."""
        return [0, *np.cumsum(self.q_lens).tolist()]


def make_step_input(
    rows: Sequence[ScheduledRow], slots: Sequence[int | None] = (), slot_ranks: Sequence[int] = ()
) -> StepInput:
    """A scheduled batch in numbers.

    Args:
        rows: At least one, sorted by slot.
        slots: Of each row's adapter; empty where adapters are not served.
        slot_ranks: True rank of each slot's adapter.
    """
    starts = [row.request.num_computed for row in rows]
    q_lens = np.array([row.num_tokens for row in rows])
    return StepInput(
        token_ids=_token_ids(rows, starts),
        q_lens=q_lens,
        kv_lens=q_lens + np.array(starts),
        block_tables=[row.request.block_table for row in rows],
        logit_rows=logit_rows(rows, np.cumsum(q_lens)),
        slots=slots,
        slot_ranks=slot_ranks,
    )


def _token_ids(rows: Sequence[ScheduledRow], starts: Sequence[int]) -> Ints:
    return np.fromiter(
        itertools.chain.from_iterable(
            row.request.token_ids[start : start + row.num_tokens] for row, start in zip(rows, starts, strict=True)
        ),
        dtype=np.int64,
    )
