"""Steps as other ranks hear of them: the same numbers, and lists that live as long as their sequences."""

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_core.engine.step_input import StepInput
from lora_core.parallel.rank_messages import RankMessage, RunStep
from lora_core.parallel.step_wire import StepListener, StepTeller


class Wire:
    """A teller and a listener, with the bytes between them."""

    def __init__(self) -> None:
        self._teller, self._listener = StepTeller(), StepListener()
        self.last = RunStep([], [], [], [], [], [])

    def pass_on(self, step: StepInput) -> StepInput:
        encoded = msgspec.msgpack.encode(self._teller.tell(step))
        message = msgspec.msgpack.decode(encoded, type=RankMessage)
        assert isinstance(message, RunStep)
        self.last = message
        return self._listener.step(message)


def step_of(tables: list[list[int]]) -> StepInput:
    count = len(tables)
    return StepInput(
        token_ids=np.arange(count, dtype=np.int64),
        q_lens=np.ones(count, dtype=np.int64),
        kv_lens=np.array([len(table) for table in tables], dtype=np.int64),
        block_tables=tables,
        logit_rows=np.arange(count, dtype=np.int64),
        slots=[None] * count,
        slot_ranks=[],
    )


def test_all_numbers_arrive() -> None:
    step = StepInput(
        token_ids=np.array([5, 6, 70_000]),
        q_lens=np.array([2, 1]),
        kv_lens=np.array([2, 9]),
        block_tables=[[4], [9, 2, 1]],
        logit_rows=np.array([2]),
        slots=[3, None],
        slot_ranks=[0, 0, 0, 16],
    )
    heard = Wire().pass_on(step)
    for name in ("token_ids", "q_lens", "kv_lens", "logit_rows"):
        told, found = getattr(step, name), getattr(heard, name)
        assert (found.dtype, found.tolist()) == (told.dtype, told.tolist()), name
    assert heard.block_tables == step.block_tables
    assert (list(heard.slots), list(heard.slot_ranks)) == (step.slots, step.slot_ranks)
    assert heard.row_offsets == [0, 2, 3]


def test_a_table_that_grows_is_told_by_its_end() -> None:
    wire, table = Wire(), [1, 2, 3]
    first = wire.pass_on(step_of([table])).block_tables[0]
    wire.pass_on(step_of([table]))
    assert wire.last.sequences[0].blocks == []
    table.append(8)
    assert wire.pass_on(step_of([table])).block_tables[0] is first
    assert (wire.last.sequences[0].num_kept, wire.last.sequences[0].blocks) == (3, [8])
    assert first == [1, 2, 3, 8]


def test_the_list_of_an_ended_sequence_is_emptied() -> None:
    wire, table = Wire(), [1, 2]
    heard = wire.pass_on(step_of([table])).block_tables[0]
    table.clear()
    wire.pass_on(step_of([[7]]))
    assert heard == []
    table += [5]
    assert wire.pass_on(step_of([table])).block_tables[0] is not heard


@settings(deadline=None)
@given(st.data())
def test_tables_are_heard_as_they_are(data: st.DataObject) -> None:
    """Sequences come, grow, begin anew, pause and end."""
    wire = Wire()
    tables: list[list[int]] = [[] for _ in range(4)]
    blocks = st.lists(st.integers(0, 99), min_size=1, max_size=4)
    heard_before: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        for index, table in enumerate(tables):
            change = data.draw(st.sampled_from(["keep", "grow", "anew", "end"]))
            if change in ("anew", "end"):
                table.clear()
            if change in ("grow", "anew"):
                table += data.draw(blocks)
            if change == "end":
                heard_before.pop(index, None)
        members = [index for index, table in enumerate(tables) if data.draw(st.booleans()) and table]
        heard = wire.pass_on(step_of([tables[index] for index in members]))
        assert list(heard.block_tables) == [tables[index] for index in members]
        for index, table in zip(members, heard.block_tables, strict=True):
            assert heard_before.setdefault(index, table) is table
