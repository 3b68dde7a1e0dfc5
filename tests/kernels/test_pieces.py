"""How the CPU path joins and separates groups."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.pieces import Batch, Segment, cut

GROUPS = st.lists(st.tuples(st.integers(0, 15), st.integers(1, 40)), max_size=12)


def groups_of(slots_and_lengths: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    groups, row = [], 0
    for slot, length in slots_and_lengths:
        groups.append((slot, row, row + length))
        row += length
    return groups


def test_a_decode_step_of_neighbouring_slots_is_one_batch() -> None:
    (batch,) = cut(groups_of([(slot, 1) for slot in reversed(range(8))]), [8] * 8)
    assert isinstance(batch, Batch)
    assert (batch.low, batch.high, batch.depth) == (0, 8, 1)
    assert batch.rows(1).tolist() == batch.places.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


def test_short_groups_of_unequal_length_are_padded_into_one_batch() -> None:
    (batch,) = cut(groups_of([(5, 3), (4, 2)]), [8] * 8)
    assert isinstance(batch, Batch)
    assert batch.depth == 3
    assert batch.places.tolist() == [3, 4, 5, 0, 1]
    assert batch.rows(2).tolist() == [3, 4, 0, 3, 4, 0, 0, 1, 2, 0, 1, 2]


def test_one_absent_slot_is_bridged_and_more_are_not() -> None:
    pieces = cut(groups_of([(9, 1), (7, 1), (4, 1), (0, 1)]), [8] * 10)
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 2), (2, 3), (3, 4)]


def test_a_group_much_longer_than_its_neighbours_stands_alone() -> None:
    pieces = cut(groups_of([(3, 16), (2, 1), (1, 2), (0, 1)]), [8] * 4)
    assert [type(piece) for piece in pieces] == [Segment, Batch]


def test_a_batch_stays_small_enough_for_the_cache() -> None:
    pieces = cut(groups_of([(slot, 16) for slot in reversed(range(8))]), [8] * 8)
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 64), (64, 128)]


def test_a_prefill_among_decodes_stands_alone() -> None:
    pieces = cut(groups_of([(7, 1), (6, 1), (5, 120), (4, 1), (3, 1)]), [8] * 8)
    assert [type(piece) for piece in pieces] == [Batch, Segment, Batch]


def test_a_single_group_is_a_segment_of_its_true_rank() -> None:
    (piece,) = cut([(2, 0, 1)], [8, 8, 3])
    assert isinstance(piece, Segment)
    assert (piece.slot, piece.start, piece.stop, piece.rank) == (2, 0, 1, 3)


def test_groups_of_rank_zero_add_nothing() -> None:
    assert cut([(1, 0, 4)], [8, 0]) == ()


@given(slots_and_lengths=GROUPS)
def test_pieces_hold_every_row_once_with_its_own_slot(slots_and_lengths: list[tuple[int, int]]) -> None:
    slot_ranks = [slot % 5 for slot in range(16)]
    groups = groups_of(slots_and_lengths)
    found: dict[int, int] = {}
    for piece in cut(groups, slot_ranks):
        rows = range(piece.start, piece.stop)
        if isinstance(piece, Segment):
            slots = [piece.slot] * len(rows)
        else:
            assert (piece.high - piece.low) * piece.depth <= 64
            assert torch.equal(piece.rows(1)[piece.places], torch.arange(len(rows)))
            slots = [piece.low + place // piece.depth for place in piece.places.tolist()]
        assert not found.keys() & set(rows)
        assert piece.rank == max(slot_ranks[slot] for slot in slots)
        found.update(zip(rows, slots, strict=True))
    assert found == {row: slot for slot, start, stop in groups if slot_ranks[slot] for row in range(start, stop)}
