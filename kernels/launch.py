"""One launch of a Triton kernel, as data: it can be run here, or compiled for a device that is not here."""

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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

    @property
    def variant(self) -> Hashable:
        """Equal for launches that run the same machine code."""
        kernel = self.kernel
        # Under the interpreter a kernel keeps what it was declared with apart.
        plain = kernel.do_not_specialize if hasattr(kernel, "do_not_specialize") else kernel.kwargs["do_not_specialize"]
        names = zip(kernel.arg_names, self.arguments, strict=False)
        arguments = tuple(_specialised(value, name in (plain or ())) for name, value in names)
        return kernel.fn.__name__, arguments, tuple(sorted((k, repr(v)) for k, v in self.options.items()))

    def compile(self) -> None:
        """Compile what it runs, for the current device, into this process and the compiler's cache on disk.

        Its tensors need no memory: those of `device="meta"` will do.
        """
        self.kernel.warmup(*self.arguments, grid=(1,), **self.options)

    def run(self) -> None:
        """Launch on the current stream of the arguments' device; nothing where there is no program to run."""
        if not self.programs:
            return
        # Triton takes the current device, whichever the tensors are on. The CPU, for the interpreter, is -1.
        index = self.arguments[0].get_device()
        is_current = index < 0 or index == torch.cuda.current_device()
        with nullcontext() if is_current else torch.cuda.device(index):
            self.kernel[(self.programs,)](*self.arguments, **self.options)


def _specialised(value: Any, is_plain: bool) -> Hashable:
    """What of an argument the compiler makes use of."""
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, int) and not isinstance(value, bool) and not is_plain:
        return value == 1, value % 16 == 0
    return type(value).__name__
