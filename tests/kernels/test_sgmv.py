"""The public operations: what they refuse, how they dispatch, and what compilers see of them."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import build_routing, sgmv, sgmv_expand, sgmv_shrink
from tests.kernels import interpreter
from tests.kernels.cases import DEVICE, Case, make_case

interpreter.install()
CPU = torch.device("cpu")


def small_case(*, block_m: int | None, dtype: torch.dtype = torch.bfloat16) -> Case:
    return make_case(
        [(2, 1), (0, 2)],
        ranks=[4, 8, 3],
        max_rank=8,
        in_features=32,
        slices=(16, 8),
        dtype=dtype,
        base_rows=1,
        block_m=block_m,
        device=DEVICE if block_m else CPU,
    )


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


MISFITS: dict[str, tuple[Callable[[Case], Case], str]] = {
    "x of another width": (lambda c: replace(c, x=c.x[:, :24]), r"x has shape \[4, 24\] and a_stack \[3, 16, 32\]"),
    "x with three dimensions": (lambda c: replace(c, x=c.x[None]), r"x has shape \[1, 4, 32\]"),
    "x of integers": (lambda c: replace(c, x=c.x.nan_to_num().int()), "x is torch.int32"),
    "x of another dtype": (lambda c: replace(c, x=c.x.half()), "float16"),
    "x with too few rows": (lambda c: replace(c, x=c.x[:2], y=c.y[:2]), "x has 2 rows, fewer than .* row 3"),
    "x with strides": (lambda c: replace(c, x=transposed(c.x)), r"x has strides \(1, 4\)"),
    "x and y of different lengths": (lambda c: replace(c, x=c.x[:3]), "3 rows and y torch.bfloat16 of 4"),
    "y of another width": (lambda c: replace(c, y=c.y[:, :16]), r"y \[4, 16\] and slices \[16, 8\]"),
    "y with strides": (lambda c: replace(c, y=transposed(c.y)), r"y has strides \(1, 4\)"),
    "y on another device": (lambda c: replace(c, y=c.y.to("meta")), "y is on meta, b_stack on"),
    "x on another device": (lambda c: replace(c, x=c.x.to("meta")), "x is on meta, a_stack on"),
    "slices that do not add up": (lambda c: replace(c, slices=(16, 16)), r"slices \[16, 16\]"),
    "y whose rows overlap": (
        lambda c: replace(c, y=c.y.flatten().as_strided((4, 24), (8, 1))),
        r"y has strides \(8, 1\) for shape \[4, 24\], .* rows that do not overlap",
    ),
    "y of one row for all": (lambda c: replace(c, y=c.y[:1].expand(4, 24)), r"y has strides \(0, 1\)"),
    "a slice without columns": (lambda c: replace(c, slices=(24, 0)), r"widths \[24, 0\], expected each to be 1"),
    "a slice of less than none": (lambda c: replace(c, slices=(32, -8)), r"widths \[32, -8\], expected each to be 1"),
    "no slices": (lambda c: replace(c, slices=()), "not a multiple of 0 projections"),
    "slices of another number": (lambda c: replace(c, slices=(24,)), "16 rows a slot, expected 1 slices times"),
    "A of another dtype": (lambda c: replace(c, a_stack=c.a_stack.double()), "a_stack is torch.float64"),
    "B of another dtype": (lambda c: replace(c, b_stack=c.b_stack.double()), "b_stack is torch.float64"),
    "A with strides": (lambda c: replace(c, a_stack=transposed(c.a_stack)), r"a_stack has strides"),
    "B with strides": (lambda c: replace(c, b_stack=transposed(c.b_stack)), r"b_stack has strides"),
    "A of fewer slots": (lambda c: replace(c, a_stack=c.a_stack[:2]), "a_stack has 2 slots, the routing 3"),
    "B of fewer slots": (lambda c: replace(c, b_stack=c.b_stack[:2]), "b_stack has 2 slots, the routing 3"),
    "stacks of a smaller rank": (
        lambda c: replace(c, a_stack=c.a_stack[:, :8].contiguous(), b_stack=c.b_stack[:, :, :4].contiguous()),
        "rank 8, a_stack holds at most rank 4",
    ),
}


@pytest.mark.parametrize("block_m", [None, 8], ids=["cpu", "triton"])
@pytest.mark.parametrize("misfit", MISFITS)
def test_arguments_that_disagree_are_refused(misfit: str, block_m: int | None) -> None:
    change, message = MISFITS[misfit]
    case = change(small_case(block_m=block_m))
    with pytest.raises(ValueError, match=message):
        sgmv(case.x, case.a_stack, case.b_stack, case.y, case.routing, case.slices)


def test_more_than_three_slices_are_refused_where_triton_runs() -> None:
    case = make_case(
        [(0, 2)], ranks=[4], max_rank=4, in_features=16, slices=(8, 8, 8, 8), dtype=torch.bfloat16, block_m=8
    )
    with pytest.raises(ValueError, match="slices has 4 widths, expected 1 to 3"):
        case.result()


def test_planes_that_do_not_fit_are_refused() -> None:
    case = small_case(block_m=8)
    planes = sgmv_shrink(case.x, case.a_stack, case.routing, 2)
    with pytest.raises(ValueError, match=r"planes is torch.float32 \[1, 3, 16\], expected .* \[splits, 4, 16\]"):
        sgmv_expand(planes[:, :3], case.b_stack, case.y, case.routing, case.slices)
    with pytest.raises(ValueError, match="expected contiguous"):
        sgmv_expand(transposed(planes), case.b_stack, case.y, case.routing, case.slices)


def test_nothing_runs_without_adapter_rows() -> None:
    routing = build_routing([], [0], [4, 4], num_rows=4, max_groups=2, device=CPU)
    y = torch.ones(4, 8)
    sgmv(torch.ones(4, 8), torch.ones(2, 4, 8), torch.ones(2, 8, 4), y, routing, (8,))
    assert torch.equal(y, torch.ones(4, 8))


@pytest.mark.parametrize("block_m", [None, 8], ids=["cpu", "triton"])
def test_the_two_halves_equal_the_whole(block_m: int | None) -> None:
    case = small_case(block_m=block_m, dtype=torch.float32)
    y = case.y.clone()
    planes = sgmv_shrink(case.x, case.a_stack, case.routing, 2)
    sgmv_expand(planes, case.b_stack, y, case.routing, case.slices)
    assert torch.equal(y, case.result())
    assert torch.equal(y, case.expected())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compilers_see_the_operators_as_they_are(dtype: torch.dtype) -> None:
    case = small_case(block_m=8, dtype=dtype)
    tiles = case.routing.tiles
    x = case.x.nan_to_num()
    shrink, expand = torch.ops.lora_fleet.sgmv_shrink, torch.ops.lora_fleet.sgmv_expand
    planes = torch.zeros_like(shrink(x, case.a_stack, tiles, 8, 3, 2))
    tests = ("test_schema", "test_faketensor")
    with torch.no_grad():
        torch.library.opcheck(expand, (planes, case.b_stack, case.y.clone(), tiles, 8, 3, [16, 8]), test_utils=tests)
        fake_tests = tests[1:]
        torch.library.opcheck(shrink, (x, case.a_stack, tiles, 8, 3, 2), test_utils=fake_tests)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_where_their_tensors_are() -> None:
    other = torch.device("cuda", 1 - torch.cuda.current_device())
    case = make_case(
        [(0, 2)], ranks=[4], max_rank=4, in_features=32, slices=(16,), dtype=torch.bfloat16, block_m=8, device=other
    )
    case.check()


def test_the_cpu_path_needs_no_triton() -> None:
    script = """
import sys
sys.modules["triton"] = None
import torch
from kernels import build_routing, sgmv
routing = build_routing([1], [0, 2], [4, 4], num_rows=3, max_groups=2, device=torch.device("cpu"))
y = torch.zeros(3, 8)
sgmv(torch.ones(3, 8), torch.ones(2, 4, 8), torch.ones(2, 8, 4), y, routing, (8,))
assert y.tolist() == [[32.0] * 8, [32.0] * 8, [0.0] * 8], y
"""
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=True, timeout=60)
