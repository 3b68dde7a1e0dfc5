"""What adapters add to the time of a decoder layer, over a graph of its base products and its gated activation.

Systems with "gated" in their name apply the gate themselves, and are compared with a layer that has one launch for it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import Routing, build_routing, reference, sgmv, sgmv_swiglu
from kernels.sgmv_launch import expand_launch, shrink_launch, swiglu_launch
from tests.bench.result import require
from tests.gpu.gate import gate
from tests.gpu.stage import Graph, Run, Stage
from tests.kernels.peers import Peer
from tests.kernels.sites import RANKS, TIMED_STEPS, Model, Site, Step

MAX_LAYERS = 16
MIN_SLOTS = 8

_MEMORY_SHARE = 0.7
"""Of the device's free memory that the layers of a point may take, a peer's copy of the adapters included."""


class Point(NamedTuple):
    """What is timed: a step, and the padded rank, which is also the true rank, of every adapter."""

    step: Step
    rank: int

    @property
    def name(self) -> str:
        """As in `T=64 G=8 r=16`."""
        return f"{self.step} r={self.rank}"

    @property
    def num_slots(self) -> int:
        """Adapter slots: at least as many as a small deployment has."""
        return max(MIN_SLOTS, self.step.num_groups)


def points(ranks: Sequence[int] = (16, 64, 8)) -> list[Point]:
    """What is timed, the ranks with goals first."""
    assert set(ranks) <= set(RANKS)
    return [Point(step, rank) for rank, step in itertools.product(ranks, TIMED_STEPS)]


@dataclass(frozen=True)
class Weights:
    """One site of one layer: `base` `[OUT, K]`, and the stacks of `kernels.sgmv`."""

    base: Tensor
    a_stack: Tensor
    b_stack: Tensor


@dataclass(frozen=True)
class Work:
    """The layers of a point in memory.

    Attributes:
        point: What they are for.
        sites: The layer's sites, in order; the outputs of `gate_up` go through the gate.
        layers: The weights of each layer, by site name: distinct, so that no cache holds them when their turn comes.
        inputs: `[T, K]` by site name. Layers share them, as they share a cache that has just been written to.
        outputs: `[T, OUT]` by site name, shared likewise.
        routing: Rows of all groups, as evenly as they go, with a tile table.
        one_launch: The same, with one launch an operation.
    """

    point: Point
    sites: tuple[Site, ...]
    layers: list[dict[str, Weights]]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    routing: Routing
    one_launch: Routing


def make_work(stage: Stage, model: Model, point: Point, num_layers: int, dtype: torch.dtype = torch.bfloat16) -> Work:
    """Random layers, and a step whose rows are spread over its groups."""
    generator = torch.Generator(stage.device).manual_seed(point.rank + sum(point.step))
    slots, rank = point.num_slots, point.rank

    def random(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator, device=stage.device, dtype=dtype).mul_(scale)

    def weights(site: Site) -> Weights:
        scale = site.in_features**-0.5
        return Weights(
            random(site.out_features, site.in_features, scale=scale),
            random(slots, len(site.slices) * rank, site.in_features, scale=scale),
            random(slots, site.out_features, rank, scale=rank**-0.5),
        )

    rows = point.step.num_rows
    return Work(
        point=point,
        sites=model.layer,
        layers=[{site.name: weights(site) for site in model.layer} for _ in range(num_layers)],
        inputs={site.name: random(rows, site.in_features, scale=1.0) for site in model.layer},
        outputs={site.name: random(rows, site.out_features, scale=1.0) for site in model.layer},
        routing=even_routing(point, stage.device, one_launch=False),
        one_launch=even_routing(point, stage.device, one_launch=True),
    )


def even_routing(point: Point, device: torch.device, one_launch: bool, block_m: int | None = None) -> Routing:
    """Groups in descending order of slots, their rows as even as they go; on the CPU in tiles of 8 rows if unset."""
    rows, groups = point.step
    bounds = [rows * index // groups for index in range(groups + 1)]
    return build_routing(
        list(reversed(range(groups))),
        bounds,
        [point.rank] * point.num_slots,
        num_rows=rows,
        max_groups=point.num_slots,
        device=device,
        block_m=8 if block_m is None and device.type == "cpu" else block_m,
        one_launch=one_launch,
    )


def layers_that_fit(model: Model, point: Point, free_bytes: int) -> int:
    """How many layers a point is timed over, at most 16; 0 where not even two fit."""
    width = sum(site.in_features * site.out_features for site in model.layer)
    adapters = sum(
        point.num_slots * point.rank * (len(site.slices) * site.in_features + site.out_features) for site in model.layer
    )
    fitting = int(_MEMORY_SHARE * free_bytes / (2 * (width + 2 * adapters)))
    return min(MAX_LAYERS, fitting) if fitting >= 2 else 0


Bind = Callable[[Work, Weights, Site], Run]
"""`bind(work, weights, site)` returns what adds the site's adapters to its output, each time it is called."""


@dataclass(frozen=True)
class System:
    """A way to do a layer's LoRA.

    Attributes:
        name: Of the figures.
        bind: For a site.
        is_ours: Whether it is this project's.
        roundings: How often the result may be rounded.
        is_gated: What it binds for `gate_up` returns the gated activation instead of adding to the output.
    """

    name: str
    bind: Bind
    is_ours: bool = True
    roundings: int = 2
    is_gated: bool = False


