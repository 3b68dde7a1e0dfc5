"""Adapters' host memory: one piece, as large as what is taken from it."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_core.arena import HostArena, aligned_bytes
from tests.unit.adapter_folders import load

SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3, 5), torch.bfloat16),
    ((7,), torch.float32),
    ((100, 300), torch.float16),
    ((0, 4), torch.float32),
    ((1, 1), torch.float32),
]


def test_tensors_are_apart_and_aligned() -> None:
    arena = HostArena(sum(aligned_bytes(*shape) for shape in SHAPES), pin_memory=False)
    taken = [arena.take(*shape) for shape in SHAPES]
    for tensor, (shape, dtype) in zip(taken, SHAPES, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
    for value, tensor in enumerate(taken, start=1):
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(taken, start=1))
    assert arena.num_bytes == sum(-(-tensor.nbytes // 64) * 64 for tensor in taken)
    with pytest.raises(AssertionError, match="the arena is full"):
        arena.take((1,), torch.float32)


def test_memory_outlives_the_arena_and_goes_with_the_last_tensor() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    size = 2**26
    arena: HostArena | None = HostArena(size, pin_memory=False)
    assert arena is not None
    tensor: Tensor | None = arena.take((size // 4,), torch.float32)
    assert tensor is not None
    before = resident()
    tensor.fill_(1)
    assert resident() - before > size // 2
    del arena
    gc.collect()
    assert tensor.sum() == size // 4
    tensor = None
    gc.collect()
    assert abs(resident() - before) < size // 4


def test_an_adapter_is_one_piece_of_its_own_rank(tiny_adapters: dict[str, Path]) -> None:
    adapter = load(tiny_adapters["attention-r2"], max_rank=64)
    tensors = [t for name in adapter.ranks for t in adapter.module(name) or () if t is not None]
    assert {t.untyped_storage().data_ptr() for t in tensors} == {tensors[0].untyped_storage().data_ptr()}
    assert tensors[0].untyped_storage().nbytes() == adapter.num_bytes
    rank, layers = 2, 2
    widths = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
    assert adapter.num_bytes == layers * sum(4 * rank * (out + width) for out, width in widths.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locks memory for a GPU")
def test_pinned(tiny_adapters: dict[str, Path]) -> None:
    adapter = load(tiny_adapters["attention-r2"], pin_memory=True)
    assert all(t.is_pinned() for name in adapter.ranks for t in adapter.module(name) or () if t is not None)
