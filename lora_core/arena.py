"""One piece of host memory for all tensors of an adapter."""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_ALIGNMENT = 64


class HostArena:
    """A single allocation that tensors are taken from; freed when the last of them is.

    Attributes:
        num_bytes: Its size.
    """

    def __init__(self, num_bytes: int, *, pin_memory: bool) -> None:
        """Allocate.

        Args:
            num_bytes: What the tensors take, by `aligned_bytes`.
            pin_memory: Page-lock the memory, so that a GPU copies from it without staging; needs CUDA.
        """
        self.num_bytes = num_bytes
        if pin_memory:
            self._content = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            self._content = _huge_pages(num_bytes)
        self._num_taken = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor, contiguous, at a multiple of 64 bytes; its values are unspecified."""
        start = self._num_taken
        num_bytes = math.prod(shape) * dtype.itemsize
        self._num_taken += aligned_bytes(shape, dtype)
        assert self._num_taken <= self.num_bytes, "the arena is full"
        return self._content[start : start + num_bytes].view(dtype).view(shape)


def aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What a tensor takes of an arena."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _huge_pages(num_bytes: int) -> Tensor:
    """Memory, in pages of 2 MiB where the system has them: small ones take longer to get than to fill."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping, which goes with the last view of it.
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
