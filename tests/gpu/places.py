"""Where a tile size matters: a site at a step and a rank, its launches, and what they are measured on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import Routing
from kernels.launch import Launch
from kernels.sgmv_launch import expand_launch, shrink_launch, swiglu_launch
from kernels.tuning import (
    StepShape,
    device_name,
    expand_tile,
    meta_device,
    num_tiles,
    shrink_tile,
    swiglu_tile,
)
from kernels.tuning_table import CHOICES, Entry, Point, power_of_two, step_point, table_of, trial
from tests.gpu.marginal import Point as TimedPoint
from tests.gpu.marginal import even_routing
from tests.gpu.stage import Stage
from tests.kernels.sites import Site, Step

_MAX_COPIES = 256

Tile = dict[str, int]
Entries = dict[Point, Entry]


@dataclass(frozen=True)
class Place:
    """A site at a step and a rank, whose second half is the plain expand or the gated one."""

    site: Site
    step: Step
    rank: int
    is_gated: bool
    dtype: torch.dtype = torch.bfloat16

    @property
    def timed(self) -> TimedPoint:
        """As it is timed elsewhere."""
        return TimedPoint(self.step, self.rank)

    def points(self, block_m: int) -> tuple[Point, Point]:
        """Where the table has the choices for its two halves."""
        rows, slots = self.step.num_rows, self.timed.num_slots
        shared = {"block_m": block_m, "itemsize": self.dtype.itemsize, "rank": power_of_two(self.rank)}
        shrink = step_point(
            "shrink", rows, slots, projections=len(self.site.slices), width=self.site.in_features, **shared
        )
        kernel, width = ("swiglu", self.site.slices[0]) if self.is_gated else ("expand", self.site.out_features)
        return shrink, step_point(kernel, rows, slots, width=width, **shared)

    @property
    def launch_point(self) -> Point:
        """Where the table has whether its second launch may start early."""
        return step_point("launch", self.step.num_rows, self.timed.num_slots)

    def is_dependent(self, device: str) -> bool:
        """Whether its second launch may start early, by the table that holds now."""
        found = table_of(device).find(self.launch_point)
        return found is not None and bool(found["dependent"])

    def tiles(self, device: str, block_m: int) -> tuple[Tile, Tile]:
        """The choices that hold for its two halves, as the table would write them."""
        step = StepShape(device, self.step.num_rows, self.timed.num_slots, block_m)
        size, site = self.dtype.itemsize, self.site
        shrink = shrink_tile(step, self.rank, len(site.slices), site.in_features, size)
        if self.is_gated:
            second = swiglu_tile(step, self.rank, site.slices[0], size)
        else:
            second = expand_tile(step, self.rank, site.out_features, size)
        first_point, second_point = self.points(block_m)
        return _parts(first_point, shrink._asdict()), _parts(second_point, second._asdict())


def _parts(point: Point, tile: Tile) -> Tile:
    """What the table holds of a tile."""
    return {name: value for name, value in tile.items() if name in CHOICES[point.kernel]}


def places(sites: Sequence[Site], step: Step, rank: int) -> list[Place]:
    """A layer's sites: gate and up as the gated activation has them."""
    return [Place(site, step, rank, is_gated=site.name == "gate_up") for site in sites]


def candidates(point: Point, default: Tile, in_features: int) -> list[Tile]:
    """Tiles that differ from the default in one part, the default first."""
    widest = max(16, power_of_two(point.rank * max(1, point.projections)))
    found = [default]
    for name, values in CHOICES[point.kernel].items():
        for value in values:
            tile = {**default, name: value}
            if value == default[name] or (name == "num_stages" and value not in (2, 3, 4)):
                continue
            if point.kernel == "shrink" and not _is_sensible(tile, widest, in_features, default):
                continue
            found.append(tile)
    return found


