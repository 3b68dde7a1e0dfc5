"""Tile sizes of the Triton kernels.

Everything is chosen from shapes alone, never from which adapters are present, so that a captured graph has exactly
one choice and no step waits for the device. The figures come from compiled code (registers, shared memory, programs
per multiprocessor) and from published tables for Hopper.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch

_TARGET_PROGRAMS = 264
"""Programs that fill the device: two for each of the 132 multiprocessors of an H100 or H200."""

_MANY_PROGRAMS = 2 * _TARGET_PROGRAMS

_MAX_SPLITS = 16

_SMALLEST_ROW_TILE = 16 if torch.version.hip else 8
"""On AMD a product of fewer than 16 rows leaves the matrix units."""


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


@cache
def device_name(device: torch.device) -> str:
    """What the tuning table calls a device: the name its driver gives it, or its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def row_tile(num_rows: int, max_groups: int) -> int:
    """Rows one tile of the tile table covers: 8 while groups are about one row, 16 for a batch, 64 for a prefill."""
    if num_rows <= 2 * max_groups:
        return _SMALLEST_ROW_TILE
    return 16 if num_rows <= 1024 else 64


@lru_cache(maxsize=1024)
def shrink_tile(step: StepShape, rank: int, projections: int, in_features: int, itemsize: int) -> ShrinkTile:
    """Sizes for the row tiles of x `[*, in_features]` against A of `projections` times `rank` rows.

    K is split until the programs fill the device, and no further than one product each.
    """
    block_n = min(_power_of_two(rank), 64)
    if step.block_m >= 64:
        block_n = min(_power_of_two(rank * projections), 64)
    block_n = max(block_n, 16)
    block_k = 256 if step.block_m < 64 and block_n < 64 else 128
    block_k = max(16, min(block_k * 2 // itemsize, _power_of_two(in_features)))
    column_tiles = -(-rank * projections // block_n)
    splits = 1
    while (
        splits < _MAX_SPLITS
        and step.num_tiles * column_tiles * splits < _TARGET_PROGRAMS
        and block_k * splits * 2 <= in_features
    ):
        splits *= 2
    return ShrinkTile(block_n, block_k, splits, num_warps=4, num_stages=3)


@lru_cache(maxsize=1024)
def expand_tile(step: StepShape, rank: int, out_features: int, itemsize: int) -> ExpandTile:
    """Sizes for the row tiles of y `[*, out_features]`: narrow columns while programs are few."""
    block_r = rank_block(rank)
    if itemsize > 2:
        # No matrix unit multiplies exact fp32: each thread holds its sums, and more than 8 of them spill.
        return ExpandTile(32, block_r, num_warps=8 if step.block_m >= 64 else 4)
    if step.block_m >= 64:
        # From rank 128 on, four warps would not hold v: it spills.
        return ExpandTile(128 if block_r <= 32 else 64, block_r, num_warps=8 if block_r >= 128 else 4)
    block_n = 64
    while (
        block_n < 256 and block_n * block_r <= 4096 and step.num_tiles * out_features // (2 * block_n) >= _MANY_PROGRAMS
    ):
        block_n *= 2
    return ExpandTile(block_n, block_r, num_warps=4)


def rank_block(rank: int) -> int:
    """Columns of a block that holds a whole rank: what a matrix unit takes at least."""
    return max(16, _power_of_two(rank))


def gather_warps(block_m: int, rank: int) -> int:
    """Warps that copy a tile's rows of A: few, so that a thread has 4 values or more."""
    return min(4, max(1, block_m * rank_block(rank) // 512))


def scale_tile(block_m: int) -> ScaleTile:
    """Sizes for row tiles of y: warps so few that a thread has 4 columns or more, also of the bias."""
    if block_m >= 64:
        return ScaleTile(128, num_warps=8)
    return ScaleTile(256, num_warps=1 if block_m <= 8 else 2)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
