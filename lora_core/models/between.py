"""What a decoder layer computes between its products and its attention, as functions that `torch.compile` can fuse.

They take tensors and plain numbers alone. So one compilation serves all layers and steps of any number of rows, and
what depends on a step's adapters or its sequences stays outside, in operators of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import row_operations
from kernels.row_operations import rms_norm, rotate_
from lora_core.models.rotary import Rotation

COMPILED_ROWS = (2, 1)
"""Numbers of rows that are compiled: any from two on, and one, which compilers take for special."""


class NormShape(NamedTuple):
    """What the norms of a model have in common.

    Attributes:
        eps: What keeps a row of zeros finite.
        offset: 1 where weights are stored as the difference from 1.
    """

    eps: float
    offset: float


def join(x: Tensor, part: Tensor, scale: float, weight: Tensor, norm: NormShape) -> tuple[Tensor, Tensor]:
    """Add what a block gives to the residual stream, and normalise that for the next block.

    Semantics:
        joined = x + scale * part;  normed = rms_norm(joined, weight)

    Args:
        x: The residual stream `[T, hidden_size]`.
        part: As x.
        scale: Of what is added.
        weight: Of the norm.
        norm: The same.

    Returns:
        joined, normed.
    """
    return row_operations.join(x, part, scale, weight, norm.eps, norm.offset)


def join_normed(
    x: Tensor, part: Tensor, scale: float, part_weight: Tensor, weight: Tensor, norm: NormShape
) -> tuple[Tensor, Tensor]:
    """`join`, of `rms_norm(part, part_weight)`."""
    return join(x, rms_norm(part, part_weight, norm.eps, norm.offset), scale, weight, norm)


def turn_heads_(
    heads: Tensor,
    num_heads: int,
    num_rotated: int,
    weights: tuple[Tensor, Tensor] | None,
    norm: NormShape,
    rotation: Rotation | None,
) -> None:
    """Normalise each query and key, if their model does, and rotate them, in place.

    Args:
        heads: `[T, heads, head_dim]`: queries, keys, values.
        num_heads: Query heads.
        num_rotated: Query and key heads.
        weights: Of the norms of queries and of keys; None: they are not normalised.
        norm: Of the norms.
        rotation: Of the step's positions; None: they are not rotated.
    """
    if weights is not None:
        queries, keys = heads[:, :num_heads], heads[:, num_heads:num_rotated]
        queries.copy_(rms_norm(queries, weights[0], norm.eps, norm.offset))
        keys.copy_(rms_norm(keys, weights[1], norm.eps, norm.offset))
    if rotation is not None:
        rotate_(heads[:, :num_rotated], *rotation)


class Between(NamedTuple):
    """The functions of this module, as they are or compiled."""

    join: Callable[..., tuple[Tensor, Tensor]] = join
    join_normed: Callable[..., tuple[Tensor, Tensor]] = join_normed
    turn_heads_: Callable[..., None] = turn_heads_

    @classmethod
    def compiled(cls, backend: str) -> "Between":
        """Compiled when they are first called, for each kind of layer: once for one row, and once for more."""
        functions: Sequence[Any] = (join, join_normed, turn_heads_)
        return cls(*(torch.compile(function, backend=backend, fullgraph=True) for function in functions))
