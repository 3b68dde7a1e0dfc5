"""A step's tables of integers in one buffer on the device, filled with one copy and overwritten in place."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Parts start at multiples of 16 bytes, so that a launch always specialises the same way.
_ALIGN = 4


def upload(
    parts: Sequence[Sequence[int] | npt.NDArray[np.int32]], device: torch.device, into: Tensor | None, shapes: str
) -> tuple[Tensor, list[Tensor]]:
    """Put tables on the device with one copy.

    Args:
        parts: The tables; those of several dimensions go in row by row.
        device: Where the buffer lives.
        into: A buffer of an earlier step of the same shapes, overwritten instead of allocating (so that a captured
            graph finds the new tables at the old addresses). Made in inference mode or out of it, it serves in both.
        shapes: What must be equal for a buffer to serve again, for the error.

    Returns:
        The int32 buffer, and a one-dimensional view of it for each part.

    Raises:
        ValueError: `into` is of another size, type, device or layout (both are named).
    """
    arrays = [np.asarray(part, np.int32) for part in parts]
    spans, length = [], 0
    for array in arrays:
        spans.append(slice(length, length + array.size))
        length += -(-array.size // _ALIGN) * _ALIGN
    staged = torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda")
    host = staged.numpy()
    for span, array in zip(spans, arrays, strict=True):
        host[span] = array.reshape(-1)
    if into is None:
        # A tensor that is made in inference mode could not be written to out of it.
        with torch.inference_mode(False):
            buffer = torch.empty(length, dtype=torch.int32, device=device)
    else:
        _check_buffer(into, length, device, shapes)
        buffer = into
    buffer.copy_(staged, non_blocking=True)
    return buffer, [buffer[span] for span in spans]


def _check_buffer(into: Tensor, length: int, device: torch.device, shapes: str) -> None:
    """Raise ValueError unless a step's tables of so many numbers can be written to `into` as they were to a new one."""
    is_elsewhere = into.device.type != device.type or None is not device.index != into.device.index is not None
    if into.shape != (length,) or is_elsewhere:
        raise ValueError(
            f"into holds {into.numel()} numbers on {into.device}, this step needs {length} on {device}; "
            f"reuse a buffer only for equal {shapes}"
        )
    if into.dtype != torch.int32 or not into.is_contiguous() or into.data_ptr() % (4 * _ALIGN):
        raise ValueError(
            f"into is {into.dtype} with strides {into.stride()} at address {into.data_ptr()}, expected contiguous "
            f"torch.int32 at a multiple of {4 * _ALIGN}: pass the `buffer` of an earlier step, whole"
        )
