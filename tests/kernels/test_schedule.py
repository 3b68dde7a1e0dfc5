"""The routing triple on host and device, and the tile table."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels import Group, Routing, build_routing
from kernels.loops import Cut
from kernels.schedule import tile_table
from kernels.tuning import num_tiles

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(0, 40), max_size=9)


def route(
    lora_ids: Sequence[int], offsets: Sequence[int], *, num_rows: int = 20, block_m: int | None = None
) -> Routing:
    return build_routing(lora_ids, offsets, [4, 8, 2], num_rows=num_rows, max_groups=5, device=CPU, block_m=block_m)


@pytest.mark.parametrize(
    ("lora_ids", "offsets", "groups"),
    [
        ([0], [0, 10], [(0, 0, 10)]),
        ([0, 1], [0, 10, 20], [(0, 0, 10), (1, 10, 20)]),
        ([2, 1, 0], [0, 3, 7, 14], [(2, 0, 3), (1, 3, 7), (0, 7, 14)]),
        ([2, 1, 0], [0, 3, 3, 5], [(2, 0, 3), (0, 3, 5)]),
        ([], [0], []),
    ],
)
def test_routing_holds_the_triple_on_host_and_device(
    lora_ids: list[int], offsets: list[int], groups: list[tuple[int, int, int]]
) -> None:
    routing = route(lora_ids, offsets)
    assert routing.groups == tuple(Group(*group) for group in groups)
    assert routing.end == offsets[-1]
    assert routing.lora_ids.tolist() == lora_ids + [-1] * (5 - len(lora_ids))
    assert routing.grouped_offsets.tolist() == offsets + [offsets[-1]] * (6 - len(offsets))
    assert routing.ranks.tolist() == list(routing.slot_ranks) == [4, 8, 2]
    assert routing.tiles is None
    assert routing.block_m == 0


def test_device_tensors_share_one_buffer_and_start_at_16_bytes() -> None:
    routing = route([2, 1], [0, 3, 7], block_m=4)
    assert routing.tiles is not None
    for tensor in (routing.tiles, routing.lora_ids, routing.grouped_offsets, routing.ranks):
        assert tensor.dtype == torch.int32
        assert tensor.untyped_storage().data_ptr() == routing.buffer.untyped_storage().data_ptr()
        assert tensor.data_ptr() % 16 == 0


def test_a_buffer_is_refilled_in_place() -> None:
    first = route([2, 1], [0, 3, 7], block_m=4)
    second = build_routing([0], [0, 20], [4, 8, 2], num_rows=20, max_groups=5, device=CPU, block_m=4, into=first.buffer)
    assert second.buffer.data_ptr() == first.buffer.data_ptr()
    assert first.lora_ids.tolist() == second.lora_ids.tolist() == [0, -1, -1, -1, -1]
    assert first.tiles is not None
    assert first.tiles[0].tolist() == [0, 0, 4, 4]


def test_a_buffer_of_other_shapes_is_refused() -> None:
    buffer = route([2, 1], [0, 3, 7], block_m=4).buffer
    with pytest.raises(ValueError, match=r"into holds \d+ numbers .* needs \d+"):
        build_routing([0], [0, 20], [4, 8, 2], num_rows=20, max_groups=5, device=CPU, block_m=8, into=buffer)


@pytest.mark.parametrize(
    "change", [Tensor.float, lambda b: b.repeat_interleave(2)[::2], lambda b: torch.cat((b, b))[2:]]
)
def test_what_is_no_such_buffer_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    """A kernel would read its bits as something else, or be compiled anew for an address it was not captured for."""
    buffer = change(route([2, 1], [0, 3, 7], block_m=4).buffer)[: len(route([], [0], block_m=4).buffer)]
    with pytest.raises(ValueError, match=r"into is torch\..* expected contiguous torch.int32 at a multiple of 16"):
        build_routing([0], [0, 20], [4, 8, 2], num_rows=20, max_groups=5, device=CPU, block_m=4, into=buffer)


@pytest.mark.parametrize("made_in_inference_mode", [True, False])
def test_a_buffer_serves_in_inference_mode_and_out_of_it(made_in_inference_mode: bool) -> None:
    with torch.inference_mode(made_in_inference_mode):
        first = route([2, 1], [0, 3, 7], block_m=4)
    with torch.inference_mode(not made_in_inference_mode):
        build_routing([0], [0, 20], [4, 8, 2], num_rows=20, max_groups=5, device=CPU, block_m=4, into=first.buffer)
    assert first.lora_ids.tolist() == [0, -1, -1, -1, -1]


def test_counters_that_a_broken_step_left_are_zero_in_the_next() -> None:
    options: dict[str, Any] = {"num_rows": 20, "max_groups": 5, "device": CPU, "block_m": 4, "one_launch": True}
    first = build_routing([2, 1], [0, 3, 7], [4, 8, 2], **options)
    assert first.counters is not None
    first.counters.fill_(3)
    build_routing([0], [0, 20], [4, 8, 2], **options, into=first.buffer)
    assert not first.counters.any()


@pytest.mark.parametrize("block_m", [-8, 3, 12])
def test_tiles_that_no_kernel_has_are_refused(block_m: int) -> None:
    with pytest.raises(ValueError, match=f"block_m is {block_m} rows of a tile, expected a power of two, or 0"):
        route([0], [0, 4], block_m=block_m)


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="slot_ranks has a rank of 1099511627776, expected 0 for an empty slot"):
        build_routing([0], [0, 1], [2**40], num_rows=1, max_groups=1, device=CPU)
    with pytest.raises(ValueError, match="slot_ranks has a rank of -1, expected 0 for an empty slot"):
        build_routing([0], [0, 4], [4, -1], num_rows=4, max_groups=1, device=CPU)


@pytest.mark.parametrize(
    ("lora_ids", "offsets", "message"),
    [
        ([0], [0], "1 entries for 1 lora_ids"),
        ([0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6], "6 groups, more than max_groups=5"),
        ([0], [1, 2], "starts at row 1, expected row 0"),
        ([0], [0, 21], "ends at row 21, past num_rows=20"),
        ([1, 0], [0, 5, 4], "falls from row 5 to row 4"),
        ([3], [0, 4], "names slot 3, outside the 3 slots"),
        ([-1], [0, 4], "names slot -1, outside the 3 slots"),
    ],
)
def test_disagreeing_arguments_are_refused(lora_ids: list[int], offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(lora_ids, offsets)


def test_tiles_cut_groups_and_carry_ranks_then_cut_the_base_rows() -> None:
    routing = route([2, 0], [0, 3, 12], block_m=4)
    assert routing.tiles is not None
    assert routing.tiles.shape == (num_tiles(20, 5, 4), 4)
    assert routing.tiles[:4].tolist() == [[2, 0, 3, 2], [0, 3, 7, 4], [0, 7, 11, 4], [0, 11, 12, 4]]
    assert routing.tiles[4:6].tolist() == [[-1, 12, 16, 0], [-1, 16, 20, 0]]
    assert routing.tiles[6:].tolist() == [[-1, 0, 0, 0]] * (len(routing.tiles) - 6)


@given(lengths=LENGTHS, base_rows=st.integers(0, 9), block_m=st.sampled_from([4, 8, 16, 64]))
def test_every_row_is_in_one_tile_and_the_table_is_long_enough(
    lengths: list[int], base_rows: int, block_m: int
) -> None:
    groups, row = [], 0
    for slot, length in enumerate(lengths):
        if length:
            groups.append(Group(slot, row, row + length))
            row += length
    groups.append(Group(-1, row, row + base_rows))
    length = num_tiles(row + base_rows, len(lengths), block_m)
    table = torch.tensor(tile_table(groups, [*[3] * len(lengths), 0], block_m, length)).view(-1, 4)
    assert len(table) == length
    covered = [(slot, row) for slot, row0, row_end, _ in table.tolist() for row in range(row0, row_end)]
    assert covered == [(slot, row) for slot, start, stop in groups for row in range(start, stop)]
    assert all(row_end - row0 <= block_m for _, row0, row_end, _ in table.tolist())


def test_no_shorter_table_would_do() -> None:
    groups = [Group(slot, slot, slot + 1) for slot in range(7)] + [Group(7, 7, 7 + 1 + 3 * 16)]
    groups.append(Group(-1, groups[-1].stop, groups[-1].stop + 1))
    used = len(tile_table(groups, [*[1] * 8, 0], 16, 0)) // 4
    assert used == num_tiles(groups[-1].stop, 8, 16)


def test_a_part_of_the_step_has_the_groups_of_the_slots_asked_for() -> None:
    routing = build_routing([4, 3, 2, 0], [0, 2, 5, 6, 9], [8, 8, 8, 0, 8], num_rows=10, max_groups=5, device=CPU)
    # Slot 3 has no rank: its rows are those of no adapter.
    assert routing.slots == {0, 2, 4}
    assert [tensor.tolist() for tensor in routing.row_slots] == [[0, 1, 5, 6, 7, 8], [4, 4, 2, 0, 0, 0]]
    assert routing.among(frozenset({0, 2, 4, 1})) is routing
    part = routing.among(frozenset({2, 0, 1}))
    assert part is not None
    assert part.groups == (Group(2, 5, 6), Group(0, 6, 9))
    assert part.slots == {0, 2}
    assert [(loop.start, loop.stop) for loop in part.loops(Cut(is_bf16=False))] == [(5, 9)]
    # Equal parts are cut once a step.
    assert routing.among(frozenset({0, 2})) is part
    assert routing.among(frozenset({1, 3})) is None
    assert routing.among(frozenset()) is None
    nothing = build_routing([], [0], [8], num_rows=3, max_groups=1, device=CPU)
    assert nothing.among(frozenset({0})) is None


def test_rows_are_selected_of_a_whole_step_only() -> None:
    """What a part leaves out would get the adapter of the group after it."""
    part = build_routing([1, 0], [0, 2, 5], [8, 8], num_rows=6, max_groups=2, device=CPU).among(frozenset({0}))
    assert part is not None
    with pytest.raises(ValueError, match=r"groups \[\(0, 2, 5\)\] leave rows out"):
        part.select([1, 3])


def test_with_a_tile_table_a_part_is_the_whole_step() -> None:
    routing = build_routing([1, 0], [0, 2, 5], [8, 8], num_rows=6, max_groups=2, device=CPU, block_m=8)
    assert routing.among(frozenset({1})) is routing
    assert routing.among(frozenset({2})) is None


@pytest.mark.parametrize("block_m", [None, 8])
@pytest.mark.parametrize(
    ("rows", "offsets"),
    [
        ([1, 4, 7, 8, 9], [0, 1, 2, 3]),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 2, 5, 8]),
        ([3, 9], [0, 0, 1, 1]),
        ([8, 9], [0, 0, 0, 0]),
        ([], [0, 0, 0, 0]),
    ],
    ids=str,
)
def test_some_rows_are_routed_as_they_were(rows: list[int], offsets: list[int], block_m: int | None) -> None:
    routing = build_routing([2, 1, 0], [0, 2, 5, 8], [4, 8, 2], num_rows=10, max_groups=4, device=CPU, block_m=block_m)
    selected = routing.select(rows)
    slot_of = {row: group.slot for group in routing.groups for row in range(group.start, group.stop)}
    found = {row: group.slot for group in selected.groups for row in range(group.start, group.stop)}
    assert found == {place: slot_of[row] for place, row in enumerate(rows) if row in slot_of}
    assert selected.grouped_offsets.tolist() == [*offsets, offsets[-1]]
    assert (selected.num_rows, selected.slot_ranks) == (len(rows), routing.slot_ranks)
    assert (selected.tiles is None) == (routing.tiles is None)
