"""How the CPU path joins and separates groups."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.pieces import LONG_ROWS, Batch, Loop, cut

GROUPS = st.lists(st.tuples(st.integers(0, 15), st.integers(1, 80)), max_size=12)


def groups_of(slots_and_lengths: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    groups, row = [], 0
    for slot, length in slots_and_lengths:
        groups.append((slot, row, row + length))
        row += length
    return groups


def test_a_decode_step_of_neighbouring_slots_is_one_batch() -> None:
    (batch,) = cut(groups_of([(slot, 1) for slot in reversed(range(8))]), [8] * 8)
    assert isinstance(batch, Batch)
    assert (batch.low, batch.step, batch.count, batch.depth, batch.num_places) == (0, 1, 8, 1, 8)
    assert batch.rows.tolist() == batch.places.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


def test_slots_at_equal_distances_are_one_batch() -> None:
    (batch,) = cut(groups_of([(slot, 1) for slot in (10, 7, 4, 1)]), [8] * 12)
    assert isinstance(batch, Batch)
    assert (batch.low, batch.step, batch.count) == (1, 3, 4)


def test_short_groups_of_unequal_length_are_padded_into_one_batch() -> None:
    (batch,) = cut(groups_of([(6, 3), (5, 3), (4, 2), (3, 3)]), [8] * 8)
    assert isinstance(batch, Batch)
    assert batch.depth == 3
    assert batch.rows.tolist() == [8, 9, 10, 6, 7, 0, 3, 4, 5, 0, 1, 2]
    assert batch.places.tolist() == [9, 10, 11, 6, 7, 8, 3, 4, 0, 1, 2]


def test_slots_at_unequal_distances_are_a_loop() -> None:
    (loop,) = cut(groups_of([(9, 1), (7, 2), (4, 1), (0, 1)]), [8] * 10)
    assert isinstance(loop, Loop)
    assert (loop.start, loop.stop, loop.lengths) == (0, 5, (1, 2, 1, 1))
    assert [segment.slot for segment in loop.segments] == [9, 7, 4, 0]


def test_a_rank_much_larger_than_its_neighbours_stands_alone() -> None:
    pieces = cut(groups_of([(slot, 1) for slot in reversed(range(9))]), [8] * 4 + [256] + [8] * 4)
    assert [type(piece) for piece in pieces] == [Batch, Loop, Batch]
    assert [piece.rank for piece in pieces if isinstance(piece, Batch)] == [8, 8]


def test_a_group_much_longer_than_its_neighbours_stands_alone() -> None:
    pieces = cut(groups_of([(4, 30), (3, 1), (2, 1), (1, 2), (0, 1)]), [8] * 5)
    assert [type(piece) for piece in pieces] == [Loop, Batch]


def test_a_batch_stays_small_enough_for_the_cache() -> None:
    pieces = cut(groups_of([(slot, 1) for slot in reversed(range(256))]), [8] * 256)
    assert [piece.stop - piece.start for piece in pieces] == [64] * 4
    assert all(isinstance(piece, Batch) for piece in pieces)


def test_efficient_products_are_not_batched() -> None:
    pieces = cut(groups_of([(slot, 8) for slot in reversed(range(8))]), [64] * 8)
    assert [type(piece) for piece in pieces] == [Loop]


def test_a_prefill_among_decodes_stands_alone() -> None:
    pieces = cut(groups_of([(7, 1), (6, 1), (5, 1), (4, 120), (3, 1), (2, 1), (1, 1)]), [8] * 8)
    assert [type(piece) for piece in pieces] == [Batch, Loop, Batch]
    assert [piece.is_short for piece in pieces if isinstance(piece, Loop)] == [False]


def test_neighbouring_prefills_share_a_loop_of_any_length() -> None:
    pieces = cut(groups_of([(4, 64), (3, 900), (2, 70), (1, 63), (0, 2)]), [8] * 5)
    assert [(piece.lengths, piece.is_short) for piece in pieces if isinstance(piece, Loop)] == [
        ((64, 900, 70), False),
        ((63, 2), True),
    ]


def test_a_single_group_is_a_loop_of_its_true_rank() -> None:
    (piece,) = cut([(2, 0, 1)], [8, 8, 3])
    assert isinstance(piece, Loop)
    (segment,) = piece.segments
    assert (segment.slot, segment.start, segment.stop, segment.rank) == (2, 0, 1, 3)


def test_groups_of_rank_zero_add_nothing() -> None:
    assert cut([(1, 0, 4)], [8, 0]) == ()


@given(slots_and_lengths=GROUPS)
def test_pieces_hold_every_row_once_with_its_own_slot(slots_and_lengths: list[tuple[int, int]]) -> None:
    slot_ranks = [slot % 5 for slot in range(16)]
    groups = groups_of(slots_and_lengths)
    found: dict[int, int] = {}
    for piece in cut(groups, slot_ranks):
        rows = range(piece.start, piece.stop)
        loop = piece if isinstance(piece, Loop) else piece.loop
        assert (loop.start, loop.stop) == (piece.start, piece.stop)
        slots = [segment.slot for segment in loop.segments for _ in range(segment.start, segment.stop)]
        assert loop.lengths == tuple(segment.stop - segment.start for segment in loop.segments)
        assert all(segment.rank == slot_ranks[segment.slot] for segment in loop.segments)
        assert all((length < LONG_ROWS) == loop.is_short for length in loop.lengths)
        if isinstance(piece, Batch):
            assert piece.num_places == len(piece.rows) <= 64
            assert torch.equal(piece.rows[piece.places], torch.arange(piece.start, piece.stop))
            assert slots == [piece.low + place // piece.depth * piece.step for place in piece.places.tolist()]
            assert piece.rank == max(segment.rank for segment in loop.segments)
            assert piece.rows.min() >= piece.start
            assert piece.rows.max() < piece.stop
        assert not found.keys() & set(rows)
        found.update(zip(rows, slots, strict=True))
    assert found == {row: slot for slot, start, stop in groups if slot_ranks[slot] for row in range(start, stop)}
