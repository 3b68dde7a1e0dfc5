"""Gains against the reference, to the bit: on the CPU path, and Triton's kernel on a GPU or interpreted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels import Routing, build_routing, reference, scale_rows
from tests.kernels import interpreter
from tests.kernels.cases import DEVICE, POPULARITIES, popular_groups, same_bits

interpreter.install()
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PATHS = pytest.mark.parametrize("block_m", [None, 8], ids=["cpu", "triton"])


@dataclass(frozen=True)
class GainCase:
    """The arguments of one `scale_rows` call; eighths, so that only the last rounding is one."""

    y: Tensor
    gain_stack: Tensor
    bias: Tensor | None
    routing: Routing

    def result(self) -> Tensor:
        y = self.y.clone()
        scale_rows(y, self.gain_stack, self.bias, self.routing)
        return y

    def check(self) -> None:
        expected = self.y.clone()
        reference.scale_rows(expected, self.gain_stack, self.bias, self.routing)
        result, end = self.result(), self.routing.end
        assert torch.equal(result.nan_to_num(nan=77), expected.nan_to_num(nan=77))
        assert not result[:end].isnan().any()
        if any(self.routing.slot_ranks[group.slot] for group in self.routing.groups):
            assert not torch.equal(result[:end], self.y[:end])


def gain_case(
    groups: Sequence[tuple[int, int]],
    *,
    ranks: Sequence[int],
    out: int = 40,
    dtype: torch.dtype = torch.float32,
    has_bias: bool = True,
    block_m: int | None = None,
) -> GainCase:
    """A batch of groups `(slot, rows)` and two base rows of NaN; slots that are not used hold NaN."""
    generator = torch.Generator().manual_seed(len(groups) + out)
    offsets = [0]
    for _, rows in groups:
        offsets.append(offsets[-1] + rows)
    num_rows, num_slots = offsets[-1] + 2, len(ranks)
    y = torch.randint(-16, 17, (num_rows, out), generator=generator).float() / 8
    y[offsets[-1] :] = float("nan")
    gain_stack = torch.randint(1, 8, (num_slots, out), generator=generator).float() / 8
    for slot in range(num_slots):
        if slot not in {used for used, rows in groups if rows and ranks[used]}:
            gain_stack[slot] = float("nan")
    bias = torch.randint(-8, 9, (out,), generator=generator).float() / 4 if has_bias else None
    device = DEVICE if block_m else CPU
    return GainCase(
        y.to(device, dtype),
        gain_stack.to(device),
        None if bias is None else bias.to(device, dtype),
        build_routing(
            [slot for slot, _ in groups],
            offsets,
            ranks,
            num_rows=num_rows,
            max_groups=max(num_slots, len(groups)),
            device=device,
            block_m=block_m,
        ),
    )


@PATHS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_every_popularity_equals_the_reference(
    has_bias: bool, popularity: str, dtype: torch.dtype, block_m: int | None
) -> None:
    groups = popular_groups(popularity, 8 if popularity == "distinct" else 21, 8)
    gain_case(groups, ranks=[4, 4, 1, 4, 5, 4, 0, 3], dtype=dtype, has_bias=has_bias, block_m=block_m).check()


@PATHS
@pytest.mark.parametrize("out", [1, 33, 129, 1000])
def test_odd_widths_equal_the_reference(out: int, block_m: int | None) -> None:
    gain_case([(2, 1), (1, 9), (0, 3)], ranks=[4, 4, 4], out=out, dtype=torch.bfloat16, block_m=block_m).check()


@PATHS
@pytest.mark.parametrize("groups", [[], [(0, 0)], [(2, 0), (1, 3), (0, 0)], [(0, 4)]], ids=str)
def test_empty_groups_and_empty_slots_change_nothing(groups: list[tuple[int, int]], block_m: int | None) -> None:
    gain_case(groups, ranks=[0, 4, 4], block_m=block_m).check()


# The interpreter is numpy, which says that zero times infinity is computed before it is dropped.
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
@PATHS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_neutral_gain_keeps_every_bit(dtype: torch.dtype, block_m: int | None) -> None:
    case = gain_case([(1, 2), (0, 1)], ranks=[4, 4], dtype=dtype, block_m=block_m)
    y = case.y.clone()
    y[:, 0], y[:, 1] = float("inf"), -0.0
    result = replace(case, y=y, gain_stack=torch.zeros_like(case.gain_stack)).result()
    assert same_bits(result[:3], y[:3])


@pytest.mark.parametrize("block_m", [None, 64], ids=["cpu", "triton"])
def test_a_prefill_equals_the_reference(block_m: int | None) -> None:
    gain_case([(2, 3), (1, 70), (0, 5)], ranks=[4, 4, 0], dtype=torch.bfloat16, block_m=block_m).check()


@PATHS
def test_rows_of_a_wider_tensor_are_served(block_m: int | None) -> None:
    case = gain_case([(1, 3)], ranks=[4, 4], block_m=block_m)
    wide = torch.full((case.y.shape[0], 64), 9.0, device=case.y.device)
    wide[:, 8:48] = case.y
    scale_rows(wide[:, 8:48], case.gain_stack, case.bias, case.routing)
    assert torch.equal(wide[:3, 8:48], case.result()[:3])
    assert (wide[:, :8] == 9).all()
    assert (wide[:, 48:] == 9).all()


MISFITS: dict[str, tuple[Callable[[GainCase], GainCase], str]] = {
    "y of another width": (lambda c: replace(c, y=c.y[:, :8]), r"y has shape \[5, 8\] and gain_stack \[3, 40\]"),
    "y of integers": (lambda c: replace(c, y=c.y.nan_to_num().int()), "y is torch.int32"),
    "gains of bf16": (lambda c: replace(c, gain_stack=c.gain_stack.bfloat16()), "gain_stack torch.bfloat16"),
    "a bias of another width": (lambda c: replace(c, bias=torch.zeros(8)), r"bias is torch.float32 \[8\]"),
    "a bias of another dtype": (lambda c: replace(c, bias=torch.zeros(40).half()), "bias is torch.float16"),
    "gains elsewhere": (lambda c: replace(c, gain_stack=c.gain_stack.to("meta")), "gain_stack on meta"),
    "y with strides": (lambda c: replace(c, y=c.y.t().contiguous().t()), "y has strides"),
    "gains with strides": (
        lambda c: replace(c, gain_stack=c.gain_stack.t().contiguous().t()),
        "gain_stack has strides",
    ),
    "gains of fewer slots": (lambda c: replace(c, gain_stack=c.gain_stack[:2]), "gain_stack has 2 slots"),
    "too few rows": (lambda c: replace(c, y=c.y[:2]), "y has 2 rows, fewer than .* row 3"),
}


@PATHS
@pytest.mark.parametrize("misfit", MISFITS)
def test_arguments_that_disagree_are_refused(misfit: str, block_m: int | None) -> None:
    change, message = MISFITS[misfit]
    case = change(gain_case([(2, 1), (0, 2)], ranks=[4, 8, 3], block_m=block_m))
    with pytest.raises(ValueError, match=message):
        case.result()


@PATHS
def test_rows_that_are_one_in_memory_are_refused(block_m: int | None) -> None:
    case = gain_case([(2, 1), (0, 2)], ranks=[4, 8, 3], block_m=block_m)
    y = case.y[:1].expand(5, 40)
    with pytest.raises(ValueError, match=r"y has strides \(0, 1\) for shape \[5, 40\], .* rows that do not overlap"):
        scale_rows(y, case.gain_stack, case.bias, case.routing)


def test_compilers_see_the_operator_as_it_is() -> None:
    case = gain_case([(2, 1), (0, 2)], ranks=[4, 8, 3], block_m=8)
    tests = ("test_schema", "test_faketensor")
    for bias in (case.bias, None):
        arguments = (case.y.nan_to_num(), case.gain_stack.nan_to_num(), bias, case.routing.tiles, 8)
        with torch.no_grad():
            torch.library.opcheck(torch.ops.lora_fleet.scale_rows, arguments, test_utils=tests)