def bind_pair(work: Work, weights: Weights, site: Site, *, one_launch: bool, is_gated: bool) -> Run:
    """Our operations, as the engine calls them."""
    routing = work.one_launch if one_launch else work.routing
    x, y = work.inputs[site.name], work.outputs[site.name]
    if is_gated and site.name == "gate_up":
        return partial(sgmv_swiglu, x, weights.a_stack, weights.b_stack, y, routing, "silu", check=False)
    return partial(sgmv, x, weights.a_stack, weights.b_stack, y, routing, site.slices, check=False)


def bind_launches(work: Work, weights: Weights, site: Site, *, dependent: bool, is_gated: bool) -> Run:
    """Our two launches, with and without programmatic dependent launch."""
    routing, x, y = work.routing, work.inputs[site.name], work.outputs[site.name]
    tiles = routing.tiles
    assert tiles is not None
    step = (tiles, routing.block_m, routing.max_groups)

    def run() -> Tensor:
        planes, shrink = shrink_launch(x, weights.a_stack, *step, len(site.slices), dependent=dependent)
        shrink.run()
        if is_gated and site.name == "gate_up":
            act, launch = swiglu_launch(planes, weights.b_stack, y, *step, "silu", dependent=dependent)
            launch.run()
            return act
        expand_launch(planes, weights.b_stack, y, *step, site.slices, dependent=dependent).run()
        return y

    return run


def bind_peer(work: Work, weights: Weights, site: Site, *, peer: Peer) -> Run:
    """Another project's kernels."""
    x, y = work.inputs[site.name], work.outputs[site.name]
    return peer.bind(work.routing, x, weights.a_stack, weights.b_stack, y, site.slices)


def our_systems(can_depend: bool) -> list[System]:
    """Ours: separate or with the gate, launches that wait or overlap, two launches or one."""
    systems = [
        System("one_launch", partial(bind_pair, one_launch=True, is_gated=False)),
        System("one_launch_gated", partial(bind_pair, one_launch=True, is_gated=True), is_gated=True),
    ]
    for dependent, suffix in ((False, ""), (True, "_pdl")) if can_depend else ((False, ""),):
        for is_gated, infix in ((False, ""), (True, "_gated")):
            bind = partial(bind_launches, dependent=dependent, is_gated=is_gated)
            systems.append(System(f"two_launches{infix}{suffix}", bind, is_gated=is_gated))
    return systems


def peer_systems(peers: Sequence[Peer]) -> list[System]:
    """Theirs; they round the product before they add it."""
    return [
        System(peer.name.replace(" ", "_"), partial(bind_peer, peer=peer), is_ours=False, roundings=8) for peer in peers
    ]


def verify(work: Work, system: System) -> None:
    """Refuse a system that does not compute the LoRA product, at every site of the first layer and of the last."""
    for layer, site in itertools.product({0, len(work.layers) - 1}, work.sites):
        weights = work.layers[layer][site.name]
        x, y = work.inputs[site.name], work.outputs[site.name]
        torch.mm(x, weights.base.t(), out=y)
        expected = y.clone()
        reference.sgmv(x, weights.a_stack, weights.b_stack, expected, work.routing, site.slices)
        result = system.bind(work, weights, site)()
        what = f"{system.name} {work.point.name} {site.name}"
        if system.is_gated and site.name == "gate_up":
            expected = reference.gate(expected, "silu")
            assert isinstance(result, Tensor)
        else:
            result = y
        error = (result.float() - expected.float()).abs()
        allowed = system.roundings * torch.finfo(y.dtype).eps * expected.float().abs().clamp_min(1)
        # NaN compares as false.
        is_right = bool((error <= allowed).all())
        require(is_right, f"{what}: largest error {error.max().item():.3g}, expected {system.roundings} roundings")


def step_of(work: Work, system: System | None) -> Run:
    """A step of all layers: base products and the gate, with a system's LoRA or without any."""
    calls: list[Run] = []
    for weights, site in itertools.product(work.layers, work.sites):
        x, y = work.inputs[site.name], work.outputs[site.name]
        calls.append(partial(torch.mm, x, weights[site.name].base.t(), out=y))
        if system is not None:
            calls.append(system.bind(work, weights[site.name], site))
        if site.name == "gate_up" and not (system is not None and system.is_gated):
            calls.append(partial(gate, y))

    def run() -> None:
        for call in calls:
            call()

    return run


def marginal_us(stage: Stage, work: Work, base: Graph, system: System, repeats: int) -> float:
    """Microseconds a layer that a verified system adds."""
    graph = stage.record(step_of(work, system))
    without, with_lora = stage.times_us([base, graph], repeats)
    return (with_lora - without) / len(work.layers)


def measure(
    stage: Stage, work: Work, systems: Sequence[System], repeats: int
) -> Iterator[tuple[System, float | Exception]]:
    """Verify and time systems one by one: the time a layer, or why there is none."""
    base = stage.record(step_of(work, None))
    for system in systems:
        try:
            verify(work, system)
            yield system, marginal_us(stage, work, base, system, repeats)
        except Exception as error:
            yield system, error


def adapter_bytes(model: Model, point: Point, itemsize: int = 2) -> int:
    """Bytes of A and B that a layer must read at least: those of the adapters that rows use."""
    used = min(point.step.num_rows, point.step.num_groups)
    per_adapter = sum(len(site.slices) * site.in_features + site.out_features for site in model.layer)
    return used * per_adapter * point.rank * itemsize


def goals(point: Point) -> dict[str, float]:
    """Microseconds a layer on an H200: two launches, and one."""
    if point == Point(Step(8, 8), 16):
        return {"two_launches": 15.0, "one_launch": 10.0}
    if point == Point(Step(64, 64), 16):
        return {"two_launches": 55.0}
    return {}
