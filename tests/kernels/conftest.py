"""What the kernels' tests share."""

import pytest
import torch
from torch import Tensor


@pytest.fixture
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from torch.empty holds NaN, so that reading what was never written shows."""
    plain_empty = torch.empty

    def poisoned(*args: object, **options: object) -> Tensor:
        tensor: Tensor = plain_empty(*args, **options)  # type: ignore[call-overload]
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
