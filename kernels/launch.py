"""One launch of a Triton kernel, as data: it can be run here, or compiled for a device that is not here."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

PRECISION = "ieee"
"""Triton's `input_precision` of every product: fp32 products must be fp32, TF32 keeps 10 bits of them.

It means nothing to the 16-bit types; "tf32", the default, is an error on most AMD GPUs even for those.
"""

# Triton's default changes with 3.10, and 3.9 warns where neither is asked for.
_COMPILER_OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: The `@triton.jit` function.
        programs: Length of the one-dimensional grid.
        arguments: Tensors, one of them first, and run-time numbers, by position.
        constants: Compile-time arguments and launch options (`num_warps` and the like), by name.
    """

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """All that is passed by name."""
        return {**self.constants, **_COMPILER_OPTIONS}

    def run(self) -> None:
        """Launch on the current stream of the arguments' device; nothing where there is no program to run."""
        if not self.programs:
            return
        # Triton takes the current device, whichever the tensors are on. The CPU, for the interpreter, is -1.
        index = self.arguments[0].get_device()
        is_current = index < 0 or index == torch.cuda.current_device()
        with nullcontext() if is_current else torch.cuda.device(index):
            self.kernel[(self.programs,)](*self.arguments, **self.options)
