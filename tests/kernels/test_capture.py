"""What a captured graph relies on: launches that depend on shapes alone, and find the next step in the same buffer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import Routing, build_routing, reference, scale_rows, sgmv, sgmv_embed, sgmv_swiglu
from kernels.launch import Launch
from tests.kernels import interpreter
from tests.kernels.cases import DEVICE

interpreter.install()

NUM_ROWS, NUM_SLOTS, RANK, IN, WIDTH, VOCABULARY = 21, 4, 16, 40, 24, 19
SLICES = (WIDTH, WIDTH)

MIXES: dict[str, tuple[list[int], list[int], list[int]]] = {
    "one row": ([1], [0, 1], [16, 16, 16, 16]),
    "two adapters": ([3, 0], [0, 5, 14], [16, 0, 0, 9]),
    "all adapters": ([3, 2, 1, 0], [0, 1, 9, 12, 21], [16, 8, 3, 1]),
    "an empty slot": ([2, 1], [0, 8, 21], [0, 4, 0, 0]),
    "no adapter": ([], [0], [0, 0, 0, 0]),
}
"""Groups' slots, their first rows, and the slots' ranks."""


def route(mix: str, one_launch: bool, into: Tensor | None = None) -> Routing:
    lora_ids, offsets, ranks = MIXES[mix]
    return build_routing(
        lora_ids,
        offsets,
        ranks,
        num_rows=NUM_ROWS,
        max_groups=NUM_SLOTS,
        device=DEVICE,
        block_m=8,
        one_launch=one_launch,
        into=into,
    )


@dataclass(frozen=True)
class Step:
    """The tensors of one layer, at fixed addresses: small integers and quarters, exact in bf16."""

    x: Tensor
    ids: Tensor
    a_stack: Tensor
    b_stack: Tensor
    table: Tensor
    gain: Tensor
    y: Tensor

    def run(self, ops: Any, routing: Routing) -> tuple[Tensor, ...]:
        """Every operation, of `kernels` or of the reference."""
        y = self.y
        ops.scale_rows(y, self.gain, None, routing)
        ops.sgmv(self.x, self.a_stack, self.b_stack, y, routing, SLICES)
        ops.sgmv_embed(self.ids, self.table, self.b_stack, y, routing)
        return y, ops.sgmv_swiglu(self.x, self.a_stack, self.b_stack, y, routing)

    def reset(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.y.copy_(torch.randint(-8, 9, self.y.shape, generator=generator) / 4)

    def load(self, ranks: Sequence[int]) -> None:
        """Write adapters of these ranks into the slots; NaN into those without one."""
        generator = torch.Generator().manual_seed(sum(ranks))
        for slot, rank in enumerate(ranks):
            for stack, scale in ((self.a_stack, 1), (self.b_stack, 4), (self.table, 1), (self.gain, 8)):
                values = torch.randint(-1, 2, stack[slot].shape, generator=generator) / scale
                stack[slot].copy_(values if rank else torch.full_like(values, torch.nan))
            self.a_stack[slot].view(2, RANK, IN)[:, rank:] = 0
            self.b_stack[slot, :, rank:] = 0
            self.table[slot, :, rank:] = 0


class PublicOps:
    """The public operations, as `reference` has them."""

    scale_rows = staticmethod(scale_rows)
    sgmv = staticmethod(sgmv)
    sgmv_embed = staticmethod(sgmv_embed)
    sgmv_swiglu = staticmethod(sgmv_swiglu)


@pytest.fixture
def step() -> Step:
    generator = torch.Generator().manual_seed(0)

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    x = torch.randint(-1, 2, (NUM_ROWS, IN), generator=generator).to(DEVICE, torch.bfloat16)
    ids = torch.randint(0, VOCABULARY, (NUM_ROWS,), generator=generator).to(DEVICE)
    return Step(
        x=x,
        ids=ids,
        a_stack=zeros(NUM_SLOTS, 2 * RANK, IN),
        b_stack=zeros(NUM_SLOTS, 2 * WIDTH, RANK),
        table=zeros(NUM_SLOTS, VOCABULARY, RANK),
        gain=zeros(NUM_SLOTS, 2 * WIDTH, dtype=torch.float32),
        y=zeros(NUM_ROWS, 2 * WIDTH),
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches that take place, as they do."""
    launches: list[Launch] = []
    plain_run: Callable[[Launch], None] = Launch.run

    def run(launch: Launch) -> None:
        launches.append(launch)
        plain_run(launch)

    monkeypatch.setattr(Launch, "run", run)
    return launches


