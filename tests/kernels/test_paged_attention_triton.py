"""Paged attention in Triton against the fp32 reference: on a GPU, or under the interpreter where there is none.

Scratch memory comes filled with NaN, and so does all of the cache that no sequence has (see `make_paged_case`).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.launch import Launch
from tests.kernels import interpreter
from tests.kernels.paged_cases import PagedCase, make_paged_case
from tests.kernels.scratch import poisoned_empty

interpreter.install()

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DECODES = [(0, 1), (14, 1), (15, 1), (16, 1), (170, 1), (300, 1)]
CHUNKS = [(0, 2), (0, 37), (15, 17), (16, 16), (150, 40)]
MIXED = [(200, 1), (33, 21), (0, 1), (0, 18)]


@pytest.fixture(autouse=True)
def _scratch(poisoned_scratch: None) -> None:
    """Memory from torch.empty holds NaN."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sequences", [DECODES, CHUNKS, MIXED], ids=["decodes", "chunks", "mixed"])
def test_ragged_lengths_equal_the_reference(sequences: list[tuple[int, int]], dtype: torch.dtype) -> None:
    make_paged_case(sequences, dtype=dtype).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(2, 1), (3, 3), (1, 4), (1, 8), (1, 71)])
def test_query_heads_of_one_kv_head_share_its_pages(num_kv_heads: int, group: int, dtype: torch.dtype) -> None:
    """Groups that are no power of two, and one that is larger than a tile would otherwise be."""
    make_paged_case(MIXED[:2], num_kv_heads=num_kv_heads, group=group, dtype=dtype).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 112, 128, 256])
def test_head_sizes_equal_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    make_paged_case([(40, 1), (130, 1), (21, 9)], num_kv_heads=1, head_dim=head_dim, dtype=dtype).check()


@pytest.mark.parametrize("block_size", [1, 5, 32, 48, 256])
def test_block_sizes_need_not_be_powers_of_two(block_size: int) -> None:
    make_paged_case(MIXED, block_size=block_size).check()


@pytest.mark.parametrize("window", [1, 7, 16, 100, 1000])
@pytest.mark.parametrize("sequences", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_windows_equal_the_reference(sequences: list[tuple[int, int]], window: int) -> None:
    make_paged_case(sequences, window=window).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_soft_caps_equal_the_reference(window: int | None, dtype: torch.dtype) -> None:
    case = make_paged_case(MIXED, window=window, softcap=0.5, dtype=dtype)
    case.check()
    uncapped = replace(case, features={**case.features, "softcap": None})
    assert (uncapped.result() - case.result()).abs().max() > 1e-2


def test_tokens_outside_the_window_may_hold_anything() -> None:
    """Blocks that a window has left behind may be another sequence's by now."""
    case = make_paged_case([(200, 1), (120, 9)], window=30)
    expected = case.result()
    for table, first in zip(case.block_tables, (171, 91), strict=True):
        case.cache[:, table[: first // 16]] = float("nan")
        case.cache[:, table[first // 16], :, : first % 16] = float("nan")
    assert torch.equal(case.result(), expected)


@pytest.mark.parametrize("lengths", [[(700, 1), (3, 1)], [(1, 1), (130, 1)]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_splits_of_the_past_are_combined(lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Room for far more tokens than there are: most splits have none, and are not read."""
    case = make_paged_case(lengths, dtype=dtype, max_blocks=600, max_chunks=0)
    assert case.num_splits() > 8
    case.check()
    whole = make_paged_case(lengths, dtype=dtype, max_blocks=45, num_kv_heads=2, max_chunks=0)
    assert case.num_splits() != whole.num_splits()


def test_one_split_needs_no_combination() -> None:
    case = make_paged_case([(40, 1), (70, 1)], max_blocks=8, max_chunks=0)
    assert case.num_splits() == 1
    case.check()


@pytest.mark.parametrize("max_chunks", [0, 3])
def test_rows_of_no_sequence_get_zeros(max_chunks: int) -> None:
    """The rest of a bucket that a graph was captured for."""
    case = make_paged_case([(40, 1), (300, 1)], unowned_rows=5, max_sequences=7, max_blocks=40, max_chunks=max_chunks)
    case.check()
    make_paged_case([(40, 1)], unowned_rows=70, max_sequences=7, max_blocks=8, max_chunks=3).check()


def test_no_sequence_at_all_gives_zeros() -> None:
    make_paged_case([], unowned_rows=3, max_sequences=4, max_blocks=8, max_chunks=0).check()
    make_paged_case([], unowned_rows=3, max_sequences=4, max_blocks=64).check()


def test_two_runs_give_the_same_bits() -> None:
    case = make_paged_case(MIXED, dtype=torch.bfloat16, max_blocks=100)
    assert torch.equal(case.result(), case.result())


def test_launches_depend_on_shapes_only_and_serve_every_schedule_in_the_same_buffer() -> None:
    """What a captured graph does: the launches of one step, run again after its buffer was rewritten for another."""
    bounds: dict[str, Any] = {"max_sequences": 4, "max_blocks": 40, "max_decodes": 3, "max_chunks": 2}
    steps = [
        make_paged_case([(300, 1), (33, 21)], num_blocks=60, unowned_rows=8, **bounds),
        make_paged_case([(0, 10), (5, 17), (0, 1)], num_blocks=60, unowned_rows=2, seed=1, **bounds),
        make_paged_case([(0, 1), (600, 1), (3, 1)], num_blocks=60, unowned_rows=27, seed=2, **bounds),
        make_paged_case([], num_blocks=60, unowned_rows=30, seed=3, **bounds),
    ]
    captured = steps[0]
    out = torch.full(captured.queries.shape, float("nan")).to(captured.queries)
    launches = captured.launches(out)
    assert [launch.kernel.fn.__name__ for launch in launches] == ["prefill_kernel", "decode_kernel", "combine_kernel"]
    for step in steps:
        captured.cache.copy_(step.cache)
        captured.queries.copy_(step.queries)
        again = captured.rescheduled(step)
        assert again.schedule.buffer.data_ptr() == captured.schedule.buffer.data_ptr()
        for first, second in zip(launches, again.launches(out), strict=True):
            assert (first.programs, first.constants) == (second.programs, second.constants)
            assert addresses(first, captured, out) == addresses(second, again, out)
        out.fill_(float("nan"))
        for launch in launches:
            launch.run()
        torch.testing.assert_close(out, step.expected(), rtol=4e-6, atol=4e-6)


def addresses(launch: Launch, case: PagedCase, out: Tensor) -> list[int | None]:
    """Of the tensors a launch was given; None for what splits give, which is a graph's own memory."""
    schedule = case.schedule
    tensors = (case.queries, *case.cache, out, schedule.decodes, schedule.tiles, schedule.block_tables)
    given = {tensor.data_ptr() for tensor in tensors}
    found = [value.data_ptr() for value in launch.arguments if isinstance(value, Tensor)]
    return [address if address in given else None for address in found]


@settings(max_examples=25, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 12))), max_size=4),
    num_kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([16, 20, 64]),
    block_size=st.sampled_from([1, 3, 8, 16]),
    dtype=st.sampled_from(DTYPES),
    window=st.one_of(st.none(), st.integers(1, 100)),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    unowned_rows=st.integers(1, 3),
    max_blocks=st.sampled_from([110, 400]),
    seed=st.integers(0, 1000),
)
def test_any_step_equals_the_reference(sequences: list[tuple[int, int]], **options: Any) -> None:
    with poisoned_empty():
        make_paged_case(sequences, max_sequences=5, **options).check()
