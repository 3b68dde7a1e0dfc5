"""How the CPU path joins and separates groups."""

from hypothesis import given
from hypothesis import strategies as st

from kernels.loops import MAX_SHORT_ROWS, Segment, cut

GROUPS = st.lists(st.tuples(st.integers(0, 15), st.integers(1, 300)), max_size=12)


def groups_of(slots_and_lengths: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Groups one after the other."""
    groups, row = [], 0
    for slot, length in slots_and_lengths:
        groups.append((slot, row, row + length))
        row += length
    return groups


def test_a_decode_step_is_one_loop() -> None:
    (loop,) = cut(groups_of([(slot, 1) for slot in (7, 3, 12, 0)]), [8] * 16)
    assert (loop.start, loop.stop, loop.lengths, loop.is_short) == (0, 4, (1, 1, 1, 1), True)
    assert list(loop.array[1]) == [7, 0, 1, 8, 3, 1, 2, 8, 12, 2, 3, 8, 0, 3, 4, 8]


def test_rows_of_a_loop_count_from_its_first_one() -> None:
    _, loop = cut([(1, 0, 4), (2, 4, 6), (3, 7, 9), (0, 9, 12)], [5, 8, 0, 8])
    assert (loop.start, loop.stop, loop.num_rank_rows) == (7, 12, 2 * 8 + 3 * 5)
    assert list(loop.array[1]) == [3, 0, 2, 8, 0, 2, 5, 5]


def test_long_groups_are_kept_apart_from_short_ones() -> None:
    loops = cut(groups_of([(4, 72), (3, 900), (2, 71), (1, 2)]), [16] * 5)
    assert [(loop.lengths, loop.is_short) for loop in loops] == [((72, 900), False), ((71, 2), True)]


def test_a_group_is_long_by_its_rows_and_its_rank() -> None:
    def longest_short(rank: int) -> int:
        return max(rows for rows in range(1, 1000) if Segment(0, 0, rows, rank).is_short)

    assert [longest_short(rank) for rank in (1, 2, 4, 8, 16, 32, 256)] == [224, 183, 119, 87, 71, 63, 56]


def test_groups_of_rank_zero_add_nothing() -> None:
    assert cut([(1, 0, 4)], [8, 0]) == ()


@given(slots_and_lengths=GROUPS)
def test_loops_hold_every_row_once_with_its_own_slot(slots_and_lengths: list[tuple[int, int]]) -> None:
    slot_ranks = [slot % 5 for slot in range(16)]
    groups = groups_of(slots_and_lengths)
    found: dict[int, int] = {}
    for loop in cut(groups, slot_ranks):
        rows = range(loop.start, loop.stop)
        slots = [segment.slot for segment in loop.segments for _ in range(segment.start, segment.stop)]
        assert loop.lengths == tuple(segment.stop - segment.start for segment in loop.segments)
        assert all(segment.rank == slot_ranks[segment.slot] for segment in loop.segments)
        assert all(segment.is_short == loop.is_short for segment in loop.segments)
        assert not loop.is_short or len(rows) <= MAX_SHORT_ROWS
        assert not found.keys() & set(rows)
        found.update(zip(rows, slots, strict=True))
    assert found == {row: slot for slot, start, stop in groups if slot_ranks[slot] for row in range(start, stop)}
