"""One launch of a Triton kernel, as data: it can be run here, or compiled for a device that is not here."""

from dataclasses import dataclass
from typing import Any

import torch

# Triton's default changes with 3.10, and 3.9 warns where neither is asked for.
_COMPILER_OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: The `@triton.jit` function.
        programs: Length of the one-dimensional grid.
        arguments: Tensors and run-time numbers, by position.
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
        """Launch on the current stream; nothing where there is no program to run."""
        if self.programs:
            self.kernel[(self.programs,)](*self.arguments, **self.options)


def precision(dtype: torch.dtype) -> str:
    """Triton's `input_precision` of a product.

    fp32 products must be fp32: TF32 keeps 10 bits. The setting means nothing to the 16-bit types.
    """
    return "ieee" if dtype == torch.float32 else "tf32"
