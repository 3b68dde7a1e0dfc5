"""Scratch memory that shows what is read without having been written."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Memory from torch.empty holds NaN, so that reading what was never written shows."""
    plain_empty = torch.empty

    def poisoned(*args: object, **options: object) -> Tensor:
        tensor: Tensor = plain_empty(*args, **options)  # type: ignore[call-overload]
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    with patch.object(torch, "empty", poisoned):
        yield
