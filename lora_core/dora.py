"""DoRA: from a magnitude vector to a factor on a layer's output.

DoRA (Liu et al. 2024, https://arxiv.org/abs/2402.09353) trains the direction and the length of each output row of a
weight apart: W' = m * (W + scale * B @ A) / ||W + scale * B @ A||. With g = m / ||W + scale * B @ A||, which depends on
nothing but weights, the layer's output is g * (W x) + (g * scale * B) @ A x: served without a copy of W'.

The norms are computed as PEFT does it by default, in fp32 with A and B as they are in the file, whatever the base's
data type. PEFT in half precision throughout (`autocast_adapter_dtype=False`) rounds the norms too; this never does.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lora_core.module_weights import BaseWeight

_BLOCK_ELEMENTS = 2**20


def row_norms(weight: BaseWeight, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Lengths of the rows of `weight + scale * b @ a`, with bounded additional memory.

    Args:
        weight: `[out, in]`.
        a: fp32 `[r, in]`.
        b: fp32 `[out, r]`.
        scale: Factor of `b @ a`.

    Returns:
        fp32 `[out]`.
    """
    norms = torch.empty(len(weight.stored))
    for start, rows in _row_blocks(weight):
        block = torch.addmm(rows, b[start : start + len(rows)], a, alpha=scale)
        torch.linalg.vector_norm(block, dim=1, out=norms[start : start + len(rows)])
    return norms


def column_norms(weight: BaseWeight, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Lengths of the columns of `weight + scale * (b @ a).T`: those of the output rows, of an embedding.

    Args:
        weight: `[vocab, hidden]`.
        a: fp32 `[r, vocab]`.
        b: fp32 `[hidden, r]`.
        scale: Factor of `b @ a`.

    Returns:
        fp32 `[hidden]`.
    """
    # So many squares are added that fp32 would lose the last of them.
    squares = torch.zeros(weight.stored.shape[1], dtype=torch.float64)
    for start, rows in _row_blocks(weight):
        block = torch.addmm(rows, a[:, start : start + len(rows)].T, b.T, alpha=scale)
        squares += block.square_().sum(0, dtype=torch.float64)
    return squares.sqrt_().float()


def _row_blocks(weight: BaseWeight) -> Iterator[tuple[int, Tensor]]:
    num_rows, width = weight.stored.shape
    step = max(1, _BLOCK_ELEMENTS // max(width, 1))
    return ((start, weight.rows(start, start + step)) for start in range(0, num_rows, step))
