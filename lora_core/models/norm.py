"""Root-mean-square normalisation (arXiv 1910.07467)."""

import torch
from torch import Tensor, nn

from kernels.row_operations import rms_norm


class RMSNorm(nn.Module):
    """`x / rms(x) * (offset + weight)`, in fp32 throughout.

    Args:
        size: Of the rows.
        eps: What keeps a row of zeros finite.
        offset: 1 for a weight that is stored as the difference from 1, as Gemma's: in bf16 the sum would lose most of
            a small weight's digits.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., size]` to a new tensor of the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps, self.offset)
