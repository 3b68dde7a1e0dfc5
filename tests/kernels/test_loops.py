"""How the CPU path joins and separates groups."""

from hypothesis import given
from hypothesis import strategies as st

from kernels.loops import MAX_SHORT_ROWS, MIN_LONG_ROWS, Cut, loops

FP32 = Cut(is_bf16=False)
WIDENED = Cut(is_bf16=False, is_widened=True)

GROUPS = st.lists(st.tuples(st.integers(0, 15), st.integers(1, 900)), max_size=12)
CUTS = st.one_of(st.sampled_from([FP32, WIDENED]), st.integers(0, 50_000).map(lambda width: Cut(True, width)))


def groups_of(slots_and_lengths: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Groups one after the other."""
    groups, row = [], 0
    for slot, length in slots_and_lengths:
        groups.append((slot, row, row + length))
        row += length
    return groups


def test_a_decode_step_is_one_loop() -> None:
    (loop,) = loops(groups_of([(slot, 1) for slot in (7, 3, 12, 0)]), [8] * 16, FP32)
    assert (loop.start, loop.stop, loop.lengths, loop.is_short) == (0, 4, (1, 1, 1, 1), True)
    assert list(loop.array[1]) == [7, 0, 1, 8, 3, 1, 2, 8, 12, 2, 3, 8, 0, 3, 4, 8]


def test_rows_of_a_loop_count_from_its_first_one() -> None:
    _, loop = loops([(1, 0, 4), (2, 4, 6), (3, 7, 9), (0, 9, 12)], [5, 8, 0, 8], FP32)
    assert (loop.start, loop.stop, loop.num_rank_rows) == (7, 12, 2 * 8 + 3 * 5)
    assert list(loop.array[1]) == [3, 0, 2, 8, 0, 2, 5, 5]


def test_long_groups_are_kept_apart_from_short_ones() -> None:
    found = loops(groups_of([(4, 64), (3, 900), (2, 63), (1, 2)]), [16] * 5, FP32)
    assert [(loop.lengths, loop.is_short) for loop in found] == [((64, 900), False), ((63, 2), True)]


def longest_short(cut: Cut) -> list[int]:
    """Rows of the longest short group, by rank."""
    return [max(rows for rows in range(1, 1000) if cut.is_short(rows, rank)) for rank in (1, 4, 8, 16, 64, 256)]


def test_a_group_is_long_by_its_rows_and_its_rank() -> None:
    assert longest_short(FP32) == [303, 111, 79, 63, 51, 48]


def test_a_bf16_group_is_long_by_its_layer_too() -> None:
    assert longest_short(Cut(is_bf16=True, width=2 * 576)) == [384, 384, 351, 255, 183, 46]
    assert longest_short(Cut(is_bf16=True, width=2 * 576 + 3072)) == [384, 384, 351, 255, 140, 35]
    assert longest_short(Cut(is_bf16=True, width=576 + 49152)) == [384, 384, 238, 119, 29, 7]


def test_a_group_that_torch_would_widen_is_short_up_to_a_rank_of_32() -> None:
    assert longest_short(WIDENED) == [999, 999, 999, 999, 64, 36]


def test_a_short_group_of_many_rows_is_in_several_loops() -> None:
    found = loops(groups_of([(1, 1), (2, 900), (3, 5)]), [8] * 4, WIDENED)
    assert [(loop.start, loop.stop, loop.lengths) for loop in found] == [
        (0, 1, (1,)),
        (1, 385, (384,)),
        (385, 769, (384,)),
        (769, 906, (132, 5)),
    ]
    assert all(loop.is_short for loop in found)


def test_groups_of_rank_zero_add_nothing() -> None:
    assert loops([(1, 0, 4)], [8, 0], FP32) == ()


@given(slots_and_lengths=GROUPS, cut=CUTS)
def test_loops_hold_every_row_once_with_its_own_slot(slots_and_lengths: list[tuple[int, int]], cut: Cut) -> None:
    slot_ranks = [slot % 5 for slot in range(16)]
    groups = groups_of(slots_and_lengths)
    found: dict[int, int] = {}
    for loop in loops(groups, slot_ranks, cut):
        rows = range(loop.start, loop.stop)
        slots = [segment.slot for segment in loop.segments for _ in range(segment.start, segment.stop)]
        assert loop.lengths == tuple(segment.stop - segment.start for segment in loop.segments)
        assert all(segment.rank == slot_ranks[segment.slot] for segment in loop.segments)
        assert all(
            cut.is_short(length, segment.rank) is loop.is_short
            for length, segment in zip(loop.lengths, loop.segments, strict=True)
        )
        assert not loop.is_short or len(rows) <= MAX_SHORT_ROWS
        assert loop.is_short or min(loop.lengths) >= MIN_LONG_ROWS
        assert not found.keys() & set(rows)
        found.update(zip(rows, slots, strict=True))
    assert found == {row: slot for slot, start, stop in groups if slot_ranks[slot] for row in range(start, stop)}
