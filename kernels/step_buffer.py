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
            graph finds the new tables at the old addresses).
        shapes: What must be equal for a buffer to serve again, for the error.

    Returns:
        The int32 buffer, and a one-dimensional view of it for each part.

    Raises:
        ValueError: `into` is of another size or device (both are named).
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
        buffer = staged.to(device, non_blocking=True)
    elif into.shape != staged.shape or into.device.type != device.type:
        raise ValueError(
            f"into holds {into.numel()} numbers on {into.device}, this step needs {staged.numel()} on {device}; "
            f"reuse a buffer only for equal {shapes}"
        )
    else:
        buffer = into.copy_(staged, non_blocking=True)
    return buffer, [buffer[span] for span in spans]
