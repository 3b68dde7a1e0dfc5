"""The sizes of steps that graphs are captured for, and the one that a step is padded to."""

from bisect import bisect_left
from collections.abc import Sequence

LEAST_CONTEXT, CONTEXT_FACTOR = 4096, 4
"""Tokens that the first context size holds, and how much more the next one does: what attention is cut into depends on
the longest sequence that a graph provides for, and up to 4096 tokens only on the device."""


def row_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then powers of two and what lies half way between them, up to `most`, which is the last.

    A padded row costs little where a step waits for weights to be read, a graph costs time at start and memory.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(power * 3 // 2 if sizes[-1] == power and power >= 16 else power * 2)
    return (*(size for size in sizes if size < most), most)


def block_buckets(max_model_len: int, block_size: int) -> tuple[int, ...]:
    """Blocks of the longest sequence, in few steps from those of 4096 tokens to those of `max_model_len`."""
    sizes = []
    tokens = LEAST_CONTEXT
    while tokens < max_model_len:
        sizes.append(-(-tokens // block_size))
        tokens *= CONTEXT_FACTOR
    return tuple(dict.fromkeys((*sizes, -(-max_model_len // block_size))))


def smallest(buckets: Sequence[int], number: int) -> int | None:
    """The smallest bucket that holds a number; None if none does.

    Args:
        buckets: Ascending.
        number: Rows, or blocks.
    """
    place = bisect_left(buckets, number)
    return buckets[place] if place < len(buckets) else None
