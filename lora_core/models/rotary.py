"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split order of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine for `kernels.row_operations.rotate_`, each `[T, 1, rotated channels]`."""


@dataclass(frozen=True)
class RotaryTable:
    """How fast the channels of a head turn with the position.

    Attributes:
        frequencies: Radians per position of each pair of channels. Twice as many channels turn, the first of each head;
            the others, if any, are left alone.
        scale: Factor on cosine and sine.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0


class Rotary(nn.Module):
    """The rotations of a step, one for each table; layers share them."""

    def __init__(self, tables: Sequence[RotaryTable], *, device: torch.device) -> None:
        super().__init__()
        self._scales = [table.scale for table in tables]
        for index, table in enumerate(tables):
            frequencies = torch.tensor(table.frequencies, dtype=torch.float32, device=device)
            self.register_buffer(f"frequencies_{index}", frequencies, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> list[Rotation]:
        """The rotation of each table, for int64 positions `[T]`."""
        # In fp32 whatever the model's data type: bf16 cannot tell position 257 from 256.
        columns = positions.float()[:, None, None]
        rotations = []
        for frequencies, scale in zip(self.buffers(), self._scales, strict=True):
            angles = columns * frequencies
            cos, sin = angles.cos() * scale, angles.sin() * scale
            rotations.append((torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)))
        return rotations
