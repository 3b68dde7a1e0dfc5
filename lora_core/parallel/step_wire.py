"""A step as it is told to other ranks: block tables that have grown are not told anew."""

from collections.abc import Sequence

import numpy as np

from lora_core.engine.step_input import StepInput
from lora_core.parallel.rank_messages import RunStep, SequenceStep


class StepTeller:
    """Turns steps into messages, and remembers what has been told; for one thread.

    A sequence is told by its block table: the very list, which is emptied, not dropped, when its blocks are given back.
    """

    def __init__(self) -> None:
        # By the list's identity, which is kept alive here: its number, the list, and what was last told of it.
        self._told: dict[int, tuple[int, list[int], list[int]]] = {}
        self._last_number = 0

    def tell(self, step: StepInput) -> RunStep:
        """The message; all ranks must get it."""
        ended = [key for key, (_, table, _) in self._told.items() if not table]
        numbers = [self._told.pop(key)[0] for key in ended]
        return RunStep(
            sequences=[
                self._sequence(table, q_len, kv_len)
                for table, q_len, kv_len in zip(
                    step.block_tables, step.q_lens.tolist(), step.kv_lens.tolist(), strict=True
                )
            ],
            token_ids=step.token_ids.tolist(),
            logit_rows=step.logit_rows.tolist(),
            slots=list(step.slots),
            slot_ranks=list(step.slot_ranks),
            ended=numbers,
        )

    def _sequence(self, table: list[int], q_len: int, kv_len: int) -> SequenceStep:
        found = self._told.get(id(table))
        if found is None:
            self._last_number += 1
            found = self._told[id(table)] = (self._last_number, table, [])
        number, _, known = found
        # A table grows, or begins anew.
        if known != table[: len(known)]:
            known.clear()
        num_kept = len(known)
        known += table[num_kept:]
        return SequenceStep(number, q_len, kv_len, num_kept, table[num_kept:])


class StepListener:
    """Turns messages back into steps, with a list for each sequence that stays the same as long as it does."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def step(self, message: RunStep) -> StepInput:
        """The step that was told."""
        for number in message.ended:
            # Whoever goes by the list sees that its sequence is gone.
            self._tables.pop(number).clear()
        return StepInput(
            token_ids=np.array(message.token_ids, dtype=np.int64),
            q_lens=np.array([sequence.q_len for sequence in message.sequences], dtype=np.int64),
            kv_lens=np.array([sequence.kv_len for sequence in message.sequences], dtype=np.int64),
            block_tables=self._block_tables(message.sequences),
            logit_rows=np.array(message.logit_rows, dtype=np.int64),
            slots=message.slots,
            slot_ranks=message.slot_ranks,
        )

    def _block_tables(self, sequences: Sequence[SequenceStep]) -> list[list[int]]:
        tables = []
        for sequence in sequences:
            table = self._tables.setdefault(sequence.number, [])
            table[sequence.num_kept :] = sequence.blocks
            tables.append(table)
        return tables
