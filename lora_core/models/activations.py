"""The activations of feed-forward blocks."""

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from kernels import row_operations

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""Functions of the gate, by the names transformers gives them."""


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """`activation(gate) * up` `[T, I]` of gate and up side by side `[T, 2*I]`."""
    if activation == "silu":
        return row_operations.gate(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate).mul_(up)
