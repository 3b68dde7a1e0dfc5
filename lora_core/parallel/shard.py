"""Which part of a model's layers a rank has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """One rank's place among the ranks that share a model; by default it is alone.

    Attributes:
        rank: From 0.
        size: Number of ranks.
    """

    rank: int = 0
    size: int = 1

    def span(self, width: int) -> tuple[int, int]:
        """The rank's part `[start, stop)` of `width` things in order; parts differ by one thing at most."""
        return width * self.rank // self.size, width * (self.rank + 1) // self.size

    def width(self, width: int) -> int:
        """How many of `width` things are the rank's."""
        start, stop = self.span(width)
        return stop - start


WHOLE = Shard()
"""The one rank of a model that is not divided."""


@dataclass(frozen=True)
class LinearSplit:
    """How a linear layer is divided (Megatron-LM, arXiv 1909.08053).

    Attributes:
        along: "outputs": each rank has some rows of the weight, and computes some of the layer's outputs. "inputs": it
            has some columns, and computes a part of every output's sum; the ranks' results are added up.
        sections: Widths along that side that are divided one by one: the projections of a fused layer.
    """

    along: Literal["outputs", "inputs"]
    sections: tuple[int, ...]

    def part(self, tensor: Tensor, dim: int, shard: Shard) -> Tensor:
        """A rank's part of a tensor whose dimension `dim` is the divided side; a view where it is in one piece."""
        assert tensor.shape[dim] == sum(self.sections), f"{tuple(tensor.shape)} is not of widths {self.sections}"
        parts, first = [], 0
        for section in self.sections:
            start, stop = shard.span(section)
            parts.append(tensor.narrow(dim, first + start, stop - start))
            first += section
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def parameter(self, name: str, tensor: Tensor, shard: Shard) -> Tensor | None:
        """A rank's part of a layer's `weight` or `bias`; None where the rank has none of it.

        The bias of a layer that is divided along its inputs is added once, by the first rank.
        """
        if self.along == "outputs":
            return self.part(tensor, 0, shard)
        if name == "weight":
            return self.part(tensor, 1, shard)
        return tensor if shard.rank == 0 else None


def shard_parameters(
    tensors: Mapping[str, Tensor], splits: Mapping[str, LinearSplit], shard: Shard
) -> dict[str, Tensor]:
    """A rank's part of a checkpoint's tensors.

    Args:
        tensors: By name, e.g. `model.layers.0.self_attn.q_proj.weight`.
        splits: By the name of the layer, e.g. `q_proj`; every rank has all of the others.
        shard: The rank.
    """
    parts = {}
    for name, tensor in tensors.items():
        path, _, parameter = name.rpartition(".")
        split = splits.get(path.rpartition(".")[2])
        part = tensor if split is None else split.parameter(parameter, tensor, shard)
        if part is not None:
            parts[name] = part
    return parts
