"""The arguments of paged attention: the schedule's tables, what is refused, and the op that compilers see."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import PagedLayout, PagedSchedule, build_paged_schedule, paged_attention
from kernels.paged_attention import layout_fault
from kernels.paged_attention_tiles import decode_tile, tokens_per_tile
from kernels.paged_schedule import num_query_tiles
from tests.kernels.paged_cases import PagedCase, make_paged_case

CPU = torch.device("cpu")
# Sixteen tokens of four heads fill a tile of 64 rows.
LAYOUT = PagedLayout(32, 8, 128, 16, 50, torch.bfloat16)


def schedule_of(q_lens: list[int], kv_lens: list[int], tables: list[list[int]], **options: Any) -> PagedSchedule:
    bounds = {"layout": LAYOUT, "num_rows": sum(q_lens), "max_sequences": 4, "max_blocks": 5, "device": CPU, **options}
    return build_paged_schedule(q_lens, kv_lens, tables, **bounds)


def test_every_row_is_in_one_table() -> None:
    schedule = schedule_of([1, 18, 1, 3], [40, 18, 7, 70], [[3, 1, 4], [5, 9], [2], [6, 5, 3, 8, 7]], num_rows=25)
    assert tokens_per_tile(LAYOUT) == 16
    assert schedule.decodes.tolist() == [[0, 40, 0, 0], [19, 7, 2, 0], [-1, 0, 0, 0], [-1, 0, 0, 0]]
    # The longest past first; then the rows of no sequence; then nothing.
    assert schedule.tiles.tolist() == [
        [3, 20, 23, 67],
        [1, 17, 19, 16],
        [1, 1, 17, 0],
        [-1, 23, 25, 0],
        [-1, 0, 0, 0],
        [-1, 0, 0, 0],
    ]
    assert schedule.block_tables.tolist() == [[3, 1, 4, 0, 0], [5, 9, 0, 0, 0], [2, 0, 0, 0, 0], [6, 5, 3, 8, 7]]
    assert schedule.decodes.dtype == schedule.tiles.dtype == schedule.block_tables.dtype == torch.int32


def test_without_chunks_rows_of_no_sequence_decode_nothing() -> None:
    schedule = schedule_of([1, 1], [40, 7], [[3, 1, 4], [2]], num_rows=4, max_chunks=0)
    assert schedule.decodes.tolist() == [[0, 40, 0, 0], [1, 7, 1, 0], [2, 0, 0, 0], [3, 0, 0, 0]]
    assert schedule.tiles.shape == (0, 4)


def test_blocks_past_the_last_token_are_not_used() -> None:
    assert schedule_of([1], [16], [[3, 49, 1, 1, 1, 1, 1]]).block_tables[0].tolist() == [3, 0, 0, 0, 0]


def test_a_buffer_is_overwritten_in_place() -> None:
    first = schedule_of([1, 18], [40, 18], [[3, 1, 4], [5, 9]])
    second = schedule_of([18, 1], [30, 1], [[5, 9], [7]], into=first.buffer)
    assert second.buffer.data_ptr() == first.buffer.data_ptr()
    assert first.decodes.tolist() == second.decodes.tolist() != schedule_of([18, 1], [31, 1], [[5, 9], [7]]).decodes
    assert first.tiles.tolist() == schedule_of([18, 1], [30, 1], [[5, 9], [7]]).tiles.tolist()


@given(
    q_lens=st.lists(st.integers(1, 70), max_size=8),
    unowned=st.integers(0, 40),
    tile_tokens=st.sampled_from([1, 2, 16, 21]),
    spare=st.integers(0, 3),
)
def test_the_tile_table_is_long_enough_for_any_step(
    q_lens: list[int], unowned: int, tile_tokens: int, spare: int
) -> None:
    chunks = [q_len for q_len in q_lens if q_len > 1]
    needed = sum(-(-rows // tile_tokens) for rows in [*chunks, unowned])
    num_rows = sum(q_lens) + unowned
    assert num_query_tiles(num_rows, len(chunks) + spare, tile_tokens) >= needed


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1], [5, 6], [[1]]), {}, "q_lens has 1 entries, kv_lens 2 and block_tables 1"),
        (([1] * 5, [1] * 5, [[1]] * 5), {}, "q_lens has 5 sequences, more than max_sequences=4"),
        (([1, 0], [1, 1], [[1], [2]]), {"num_rows": 1}, "sequence 1 has q_len 0 and kv_len 1"),
        (([1, 3], [1, 2], [[1], [2]]), {}, "sequence 1 has q_len 3 and kv_len 2"),
        (([2, 3], [2, 3], [[1], [2]]), {"num_rows": 4}, "q_lens add up to 5 rows, more than num_rows=4"),
        (([1], [17], [[1]]), {}, "17 tokens, which fill 2 blocks of 16; its block table has 1 and max_blocks is 5"),
        (([1], [81], [[1] * 6]), {}, "81 tokens, which fill 6 blocks of 16; its block table has 6 and max_blocks is 5"),
        (([1, 1], [1, 20], [[1], [2, 50]]), {}, "block 50 for sequence 1, outside the cache's 50 blocks"),
        (([1], [1], [[2**40]]), {}, f"block {2**40} for sequence 0, outside the cache's 50 blocks"),
        (([1], [1], [[-1]]), {}, "block -1 for sequence 0, outside the cache's 50 blocks"),
        (([1, 2], [1, 2], [[1], [2]]), {"max_chunks": 0}, "1 sequences of one row, 1 of several .* max_chunks=0"),
        (([1, 1], [1, 1], [[1], [2]]), {"max_decodes": 1}, "2 sequences of one row, .* max_decodes=1"),
        (([1], [1], [[1]]), {"max_chunks": 0, "num_rows": 5}, "4 rows of none, more than max_decodes=4"),
        (([1], [1], [[1]]), {"into": torch.zeros(4, dtype=torch.int32)}, r"into holds 4 numbers on cpu, .* needs \d+"),
    ],
)
def test_schedules_that_contradict_themselves_are_refused(
    arguments: tuple[list[int], list[int], list[list[int]]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        schedule_of(*arguments, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: {"queries": case.queries[:3]}, r"queries has shape \[3, 4, 64\] .* for \[4, 4, 64\]"),
        (lambda case: {"queries": case.queries[:, :2]}, r"queries has shape \[4, 2, 64\]"),
        (lambda case: {"cache": case.cache[:, 1:]}, r"cache \[2, 7, 2, 16, 64\], the schedule is for .* \[2, 8, "),
        (lambda case: {"queries": case.queries.half()}, "queries is torch.float16 and cache torch.float32"),
        (lambda case: {"cache": case.cache.half()}, "cache torch.float16, the schedule is for torch.float32"),
        (lambda case: {"queries": case.queries.to("meta")}, "queries is on meta, cache on"),
        (lambda case: {"queries": case.queries.mT.contiguous().mT}, "queries has strides .* contiguous"),
        (lambda case: {"cache": case.cache.mT.contiguous().mT}, "and cache .* contiguous"),
    ],
)
def test_tensors_that_do_not_fit_the_schedule_are_refused(
    change: Callable[[PagedCase], dict[str, Any]], message: str
) -> None:
    case = make_paged_case([(20, 1), (40, 3)])
    with pytest.raises(ValueError, match=message):
        replace(case, **change(case)).result()


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"scale": -1.0}, "scale is -1.0, expected a positive number"),
        ({"scale": 1.0, "window": 0}, "window is 0 tokens, expected 1 or more"),
        ({"scale": float("inf")}, "scale is inf, expected a positive number"),
        ({"scale": 1.0, "softcap": 0.0}, "softcap is 0.0, expected a finite bound over 0"),
        ({"scale": 1.0, "softcap": float("inf")}, "softcap is inf, expected a finite bound over 0, or None"),
    ],
)
def test_features_without_a_meaning_are_refused(feature: dict[str, Any], message: str) -> None:
    case = make_paged_case([(20, 1)])
    with pytest.raises(ValueError, match=message):
        paged_attention(case.queries, case.cache, case.schedule, **feature)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"head_dim": 512}, "its heads are 512 long, more than 256"),
        ({"num_heads": LAYOUT.num_heads + 1}, "query heads are not a multiple of its"),
        ({"num_heads": 2048}, "256 query heads share a KV head, more than 128"),
        ({"dtype": torch.float64}, "its cache is torch.float64"),
    ],
)
def test_models_that_the_kernels_do_not_serve_have_a_reason(changes: dict[str, Any], fault: str | None) -> None:
    found = layout_fault(LAYOUT._replace(**changes))
    assert found is None if fault is None else found is not None and fault in found


def test_a_model_that_is_not_served_is_refused() -> None:
    case = make_paged_case([(3, 1)], head_dim=272)
    with pytest.raises(ValueError, match="do not serve this model: its heads are 272 long"):
        case.result()


def test_the_past_is_split_until_the_device_is_full_and_no_further_than_pays() -> None:
    def splits(rows: int, tokens: int, window: int | None = None) -> int:
        return decode_tile(LAYOUT, rows, tokens // LAYOUT.block_size, window).splits

    assert splits(1, 8192) == 33
    assert splits(8, 8192) == 5
    assert splits(64, 2048) == 1
    # The longest sequence would end last.
    assert splits(64, 32768) == 8
    # No more than one in 128 tokens, whether it is the length that bounds them or the window.
    assert splits(1, 512) == 4
    assert splits(1, 32768, window=448) == 4
    assert splits(1, 2**20) == 64


def test_compilers_see_one_opaque_op() -> None:
    case = make_paged_case([(20, 1), (40, 3)], max_blocks=40)
    schedule = case.schedule
    arguments = (case.queries, case.cache, schedule.decodes, schedule.tiles, schedule.block_tables, 0.125, 7, 3.0)
    torch.library.opcheck(
        torch.ops.lora_fleet.paged_attention, arguments, test_utils=("test_schema", "test_faketensor")
    )
