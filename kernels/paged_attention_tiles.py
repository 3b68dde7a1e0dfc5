"""How the paged attention kernels cut their work: chosen from shapes alone, as in `kernels.tuning`."""

from functools import lru_cache
from typing import NamedTuple

import torch

_TARGET_PROGRAMS = 264
"""Programs that fill the device: two for each of the 132 multiprocessors of an H100 or H200."""

_MAX_SPLITS = 64

_SPLIT_TOKENS = 4096
"""More tokens than these are split also where there are programs enough: the longest sequence would end last."""

_MIN_SPLIT_TOKENS = 128
"""Fewer tokens than these are not split: reading them takes no longer than adding up what comes of them."""

_BLOCK_BYTES = 16384
"""Of keys (and again of values) that a program works on at a time."""


class PagedLayout(NamedTuple):
    """What paged attention must know of a model and its KV cache.

    Attributes:
        num_heads: Query heads, a multiple of `num_kv_heads`.
        num_kv_heads: Heads of the cache.
        head_dim: Length of a head.
        block_size: Tokens in a block of the cache.
        num_blocks: Blocks of the cache.
        dtype: Of queries, keys and values.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cache_shape(self) -> tuple[int, int, int, int, int]:
        """`[2, num_blocks, num_kv_heads, block_size, head_dim]`, keys first."""
        return (2, self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim)


class DecodeTile(NamedTuple):
    """How the decode kernel cuts a past: rows of its products, tokens of one, splits, the fewest blocks of `block_n`
    tokens of a split, and launch options."""

    block_m: int
    block_n: int
    block_d: int
    splits: int
    min_blocks: int
    num_warps: int
    num_stages: int


class PrefillTile(NamedTuple):
    """How the prefill kernel cuts queries and their past: rows (tokens times heads) and tokens of a product, and launch
    options."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


@lru_cache(maxsize=1024)
def decode_tile(layout: PagedLayout, num_slots: int, max_blocks: int, window: int | None) -> DecodeTile:
    """Sizes for `num_slots` rows of up to `max_blocks` blocks each."""
    block_d = head_block(layout.head_dim)
    block_m = max(16, _power_of_two(layout.group))
    block_n = max(16, min(128, _BLOCK_BYTES // (block_d * layout.dtype.itemsize)))
    if block_m > 16:
        block_n = min(block_n, _most_tokens(layout))
    tokens = max_blocks * layout.block_size
    if window is not None:
        tokens = min(tokens, window + block_n)
    wanted = max(-(-_TARGET_PROGRAMS // max(1, num_slots * layout.num_kv_heads)), -(-tokens // _SPLIT_TOKENS))
    splits = max(1, min(wanted, -(-tokens // _MIN_SPLIT_TOKENS), _MAX_SPLITS))
    return DecodeTile(
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        splits=splits,
        min_blocks=_MIN_SPLIT_TOKENS // block_n,
        num_warps=_num_warps(layout, block_m),
        # From 64 rows on Hopper multiplies otherwise: see `prefill_tile`.
        num_stages=3 if block_m < 64 else 1,
    )


@lru_cache(maxsize=1024)
def prefill_tile(layout: PagedLayout) -> PrefillTile:
    """Sizes for query tiles. The table of a step is cut by them, so they depend on nothing that differs by layer."""
    block_m = max(16 if layout.dtype.itemsize > 2 else 64, _power_of_two(layout.group))
    # Weights are in registers when they meet the values, and assemblers before CUDA 13.3 miscompile that in a pipelined
    # loop on Hopper. Programs that share a multiprocessor hide each other's loads instead.
    return PrefillTile(
        block_m, _most_tokens(layout), head_block(layout.head_dim), _num_warps(layout, block_m), num_stages=1
    )


def tokens_per_tile(layout: PagedLayout) -> int:
    """Tokens one tile of a step's table of query tiles has at most."""
    return prefill_tile(layout).block_m // layout.group


def head_block(head_dim: int) -> int:
    """Columns of a block that holds a whole head: what a matrix unit takes at least."""
    return max(16, _power_of_two(head_dim))


def _most_tokens(layout: PagedLayout) -> int:
    """Tokens of a product beyond which registers spill."""
    if layout.dtype.itemsize > 2:
        return 16
    return 64 if layout.head_dim <= 128 else 32


def _num_warps(layout: PagedLayout, block_m: int) -> int:
    """So many that a thread has no more of the running sum than its registers hold beside the product's two sides.

    No matrix unit multiplies exact fp32: there a thread holds parts of those, too.
    """
    thread_sums = 16 if layout.dtype.itemsize > 2 else 64
    return min(16, max(4, block_m * head_block(layout.head_dim) // (32 * thread_sums)))


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
