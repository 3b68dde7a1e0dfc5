"""Launches to judge: those of an op at a model's site and a step's shapes."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.launch import Launch
from kernels.sgmv_launch import (
    expand_launch,
    gather_launch,
    pair_launch,
    scale_launch,
    shrink_launch,
    swiglu_launch,
    swiglu_pair_launch,
)
from kernels.tuning import device_name, num_tiles, row_tile
from tests.kernels.sites import Model, Site, Step

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_META = torch.device("meta")


@dataclass(frozen=True)
class Configuration:
    """One launch to judge.

    Attributes:
        kernel: What it does, in a word.
        shape: Where and at what shapes.
        launch: The launch.
        has_product: Whether matrix instructions are expected of it: exact fp32 products have none.
        has_wide_rows: Whether its rows are long enough for 128-bit loads.
    """

    kernel: str
    shape: str
    launch: Launch
    has_product: bool = True
    has_wide_rows: bool = True

    @property
    def identity(self) -> Hashable:
        """Equal for launches that run the same machine code."""
        return self.launch.variant


class StepTensors:
    """A step's tensors, without memory, as the launch functions take them on the device that `meta_device` names."""

    def __init__(self, step: Step, rank: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.step, self.rank, self.dtype = step, rank, dtype
        self.block_m = row_tile(step.num_rows, step.num_groups, device_name(_META))
        length = num_tiles(step.num_rows, step.num_groups, self.block_m)
        self.tiles = self.empty(length, 4, dtype=torch.int32)
        self.counters = self.empty(length + 1, dtype=torch.int32)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the step's dtype unless another is named."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=_META)

    def rows(self, width: int) -> Tensor:
        """The step's rows of some activation `[T, width]`."""
        return self.empty(self.step.num_rows, width)

    def a_stack(self, site: Site) -> Tensor:
        """`[slots, S*R, K]`."""
        return self.empty(self.step.num_groups, len(site.slices) * self.rank, site.in_features)

    def b_stack(self, site: Site) -> Tensor:
        """`[slots, OUT, R]`."""
        return self.empty(self.step.num_groups, site.out_features, self.rank)

    @property
    def table(self) -> tuple[Tensor, int, int]:
        """The tile table, rows of a tile, and most groups."""
        return self.tiles, self.block_m, self.step.num_groups

    def configuration(self, kernel: str, site: Site, launch: Launch) -> Configuration:
        """A launch of products at a site."""
        return Configuration(kernel, self.describe(site.model, site.name), launch, self.dtype != torch.float32)

    def describe(self, model: str, place: str) -> str:
        """Where and at what shapes, for a table."""
        return f"{model} {place} {_NAMES[self.dtype]} r={self.rank} {self.step}"


def two_launches(site: Site, tensors: StepTensors, *, dependent: bool = False) -> Iterator[Configuration]:
    """Shrink and expand at a site; `dependent`: each starts before what precedes it has ended."""
    suffix = "+pdl" if dependent else ""
    planes, shrink = shrink_launch(
        tensors.rows(site.in_features), tensors.a_stack(site), *tensors.table, len(site.slices), dependent=dependent
    )
    yield tensors.configuration(f"shrink{suffix}", site, shrink)
    expand = expand_launch(
        planes,
        tensors.b_stack(site),
        tensors.rows(site.out_features),
        *tensors.table,
        site.slices,
        dependent=dependent,
    )
    yield tensors.configuration(f"expand{suffix}", site, expand)


def two_launches_with_activation(
    site: Site, tensors: StepTensors, *, dependent: bool = False
) -> Iterator[Configuration]:
    """Shrink, and expand with the gated activation, at a gate-and-up site."""
    suffix = "+pdl" if dependent else ""
    planes, shrink = shrink_launch(
        tensors.rows(site.in_features), tensors.a_stack(site), *tensors.table, 2, dependent=dependent
    )
    yield tensors.configuration(f"shrink{suffix}", site, shrink)
    _, swiglu = swiglu_launch(
        planes,
        tensors.b_stack(site),
        tensors.rows(site.out_features),
        *tensors.table,
        "silu",
        dependent=dependent,
    )
    yield tensors.configuration(f"swiglu{suffix}", site, swiglu)


def one_launch(site: Site, tensors: StepTensors) -> Configuration:
    """Shrink and expand in one launch."""
    launch = pair_launch(
        tensors.rows(site.in_features),
        tensors.a_stack(site),
        tensors.b_stack(site),
        tensors.rows(site.out_features),
        tensors.tiles,
        tensors.counters,
        *tensors.table[1:],
        site.slices,
    )
    return tensors.configuration("pair", site, launch)


def one_launch_with_activation(site: Site, tensors: StepTensors) -> Configuration:
    """Shrink, expand and the gated activation in one launch."""
    _, launch = swiglu_pair_launch(
        tensors.rows(site.in_features),
        tensors.a_stack(site),
        tensors.b_stack(site),
        tensors.rows(site.out_features),
        tensors.tiles,
        tensors.counters,
        *tensors.table[1:],
        "silu",
    )
    return tensors.configuration("swiglu pair", site, launch)


def embedding(model: Model, tensors: StepTensors) -> Iterator[Configuration]:
    """The gather of an adapted embedding and the expand after it."""
    shape = tensors.describe(model.name, "embedding")
    ids = tensors.empty(tensors.step.num_rows, dtype=torch.int64)
    a_stack = tensors.empty(tensors.step.num_groups, model.vocabulary, tensors.rank)
    planes, gather = gather_launch(ids, a_stack, tensors.tiles, tensors.block_m)
    # A row of A is as short as its rank.
    yield Configuration("gather", shape, gather, has_product=False, has_wide_rows=False)
    b_stack = tensors.empty(tensors.step.num_groups, model.hidden, tensors.rank)
    expand = expand_launch(planes, b_stack, tensors.rows(model.hidden), *tensors.table, [model.hidden])
    yield Configuration("expand", shape, expand)


def gains(site: Site, tensors: StepTensors) -> Iterator[Configuration]:
    """DoRA's scale of a site's output, without and with the base layer's bias."""
    shape = tensors.describe(site.model, site.name)
    gain_stack = tensors.empty(tensors.step.num_groups, site.out_features, dtype=torch.float32)
    for kernel, bias in (("scale", None), ("scale+bias", tensors.empty(site.out_features))):
        launch = scale_launch(tensors.rows(site.out_features), gain_stack, bias, tensors.tiles, tensors.block_m)
        yield Configuration(kernel, shape, launch, has_product=False)
