"""Tile sizes of the Triton kernels.

Everything is chosen from shapes and the device's name, never from which adapters are present, so that a captured graph
has exactly one choice and no step waits for the device. What was measured on the device (`kernels.tuning_table`) comes
first. The defaults come from compiled code (registers, shared memory, programs per multiprocessor) and from published
tables for Hopper.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from kernels.support import can_launch_dependently
from kernels.tuning_table import Point, TuningTable, power_of_two, step_point, table_of

_TARGET_PROGRAMS = 264
"""Programs that fill the device: two for each of the 132 multiprocessors of an H100 or H200."""

_MANY_PROGRAMS = 2 * _TARGET_PROGRAMS

_MAX_SPLITS = 16

_META_DEVICE = ContextVar("name of the device that tensors without memory are on", default="meta")


class ShrinkTile(NamedTuple):
    """How the shrink kernel cuts x @ A.T: columns of A and depth of one product, splits of K, and launch options."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


class ExpandTile(NamedTuple):
    """How the expand kernel cuts v @ B.T: columns of one program, padded rank, and launch options."""

    block_n: int
    block_r: int
    num_warps: int


class ScaleTile(NamedTuple):
    """How the scale kernel cuts y: columns of one program, and launch options."""

    block_n: int
    num_warps: int


class StepShape(NamedTuple):
    """What tile sizes may depend on of a step: all of it known from shapes, and equal in every layer.

    Attributes:
        device: Name of the device, as `device_name` gives it.
        num_rows: Rows of the step, base rows included.
        max_groups: Most groups a step can have.
        block_m: Rows a tile of the tile table covers.
    """

    device: str
    num_rows: int
    max_groups: int
    block_m: int

    @property
    def num_tiles(self) -> int:
        """Length of the tile table."""
        return num_tiles(self.num_rows, self.max_groups, self.block_m)


def num_tiles(num_rows: int, max_groups: int, block_m: int) -> int:
    """Most tiles of `block_m` rows that any routing of `num_rows` rows over `max_groups` groups and base rows needs.

    Every group, and the base rows, may end in a partial tile, so the worst case is one row in each of them and the
    rest in whole tiles.
    """
    parts = min(num_rows, max_groups + 1)
    return parts + (num_rows - parts) // block_m


def device_name(device: torch.device) -> str:
    """What the tuning table calls a device: the name its driver gives it, or its type."""
    return _META_DEVICE.get() if device.type == "meta" else _driver_name(device)


@cache
def _driver_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextmanager
def meta_device(name: str) -> Iterator[None]:
    """Inside it tensors without memory (`device="meta"`) are taken to be on a device of this name.

    Launches described with them are those of that device, which need not be here.
    """
    token = _META_DEVICE.set(name)
    try:
        yield
    finally:
        _META_DEVICE.reset(token)


def row_tile(num_rows: int, max_groups: int, device: str | None = None) -> int:
    """Rows one tile of the tile table covers, in every layer; the default where no `device` is named."""
    found = None if device is None else _step_choice(table_of(device), "rows", num_rows, max_groups)
    return _default_row_tile(num_rows, max_groups, device) if found is None else found["block_m"]


def shrink_tile(step: StepShape, rank: int, projections: int, in_features: int, itemsize: int) -> ShrinkTile:
    """Sizes for the row tiles of x `[*, in_features]` against A of `projections` times `rank` rows."""
    return _shrink_tile(table_of(step.device), step, rank, projections, in_features, itemsize)


def expand_tile(step: StepShape, rank: int, out_features: int, itemsize: int) -> ExpandTile:
    """Sizes for the row tiles of y `[*, out_features]`."""
    return _expand_tile(table_of(step.device), step, rank, out_features, itemsize)


def swiglu_tile(step: StepShape, rank: int, width: int, itemsize: int) -> ExpandTile:
    """Sizes for the row tiles of a gated activation `[*, width]`."""
    return _swiglu_tile(table_of(step.device), step, rank, width, itemsize)


def launches_dependently(device: torch.device, num_rows: int, max_groups: int) -> bool:
    """Whether an operation's second launch may start before its first has ended; not where it was not measured."""
    if not can_launch_dependently(device):
        return False
    found = _step_choice(table_of(device_name(device)), "launch", num_rows, max_groups)
    return found is not None and bool(found["dependent"])


@lru_cache(maxsize=1024)
def _step_choice(table: TuningTable, kernel: str, num_rows: int, max_groups: int) -> Mapping[str, int] | None:
    return table.find(step_point(kernel, num_rows, max_groups))


@lru_cache(maxsize=1024)
def _shrink_tile(
    table: TuningTable, step: StepShape, rank: int, projections: int, in_features: int, itemsize: int
) -> ShrinkTile:
    point = step_point(
        "shrink",
        step.num_rows,
        step.max_groups,
        block_m=step.block_m,
        itemsize=itemsize,
        rank=power_of_two(rank),
        projections=projections,
        width=in_features,
    )
    found = table.find(point)
    if found is None:
        return _default_shrink_tile(step, rank, projections, in_features, itemsize)
    return ShrinkTile(**found)


