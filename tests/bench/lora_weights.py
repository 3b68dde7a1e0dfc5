"""Adapter weights of a model's layers, as the product keeps them and as its peers want them."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Site(NamedTuple):
    """A linear layer of the model, and what is fused in it.

    Attributes:
        name: What it is called.
        in_features: Width of its input, K.
        slices: Output widths of its S projections; they add up to OUT.
    """

    name: str
    in_features: int
    slices: tuple[int, ...]


SMOLLM2_SITES = (
    Site("qkv", 576, (576, 192, 192)),
    Site("o", 576, (576,)),
    Site("gate_up", 576, (1536, 1536)),
    Site("down", 1536, (576,)),
)
SMOLLM2_LAYERS = 30


class Stacks(NamedTuple):
    """The adapters of one site: A `[N, S*R, K]` and B `[N, OUT, R]`, in one data type."""

    a: Tensor
    b: Tensor


class Weights:
    """Stacks of several layers, each in memory of its own.

    All layers hold the same random numbers, exact in bf16, so that one reference serves them all and filling is fast.

    Attributes:
        sites: The layer's sites.
        rank: Padded rank of the slots, R.
        slot_ranks: True rank of each slot.
        num_layers: Layers in memory of their own.
    """

    def __init__(self, sites: Sequence[Site], rank: int, slot_ranks: Sequence[int], num_layers: int) -> None:
        self.sites, self.rank, self.slot_ranks, self.num_layers = tuple(sites), rank, tuple(slot_ranks), num_layers
        generator = torch.Generator().manual_seed(rank * len(slot_ranks))
        first = [_random_stacks(site, rank, self.slot_ranks, generator) for site in self.sites]
        # As the product's stacks: made outside of inference mode, in which they could not be written to.
        with torch.inference_mode(False):
            self.fp32 = [[Stacks(a.clone(), b.clone()) for a, b in first] for _ in range(num_layers)]
        """By layer and site."""

    @cached_property
    def bf16(self) -> list[list[Stacks]]:
        """The same numbers in bf16."""
        with torch.inference_mode(False):
            return [[Stacks(a.bfloat16(), b.bfloat16()) for a, b in layer] for layer in self.fp32]

    def in_dtype(self, dtype: torch.dtype) -> list[list[Stacks]]:
        """By layer and site, in fp32 or bf16."""
        return self.fp32 if dtype == torch.float32 else self.bf16

    @cached_property
    def diagonal_fp32(self) -> list[list[Tensor]]:
        """By layer and site, B as one block-diagonal matrix `[N, OUT, S*R]`: a single product for all projections."""
        return [
            [_diagonal(stacks.b, site.slices) for stacks, site in zip(layer, self.sites, strict=True)]
            for layer in self.fp32
        ]

    @cached_property
    def diagonal_bf16(self) -> list[list[Tensor]]:
        """The same in bf16."""
        return [[b.bfloat16() for b in layer] for layer in self.diagonal_fp32]

    def diagonal(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """By layer and site, in fp32 or bf16."""
        return self.diagonal_fp32 if dtype == torch.float32 else self.diagonal_bf16

    def num_live(self, slots: Sequence[int]) -> int:
        """Weights of one layer's true ranks in these slots: what any method has to read."""
        features = sum(len(site.slices) * site.in_features + sum(site.slices) for site in self.sites)
        return features * sum(self.slot_ranks[slot] for slot in slots)


def slot_bytes(sites: Sequence[Site], rank: int) -> int:
    """Size in fp32 of one slot of one layer."""
    return 4 * rank * sum(len(site.slices) * site.in_features + sum(site.slices) for site in sites)


def _random_stacks(site: Site, rank: int, slot_ranks: Sequence[int], generator: torch.Generator) -> Stacks:
    slots, projections, out = len(slot_ranks), len(site.slices), sum(site.slices)
    a = torch.randn(slots, projections, rank, site.in_features, generator=generator).div_(site.in_features**0.5)
    b = torch.randn(slots, out, rank, generator=generator).div_(rank**0.5)
    for slot, true_rank in enumerate(slot_ranks):
        a[slot, :, true_rank:] = 0
        b[slot, :, true_rank:] = 0
    return Stacks(a.view(slots, -1, site.in_features).bfloat16().float(), b.bfloat16().float())


def _diagonal(b: Tensor, slices: Sequence[int]) -> Tensor:
    slots, out, rank = b.shape
    diagonal = b.new_zeros(slots, out, len(slices) * rank)
    column = 0
    for projection, width in enumerate(slices):
        rows = slice(column, column + width)
        diagonal[:, rows, projection * rank : (projection + 1) * rank] = b[:, rows]
        column += width
    return diagonal
