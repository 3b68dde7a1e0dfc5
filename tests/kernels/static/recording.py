"""Records what a function launches, instead of launching it."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from kernels.launch import Launch


class Recording:
    """What was launched.

    Attributes:
        launches: Triton's launches, in order. The grid of one of several dimensions is given as its product.
        num_torch_kernels: Kernels that torch's own operators would launch: those that write memory.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.num_torch_kernels = 0


class _CountWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._recording.num_torch_kernels += any(
            argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
        ) or (func is torch.ops.aten.zeros.default)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Inside it every launch of a Triton kernel is recorded and none takes place."""
    recording = Recording()

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        sizes = grid(options) if callable(grid) else grid
        recording.launches.append(Launch(kernel, math.prod(sizes), arguments, options))

    with patch.object(JITFunction, "run", record), _CountWrites(recording):
        yield recording