@lru_cache(maxsize=1024)
def _expand_tile(table: TuningTable, step: StepShape, rank: int, out_features: int, itemsize: int) -> ExpandTile:
    found = table.find(_expand_point("expand", step, rank, out_features, itemsize))
    if found is None:
        return _default_expand_tile(step, rank, out_features, itemsize)
    return ExpandTile(block_r=rank_block(rank), **found)


@lru_cache(maxsize=1024)
def _swiglu_tile(table: TuningTable, step: StepShape, rank: int, width: int, itemsize: int) -> ExpandTile:
    found = table.find(_expand_point("swiglu", step, rank, width, itemsize))
    if found is None:
        return _default_swiglu_tile(step, rank, width, itemsize)
    return ExpandTile(block_r=rank_block(rank), **found)


def _expand_point(kernel: str, step: StepShape, rank: int, width: int, itemsize: int) -> Point:
    return step_point(
        kernel,
        step.num_rows,
        step.max_groups,
        block_m=step.block_m,
        itemsize=itemsize,
        rank=power_of_two(rank),
        width=width,
    )


def _default_row_tile(num_rows: int, max_groups: int, device: str | None) -> int:
    """8 while groups are about one row, 16 for a batch, 64 for a prefill."""
    if num_rows <= 2 * max_groups:
        # On AMD a product of fewer than 16 rows leaves the matrix units.
        return 16 if _is_amd(device or "") else 8
    return 16 if num_rows <= 1024 else 64


def _default_shrink_tile(step: StepShape, rank: int, projections: int, in_features: int, itemsize: int) -> ShrinkTile:
    """K is split until the programs fill the device, and no further than one product each."""
    block_n = min(power_of_two(rank), 64)
    if step.block_m >= 64:
        block_n = min(power_of_two(rank * projections), 64)
    block_n = max(block_n, 16)
    block_k = 256 if step.block_m < 64 and block_n < 64 else 128
    block_k = max(16, min(block_k * 2 // itemsize, power_of_two(in_features)))
    column_tiles = -(-rank * projections // block_n)
    splits = 1
    while (
        splits < _MAX_SPLITS
        and step.num_tiles * column_tiles * splits < _TARGET_PROGRAMS
        and block_k * splits * 2 <= in_features
    ):
        splits *= 2
    # Masks of K take registers.
    is_ragged = in_features % (block_k * splits) != 0
    num_warps = 8 if step.block_m >= 64 and is_ragged else 4
    # An AMD compute unit has a quarter of the shared memory: a third stage would leave room for one program.
    return ShrinkTile(block_n, block_k, splits, num_warps, num_stages=2 if _is_amd(step.device) else 3)


def _default_expand_tile(step: StepShape, rank: int, out_features: int, itemsize: int) -> ExpandTile:
    """Narrow columns while programs are few."""
    block_r = rank_block(rank)
    if itemsize > 2:
        # No matrix unit multiplies exact fp32: each thread holds its sums, and more than 8 of them spill.
        num_warps = 8 if step.block_m >= 64 else _expand_warps(step, 32, itemsize)
        return ExpandTile(32, block_r, num_warps)
    if step.block_m >= 64:
        # Of rank 128 four warps would not hold v: it spills. A larger rank is multiplied in parts.
        return ExpandTile(128 if block_r <= 32 else 64, block_r, num_warps=8 if block_r == 128 else 4)
    block_n = 64
    while (
        block_n < 256 and block_n * block_r <= 4096 and step.num_tiles * out_features // (2 * block_n) >= _MANY_PROGRAMS
    ):
        block_n *= 2
    return ExpandTile(block_n, block_r, _expand_warps(step, block_n, itemsize) if block_n * block_r <= 2048 else 4)


def _default_swiglu_tile(step: StepShape, rank: int, width: int, itemsize: int) -> ExpandTile:
    """Half an expand's columns, for it has two products."""
    tile = _default_expand_tile(step, rank, 2 * width, itemsize)
    block_n = max(16, tile.block_n // 2)
    if step.block_m < 64 and block_n * tile.block_r <= 2048:
        return ExpandTile(block_n, tile.block_r, _expand_warps(step, block_n, itemsize))
    return tile._replace(block_n=block_n)


def _expand_warps(step: StepShape, block_n: int, itemsize: int) -> int:
    """So few, of a small tile, that each thread accesses 16 bytes of y."""
    lanes = 64 if _is_amd(step.device) else 32
    return max(1, min(4, step.block_m * block_n * itemsize // (16 * lanes)))


def _is_amd(device: str) -> bool:
    return bool(torch.version.hip) or device.startswith("AMD")


def rank_block(rank: int) -> int:
    """Columns of a block that holds a whole rank: what a matrix unit takes at least."""
    return max(16, power_of_two(rank))


def gather_warps(block_m: int, rank: int) -> int:
    """Warps that copy a tile's rows of A: few, so that a thread has 4 values or more."""
    return min(4, max(1, block_m * rank_block(rank) // 512))


def scale_tile(block_m: int) -> ScaleTile:
    """Sizes for row tiles of y: warps so few that a thread has 4 columns or more, also of the bias."""
    if block_m >= 64:
        return ScaleTile(128, num_warps=8)
    return ScaleTile(256, num_warps=1 if block_m <= 8 else 2)
