"""Root-mean-square normalisation (arXiv 1910.07467) with a weight around 0; torch has the one around 1."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OffsetRMSNorm(nn.Module):
    """RMSNorm whose weight is stored as the difference from 1: `x / rms(x) * (1 + weight)`, in fp32 throughout."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., size]` to a new tensor of the same shape and dtype."""
        # 1 + weight is not kept: in bf16 the sum would lose most of a small weight's digits.
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float() + 1, self.eps).type_as(x)