def _is_sensible(tile: Tile, widest: int, in_features: int, default: Tile) -> bool:
    """Whether a shrink's tile wastes nothing outright: columns of nothing, splits of nothing, loads of few bytes."""
    return (
        tile["block_n"] <= widest
        and (tile["block_k"] * tile["splits"] <= in_features or tile == default)
        and (tile["block_k"] >= 64 or tile["block_k"] == default["block_k"])
    )


def combined(times: Sequence[tuple[Tile, float]]) -> Tile:
    """The best value of each part, of tiles that differ from the first in one."""
    default, default_us = times[0]
    best = dict(default)
    for name in default:
        of_part = [(us, tile[name]) for tile, us in times[1:] if tile[name] != default[name]]
        us, value = min(of_part, default=(default_us, default[name]))
        if us < default_us:
            best[name] = value
    return best


@dataclass(frozen=True)
class Weights:
    """What a place is measured on: as many pairs of stacks as no cache holds, and one x and y."""

    x: Tensor
    y: Tensor
    stacks: list[tuple[Tensor, Tensor]]
    routing: Routing

    @staticmethod
    def make(stage: Stage, place: Place, block_m: int, cold_bytes: int) -> "Weights":
        """Random values of a scale that neither vanishes nor grows."""
        generator = torch.Generator(stage.device).manual_seed(place.rank)
        site, slots, rank = place.site, place.timed.num_slots, place.rank

        def random(*shape: int, scale: float) -> Tensor:
            values = torch.randn(shape, generator=generator, device=stage.device, dtype=place.dtype)
            return values.mul_(scale)

        per_adapter = (len(site.slices) * site.in_features + site.out_features) * rank * place.dtype.itemsize
        used = per_adapter * min(place.step)
        copies = max(1, min(_MAX_COPIES, -(-cold_bytes // used)))
        stacks = [
            (
                random(slots, len(site.slices) * rank, site.in_features, scale=site.in_features**-0.5),
                random(slots, site.out_features, rank, scale=rank**-0.5),
            )
            for _ in range(copies)
        ]
        rows = place.step.num_rows
        routing = even_routing(place.timed, stage.device, one_launch=False, block_m=block_m)
        return Weights(
            random(rows, site.in_features, scale=1), random(rows, site.out_features, scale=1), stacks, routing
        )


def launches(
    place: Place, x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, tiles: Tensor, block_m: int
) -> tuple[Launch, Launch, Tensor]:
    """The two launches of a place with the choices that hold now, and where their result goes."""
    slots, site = place.timed.num_slots, place.site
    dependent = place.is_dependent(device_name(x.device))
    planes, shrink = shrink_launch(x, a_stack, tiles, block_m, slots, len(site.slices), dependent=dependent)
    if place.is_gated:
        act, second = swiglu_launch(planes, b_stack, y, tiles, block_m, slots, "silu", dependent=dependent)
        return shrink, second, act
    return shrink, expand_launch(planes, b_stack, y, tiles, block_m, slots, site.slices, dependent=dependent), y


def compile_place(device: str, place: Place, block_m: int, entries: Entries) -> None:
    """Compile a place's launches into the compiler's cache, from tensors without memory."""
    with torch.device("meta"):
        site, slots, rows = place.site, place.timed.num_slots, place.step.num_rows
        x, y = (torch.empty(rows, width, dtype=place.dtype) for width in (site.in_features, site.out_features))
        a_stack = torch.empty(slots, len(site.slices) * place.rank, site.in_features, dtype=place.dtype)
        b_stack = torch.empty(slots, site.out_features, place.rank, dtype=place.dtype)
        tiles = torch.empty(num_tiles(rows, slots, block_m), 4, dtype=torch.int32)
        with meta_device(device), trial(device, entries):
            shrink, second, _ = launches(place, x, a_stack, b_stack, y, tiles, block_m)
    for launch in (shrink, second):
        launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.options)


def launch_sizes(launch: Launch) -> Mapping[str, Any]:
    """A launch's compile-time sizes."""
    return {
        name: value for name, value in launch.constants.items() if "BLOCK" in name or name in ("SPLITS", "num_warps")
    }