def description(launch: Launch, addresses: frozenset[int]) -> tuple[Any, ...]:
    """All that a graph keeps of a launch, but for the addresses of what the step itself allocates."""
    arguments = [
        (value.data_ptr() if value.data_ptr() in addresses else None, value.dtype, value.shape, value.stride())
        if isinstance(value, Tensor)
        else value
        for value in launch.arguments
    ]
    return launch.kernel, launch.programs, arguments, launch.options


@pytest.mark.parametrize("one_launch", [False, True], ids=["two launches", "one launch"])
def test_launches_are_the_same_for_every_mix_of_adapters(step: Step, launched: list[Launch], one_launch: bool) -> None:
    first = route("all adapters", one_launch)
    views = [first.buffer, first.tiles, first.counters, *vars(step).values()]
    addresses = frozenset(view.data_ptr() for view in views if view is not None)
    found = []
    for mix, (_, _, ranks) in MIXES.items():
        if mix == "no adapter":
            continue
        step.load(ranks)
        step.reset()
        launched.clear()
        step.run(PublicOps, route(mix, one_launch, first.buffer))
        found.append([description(launch, addresses) for launch in launched])
    # Gains, the pair, gather and expand, the gated pair.
    assert len(found[0]) == (1 + 1 + 2 + 1 if one_launch else 1 + 2 + 2 + 2)
    assert all(launches == found[0] for launches in found[1:])


@pytest.mark.parametrize("one_launch", [False, True], ids=["two launches", "one launch"])
@pytest.mark.parametrize("captured", ["all adapters", "one row"])
def test_the_same_launches_serve_every_step(
    step: Step, launched: list[Launch], captured: str, one_launch: bool
) -> None:
    routing = route(captured, one_launch)
    step.load(MIXES[captured][2])
    act = step.run(PublicOps, routing)[1]
    graph = list(launched)
    for mix, (_, _, ranks) in MIXES.items():
        step.load(ranks)
        step.reset()
        expected = [tensor.clone() for tensor in step.run(reference, route(mix, one_launch, routing.buffer))]
        step.reset()
        for launch in graph:
            launch.run()
        assert torch.equal(step.y, expected[0]), mix
        assert (act == expected[1]).float().mean() > 0.999, mix
        assert routing.counters is None or not routing.counters.any()


def test_a_step_without_adapter_rows_launches_nothing(step: Step, launched: list[Launch]) -> None:
    step.reset()
    before = step.y.clone()
    y, act = step.run(PublicOps, route("no adapter", one_launch=False))
    assert launched == []
    assert torch.equal(y, before)
    assert torch.equal(act, reference.gate(before, "silu"))


@pytest.mark.parametrize("one_launch", [False, True], ids=["two launches", "one launch"])
def test_a_step_without_rows_is_a_step(one_launch: bool, launched: list[Launch]) -> None:
    routing = build_routing([0], [0, 0], [4], num_rows=0, max_groups=1, device=DEVICE, block_m=8, one_launch=one_launch)
    x, y = torch.zeros(0, 8, device=DEVICE), torch.zeros(0, 12, device=DEVICE)
    a_stack, b_stack = torch.zeros(1, 8, 8, device=DEVICE), torch.zeros(1, 12, 4, device=DEVICE)
    sgmv(x, a_stack, b_stack, y, routing, (6, 6))
    assert sgmv_swiglu(x, a_stack, b_stack, y, routing).shape == (0, 6)
    torch.ops.lora_fleet.sgmv(x, a_stack, b_stack, y, routing.tiles, routing.counters, 8, 1, [6, 6])
    assert all(not launch.programs for launch in launched)
