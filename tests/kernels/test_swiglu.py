"""The gated activation with its adapters, against torch's own operators: both paths, and in one launch or two."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from kernels import GATED_ACTIVATIONS, build_routing, reference, sgmv_swiglu
from tests.kernels import interpreter
from tests.kernels.cases import DEVICE, POPULARITIES, Case, make_case, popular_groups

interpreter.install()

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ONE_LAUNCH = pytest.mark.parametrize("one_launch", [False, True], ids=["two launches", "one launch"])

# The interpreter is numpy, which says that the exponential of a large number is infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(autouse=True)
def _scratch(poisoned_scratch: None) -> None:
    """Memory from torch.empty holds NaN: so does a row of the result that nobody writes."""


def gated_case(
    groups: Sequence[tuple[int, int]],
    *,
    ranks: Sequence[int],
    width: int = 40,
    max_rank: int = 16,
    in_features: int = 72,
    dtype: torch.dtype = torch.bfloat16,
    base_rows: int = 11,
    block_m: int | None = 8,
    one_launch: bool = False,
) -> Case:
    return make_case(
        groups,
        ranks=ranks,
        max_rank=max_rank,
        in_features=in_features,
        slices=(width, width),
        dtype=dtype,
        base_rows=base_rows,
        block_m=block_m,
        one_launch=one_launch,
        device=DEVICE if block_m else torch.device("cpu"),
    )


@ONE_LAUNCH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_mixed_ranks_agree_with_torch(popularity: str, dtype: torch.dtype, one_launch: bool) -> None:
    groups = popular_groups(popularity, 6 if popularity == "distinct" else 21, 6)
    case = gated_case(groups, ranks=[16, 8, 1, 0, 5, 12], dtype=dtype, one_launch=one_launch)
    case.check_gated("silu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_m", [None, 8], ids=["cpu", "triton"])
@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_every_activation_agrees_with_torch(activation: str, block_m: int | None, dtype: torch.dtype) -> None:
    gated_case([(1, 9), (0, 1)], ranks=[16, 5], dtype=dtype, block_m=block_m).check_gated(activation)


@ONE_LAUNCH
@pytest.mark.parametrize(("width", "in_features", "max_rank"), [(1, 1, 1), (33, 7, 3), (130, 40, 12), (192, 96, 64)])
def test_ragged_widths_agree_with_torch(width: int, in_features: int, max_rank: int, one_launch: bool) -> None:
    gated_case(
        [(2, 1), (1, 9), (0, 3)],
        ranks=[max_rank, 1, max_rank],
        width=width,
        max_rank=max_rank,
        in_features=in_features,
        one_launch=one_launch,
    ).check_gated("silu")


@ONE_LAUNCH
@pytest.mark.parametrize("max_rank", [64, 256])
def test_large_ranks_and_prefill_tiles_agree_with_torch(max_rank: int, one_launch: bool) -> None:
    gated_case(
        [(1, 70), (0, 5)],
        ranks=[max_rank, max_rank // 2 + 3],
        width=96,
        max_rank=max_rank,
        in_features=256,
        base_rows=66,
        block_m=64,
        one_launch=one_launch,
    ).check_gated("silu")


@ONE_LAUNCH
@pytest.mark.parametrize("groups", [[(0, 4)], [(2, 0), (1, 3), (0, 0)], [(1, 1)]], ids=str)
def test_empty_groups_and_empty_slots_are_served(groups: list[tuple[int, int]], one_launch: bool) -> None:
    gated_case(groups, ranks=[0, 4, 4], one_launch=one_launch, base_rows=2).check_gated("silu")


@pytest.mark.parametrize("base_rows", [0, 3])
def test_without_adapter_rows_it_is_the_activation(base_rows: int) -> None:
    case = gated_case([], ranks=[4], base_rows=base_rows)
    assert torch.equal(case.gated("silu"), reference.gate(case.y, "silu"))


def test_base_rows_do_not_depend_on_the_adapters_beside_them() -> None:
    case = gated_case([(1, 3), (0, 2)], ranks=[4, 16], base_rows=30)
    alone = build_routing([1], [0, 1], [4, 16], num_rows=35, max_groups=2, device=DEVICE, block_m=8)
    assert torch.equal(case.gated("silu")[5:], replace(case, routing=alone).gated("silu")[5:])


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
def test_values_that_no_exponential_holds_are_torchs() -> None:
    case = gated_case([(0, 1)], ranks=[4], dtype=torch.float32, base_rows=4)
    y = case.y.clone()
    y[1, :40], y[2, :40], y[3, :40], y[4, :40] = -1000.0, 1000.0, float("inf"), -0.0
    case = replace(case, y=y)
    expected = reference.gate(y, "silu")
    assert torch.equal(case.gated("silu")[1:].nan_to_num(nan=77), expected[1:].nan_to_num(nan=77))


def test_rows_of_a_wider_tensor_are_served() -> None:
    case = gated_case([(0, 3)], ranks=[16])
    wide = torch.full((14, 100), 9.0, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 8:88] = case.y
    act = sgmv_swiglu(case.x, case.a_stack, case.b_stack, wide[:, 8:88], case.routing)
    assert torch.equal(act, case.gated("silu"))


MISFITS: dict[str, tuple[Callable[[Case], Case], str]] = {
    "y of an odd width": (lambda c: replace(c, y=c.y[:, :79]), r"y has shape \[5, 79\], expected \[5, 2\*I\]"),
    "too few rows": (lambda c: replace(c, y=c.y[:4], x=c.x[:4]), r"y has shape \[4, 80\], expected \[5, 2\*I\]"),
    "y of another width": (lambda c: replace(c, y=c.y[:, :40].contiguous()), r"y \[5, 40\] and slices \[20, 20\]"),
    "x of another dtype": (lambda c: replace(c, x=c.x.half()), "float16"),
    "y elsewhere": (lambda c: replace(c, y=c.y.to("meta")), "y is on meta"),
    "A of three projections": (
        lambda c: replace(c, a_stack=torch.zeros(2, 48, 72, dtype=c.a_stack.dtype, device=c.a_stack.device)),
        "a_stack has 48 rows a slot, expected 2 slices times b_stack's rank 16",
    ),
}


@pytest.mark.parametrize("block_m", [None, 8], ids=["cpu", "triton"])
@pytest.mark.parametrize("misfit", MISFITS)
def test_arguments_that_disagree_are_refused(misfit: str, block_m: int | None) -> None:
    change, message = MISFITS[misfit]
    case = change(gated_case([(1, 1), (0, 2)], ranks=[4, 8], base_rows=2, block_m=block_m))
    with pytest.raises(ValueError, match=message):
        sgmv_swiglu(case.x, case.a_stack, case.b_stack, case.y, case.routing)


def test_another_activation_is_refused_by_name() -> None:
    case = gated_case([(0, 1)], ranks=[4])
    with pytest.raises(ValueError, match="activation is 'relu', expected one of silu, gelu_pytorch_tanh"):
        case.gated("relu")
