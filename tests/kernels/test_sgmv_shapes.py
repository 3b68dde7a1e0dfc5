"""Shapes that nobody thought of, drawn; and offsets that 32 bits do not hold."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import build_routing, sgmv
from kernels.tuning import StepShape, expand_tile, num_tiles, shrink_tile
from tests.kernels import interpreter
from tests.kernels.cases import DEVICE, Case, make_case
from tests.kernels.scratch import poisoned_empty

interpreter.install()

MAX_PROGRAMS = 150
"""Of a drawn case: each takes milliseconds under the interpreter."""


@st.composite
def cases(draw: st.DrawFn, slices: st.SearchStrategy[list[int]]) -> Case:
    """A batch of up to five groups in a shape of few programs."""
    ranks = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    groups = [(slot, draw(st.integers(0, 19))) for slot in reversed(range(len(ranks)))]
    base_rows, in_features, widths = draw(st.integers(0, 12)), draw(st.integers(1, 300)), draw(slices)
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    max_rank = max(1, *ranks) + draw(st.integers(0, 9))
    num_rows = base_rows + sum(rows for _, rows in groups)
    step = StepShape(DEVICE.type, num_rows, len(ranks), 16)
    shrink = shrink_tile(step, max_rank, len(widths), in_features, dtype.itemsize)
    expand = expand_tile(step, max_rank, sum(widths), dtype.itemsize)
    column_tiles = -(-max_rank * len(widths) // shrink.block_n) * shrink.splits
    column_tiles += sum(-(-width // (expand.block_n // 2)) for width in widths)
    assume(num_tiles(num_rows, len(ranks), 16) * column_tiles <= MAX_PROGRAMS)
    return make_case(
        groups,
        ranks=ranks,
        max_rank=max_rank,
        in_features=in_features,
        slices=widths,
        dtype=dtype,
        base_rows=base_rows,
        block_m=16,
        one_launch=draw(st.booleans()),
    )


WIDTHS = st.lists(st.integers(1, 90), min_size=1, max_size=3)
GATED_WIDTHS = st.integers(1, 70).map(lambda width: [width, width])

DRAWN = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@DRAWN
@given(case=cases(WIDTHS))
def test_any_shape_equals_the_reference(case: Case) -> None:
    with poisoned_empty():
        case.check(changes=False)
    assert case.routing.counters is None or not case.routing.counters.any()


@DRAWN
@given(case=cases(GATED_WIDTHS))
def test_any_gated_shape_agrees_with_torch(case: Case) -> None:
    with poisoned_empty(), np.errstate(over="ignore"):
        case.check_gated("silu")


def untouched(num_values: int) -> Tensor:
    """bf16 zeros, which take memory where they are written to."""
    return torch.from_numpy(np.zeros(num_values, np.uint16)).view(torch.bfloat16).to(DEVICE)


def test_offsets_past_two_to_the_31st_are_reached() -> None:
    """Of rows of x and y that lie far apart, and of the last of many slots."""
    stride, slots, rank, features = 2**30 + 8, 2**15 + 1, 16, 64
    last = slots - 1
    assert last * rank * features * 64 >= 2**31
    memory = untouched(3 * stride)
    x = memory.as_strided((3, features), (stride, 1))
    y = memory.as_strided((3, 64 * features), (stride, 1), storage_offset=4096)
    b_stack = untouched(slots * 64 * features * rank).view(slots, 64 * features, rank)
    a_stack = untouched(slots * rank * features).view(slots, rank, features)
    x.fill_(1.0)
    a_stack[last].fill_(1.0)
    b_stack[last].fill_(0.25)
    routing = build_routing([last], [0, 3], [0] * last + [rank], num_rows=3, max_groups=1, device=DEVICE, block_m=8)
    sgmv(x, a_stack, b_stack, y, routing, (64 * features,))
    assert (y == 0.25 * features * rank).all()


@pytest.mark.parametrize(
    ("groups", "num_slots", "in_features", "slices", "block_m"),
    [
        pytest.param([(1, 2), (0, 1)], 2, 16384, (64, 32, 32), 8, id="wide-input"),
        pytest.param([(1, 1)], 2, 32, (28672, 28672), 16, id="wide-gate-and-up"),
        pytest.param([(0, 1)], 1, 16, (262144,), 16, id="head-of-262144"),
        pytest.param([(255, 20000), (3, 12000)], 256, 16, (16,), 64, id="32k-rows-of-256-slots"),
    ],
)
def test_the_largest_shapes_equal_the_reference(
    groups: list[tuple[int, int]], num_slots: int, in_features: int, slices: tuple[int, ...], block_m: int
) -> None:
    make_case(
        groups,
        ranks=[8] * num_slots,
        max_rank=8,
        in_features=in_features,
        slices=slices,
        dtype=torch.bfloat16,
        base_rows=1,
        block_m=block_m,
    ).check()
