"""Batches to multiply, over adapter popularities, ranks and dtypes.

All values are small integers or quarters, so that every product and sum is exact in fp32 in any order and the low-rank
rows are exact in 16 bits: the one rounding left is the last, into y, and results are compared to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import Routing, build_routing, reference, sgmv, sgmv_swiglu
from kernels.schedule import cpu_stack_dtype

POPULARITIES = ("identical", "uniform", "zipf:1.5", "distinct")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where Triton kernels are tested: under the interpreter on the CPU where there is no GPU."""


@dataclass(frozen=True)
class Case:
    """The arguments of one `sgmv` call."""

    x: Tensor
    a_stack: Tensor
    b_stack: Tensor
    y: Tensor
    routing: Routing
    slices: tuple[int, ...]

    def expected(self) -> Tensor:
        """What y must become; self.y stays as it is."""
        y = self.y.clone()
        reference.sgmv(self.x, self.a_stack, self.b_stack, y, self.routing, self.slices)
        return y

    def result(self) -> Tensor:
        """What sgmv makes of a copy of y."""
        y = self.y.clone()
        sgmv(self.x, self.a_stack, self.b_stack, y, self.routing, self.slices)
        return y

    def gated(self, activation: str) -> Tensor:
        """What sgmv_swiglu makes of the arguments, which it does not change."""
        y = self.y.clone()
        act = sgmv_swiglu(self.x, self.a_stack, self.b_stack, y, self.routing, activation)
        assert torch.equal(y, self.y)
        return act

    def check_gated(self, activation: str) -> None:
        """sgmv_swiglu agrees with torch's own operators, of which only the exponential may differ in its last bit."""
        result = self.gated(activation)
        expected = reference.sgmv_swiglu(self.x, self.a_stack, self.b_stack, self.y, self.routing, activation)
        assert result.dtype == expected.dtype
        error = (result.float() - expected.float()).abs()
        bound = 4 * torch.finfo(torch.float32).eps if result.dtype == torch.float32 else torch.finfo(result.dtype).eps
        # torch computes 1 + tanh(x), which cancels where gelu is almost zero.
        floor = 1e-6 if activation == "silu" else 1e-5
        assert not result.isnan().any()
        assert (error <= bound * expected.float().abs() + floor).all(), f"largest error {error.max()}"
        if activation == "silu" and result.dtype != torch.float32:
            assert (result != expected).sum() <= 1 + result.numel() // 1000

    def check(self, *, changes: bool = True) -> None:
        """sgmv equals the reference to the bit, leaves base rows alone, and changes what it should.

        Args:
            changes: Whether rows with an adapter must change: a few products may add up to nothing.
        """
        result, expected, end = self.result(), self.expected(), self.routing.end
        assert not result.isnan().any()
        assert same_bits(result[end:], self.y[end:])
        assert torch.equal(result, expected), f"largest error {(result.float() - expected.float()).abs().max()}"
        if changes and any(self.routing.slot_ranks[group.slot] for group in self.routing.groups):
            assert not torch.equal(result[:end], self.y[:end])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one floating-point type are equal to the bit: -0.0 is not 0.0, and NaN is NaN."""
    integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(integers), other.contiguous().view(integers))


def make_case(
    groups: Sequence[tuple[int, int]],
    *,
    ranks: Sequence[int],
    max_rank: int,
    in_features: int,
    slices: Sequence[int],
    dtype: torch.dtype,
    base_rows: int = 0,
    block_m: int | None = None,
    one_launch: bool = False,
    device: torch.device = DEVICE,
    seed: int = 0,
) -> Case:
    """Build a batch of groups `(slot, rows)`, then `base_rows` base rows.

    What may not matter is NaN: the base rows of x, the slots that no group uses, and, for Triton (`block_m` given), A's
    rows past a slot's rank and B's columns past the next multiple of 8. Without `block_m` stacks for fp16 are fp32.
    """
    generator = torch.Generator().manual_seed(seed)
    num_slots, projections, out = len(ranks), len(slices), sum(slices)

    def integers(*shape: int, bound: int = 1) -> Tensor:
        return torch.randint(-bound, bound + 1, shape, generator=generator).float()

    offsets = [0]
    for _, rows in groups:
        offsets.append(offsets[-1] + rows)
    num_rows = offsets[-1] + base_rows
    x, y = integers(num_rows, in_features), integers(num_rows, out, bound=8) / 4
    a_stack = integers(num_slots, projections, max_rank, in_features)
    b_stack = integers(num_slots, out, max_rank, bound=2) / 4
    nan = float("nan")
    x[offsets[-1] :] = nan
    for slot, rank in enumerate(ranks):
        padding = nan if block_m else 0.0
        a_stack[slot, :, rank:] = padding
        b_stack[slot, :, rank:] = 0
        b_stack[slot, :, -(-rank // 8) * 8 :] = padding
        if slot not in {used for used, rows in groups if rows}:
            a_stack[slot], b_stack[slot] = nan, nan
    stack_dtype = dtype if block_m else cpu_stack_dtype(dtype)
    return Case(
        x=x.to(device, dtype),
        a_stack=a_stack.view(num_slots, -1, in_features).to(device, stack_dtype),
        b_stack=b_stack.to(device, stack_dtype),
        y=y.to(device, dtype),
        routing=build_routing(
            [slot for slot, _ in groups],
            offsets,
            ranks,
            num_rows=num_rows,
            max_groups=max(num_slots, len(groups)),
            device=device,
            block_m=block_m,
            one_launch=one_launch,
        ),
        slices=tuple(slices),
    )


def popular_groups(popularity: str, num_rows: int, num_slots: int, seed: int = 0) -> list[tuple[int, int]]:
    """Groups `(slot, rows)` of a batch sorted by descending slot, each row's adapter drawn by popularity."""
    generator = torch.Generator().manual_seed(seed)
    kind, _, exponent = popularity.partition(":")
    if kind == "identical":
        return [(num_slots // 2, num_rows)]
    if kind == "distinct":
        return [(slot, 1) for slot in reversed(range(min(num_rows, num_slots)))]
    weights = torch.arange(1, num_slots + 1).float().pow(-float(exponent or 0))
    slots = torch.multinomial(weights, num_rows, replacement=True, generator=generator).tolist()
    return [(slot, slots.count(slot)) for slot in sorted(set(slots), reverse=True)]


def with_random_values(case: Case, seed: int = 0) -> Case:
    """The same batch with normally distributed values of x's dtype, whose sums do round."""
    generator = torch.Generator().manual_seed(seed)

    def random_like(tensor: Tensor, scale: float) -> Tensor:
        values = torch.randn(tensor.shape, generator=generator) * scale
        return torch.where(tensor.float().cpu().bool(), values, 0).to(case.x.dtype).to(tensor)

    return replace(
        case,
        x=random_like(case.x, 1.0),
        a_stack=random_like(case.a_stack, case.x.shape[1] ** -0.5),
        b_stack=random_like(case.b_stack, 0.25),
        y=random_like(case.y, 1.0),
    )
