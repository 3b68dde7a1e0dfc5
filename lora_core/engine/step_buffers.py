"""A step's integers on the device: one copy from page-locked memory, also into a buffer that is used again."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_core.engine.kv_cache import Ints


class StepBuffers(NamedTuple):
    """What the decoder reads of T token rows; all are views of `buffer`, int64.

    Attributes:
        token_ids: `[T]`.
        positions: `[T]`, of each token in its sequence.
        write_rows: `[T * 2 * num_kv_heads]`, where keys and values go, see `KVLayout.token_rows`.
        buffer: The memory they share.
    """

    token_ids: Tensor
    positions: Tensor
    write_rows: Tensor
    buffer: Tensor


class PendingTokens(NamedTuple):
    """Tokens of a step that are not known to the host yet.

    Attributes:
        tokens: int64 on the device: what the last step chose.
        rows: Token rows of this step, whose tokens are among them.
        places: Where each is among `tokens`.
    """

    tokens: Tensor
    rows: Ints
    places: Ints


def upload_step(
    token_ids: Ints, positions: Ints, write_rows: Ints, device: torch.device, into: StepBuffers | None = None
) -> StepBuffers:
    """Put a step's rows on a device with one copy.

    Args:
        token_ids: int64 `[T]`.
        positions: int64 `[T]`.
        write_rows: int64, T times as many as every row writes.
        device: Where the step runs.
        into: Buffers of an earlier step of as many rows, overwritten instead of allocating.
    """
    num_rows = len(token_ids)
    host = np.concatenate((token_ids, positions, write_rows.reshape(-1)))
    if into is not None:
        assert into.buffer.shape == host.shape, f"{len(host)} numbers do not fill buffers of {len(into.buffer)}"
        into.buffer.copy_(to_device(host, torch.device("cpu"), pin=device.type == "cuda"), non_blocking=True)
        return into
    buffer = to_device(host, device)
    return StepBuffers(buffer[:num_rows], buffer[num_rows : 2 * num_rows], buffer[2 * num_rows :], buffer)


def fill_pending(token_ids: Tensor, pending: PendingTokens) -> None:
    """Put tokens that only the device knows where a step reads them."""
    if len(pending.rows) == 0:
        return
    rows, places = to_device(np.stack((pending.rows, pending.places)), token_ids.device)
    token_ids.index_copy_(0, rows, pending.tokens.index_select(0, places))


def to_device(array: npt.NDArray[Any], device: torch.device, *, pin: bool = False) -> Tensor:
    """A tensor of an array on a device, or in page-locked memory; see `send`."""
    tensor = torch.from_numpy(array)
    return send(tensor.pin_memory() if pin else tensor, device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on a device; the host does not wait for the copy. On the CPU it is the same tensor."""
    # Of memory that is not page-locked the copy would wait for all that was launched before it.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
