"""Whether an adapted module's output differs from the base's, tried on a fixed input."""

import torch
from torch import Tensor

from lora_core.module_weights import BaseModules, ModuleWeights

_BLOCK_OUTPUTS = 512
_NUM_CANARY_TOKENS = 64


def canary_values(width: int, dtype: torch.dtype) -> Tensor:
    """The fixed input of a linear layer: fp32 `[width]` of unit mean square, rounded to the base's data type."""
    x = torch.randn(width, generator=torch.Generator().manual_seed(width))
    # What the base computes with, so that the adapter's product is taken of the same values.
    return x.div_(x.square().mean().sqrt()).to(dtype).float()


def canary_ids(num_tokens: int) -> Tensor:
    """The fixed input of an embedding: int64 ids, spread over the `num_tokens` that it knows."""
    return torch.linspace(0, num_tokens - 1, min(num_tokens, _NUM_CANARY_TOKENS)).long()


def is_noop(module: str, weights: ModuleWeights, base: BaseModules | None, *, is_embedding: bool) -> bool:
    """Whether a module with an adapter gives the base's output.

    Semantics, for the fixed input x and the base's output y of `base.canary`: whether
        round_to_base_dtype(y * (1 + gain) + B @ A @ x) == y
    Of an embedding x is a few tokens, and training may have changed others: it is a no-op if its delta is zero, too.

    Args:
        module: Its normalised name.
        weights: What the adapter holds for it.
        base: The base model; without it only a delta of zero is a no-op.
        is_embedding: The module looks rows up.
    """
    if base is None:
        return weights.gain is None and _has_no_delta(weights)
    x, y = base.canary(module)
    hidden = weights.a[x].float() if is_embedding else weights.a.float() @ x
    # Of most modules the first outputs differ, which ends it.
    for start in range(0, y.shape[-1], _BLOCK_OUTPUTS):
        outputs = slice(start, start + _BLOCK_OUTPUTS)
        part = y[..., outputs]
        changed = part.float() if weights.gain is None else part.float() * (1 + weights.gain[outputs])
        changed = changed + hidden @ weights.b[outputs].float().T
        if not torch.equal(changed.to(y.dtype), part):
            return False
    return not is_embedding or _has_no_delta(weights)


def _has_no_delta(weights: ModuleWeights) -> bool:
    return _is_zero(weights.a) or _is_zero(weights.b)


def _is_zero(tensor: Tensor) -> bool:
    low, high = torch.aminmax(tensor)
    return low.item() == 0 == high.item()
