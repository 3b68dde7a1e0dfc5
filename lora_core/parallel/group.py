"""What the ranks of one model compute together: sums, and rows of logits side by side."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lora_core.errors import EngineDead
from lora_core.parallel.shard import Shard

LOOPBACK = "127.0.0.1"
"""Where ranks listen for each other on CPUs: nothing of them is to be seen from another machine."""

START_TIMEOUT_S = 600
"""Longest wait for a rank that starts, or builds something; who waits for the engine has less patience."""


class RankGroup:
    """A rank's connections to all the others; for one thread.

    All ranks make the same calls in the same order. It belongs to no process-wide group of torch's, so that one process
    may have several.

    Attributes:
        shard: Which rank this is, of how many.
    """

    def __init__(self, shard: Shard, rendezvous: int, device: torch.device, timeout_s: float) -> None:
        """Wait for the other ranks, and connect to them.

        Args:
            shard: Which rank this is, of how many.
            rendezvous: File descriptor of an empty file for the ranks to find each other by, the same one for all.
            device: The rank's own: gloo connects CPUs, NCCL GPUs.
            timeout_s: Longest wait for another rank in each call; here and in `least` it is `START_TIMEOUT_S`.

        Raises:
            EngineDead: another rank did not come.
        """
        self.shard = shard
        self._device = device
        self._timeout_s = timeout_s
        store = dist.FileStore(f"/dev/fd/{rendezvous}", shard.size)  # type: ignore[attr-defined]
        connect = _nccl if device.type == "cuda" else _gloo
        try:
            # Torch declares its calls for whole process groups only.
            self._backend: Any = connect(store, shard, timedelta(seconds=START_TIMEOUT_S))
            self._backend._set_default_timeout(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise EngineDead(f"the {shard.size} ranks of the model did not find each other: {error}") from error

    def all_reduce_(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum of all ranks' tensors, in its own data type.

        Raises:
            EngineDead: another rank is gone, or took no part in time.
        """
        self._wait(self._backend.allreduce([tensor]))

    def gather_columns(self, columns: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Put all ranks' columns side by side, on the first rank.

        Args:
            columns: This rank's, `[rows, widths[rank]]`, contiguous, of at least one row.
            widths: Of all ranks.

        Returns:
            `[rows, sum(widths)]`; None on the other ranks.

        Raises:
            EngineDead: as `all_reduce_`.
        """
        if self.shard.rank:
            self._wait(self._backend.send([columns], 0, self.shard.rank))
            return None
        parts = [columns, *(columns.new_empty(len(columns), width) for width in widths[1:])]
        works = [self._backend.recv([part], rank, rank) for rank, part in enumerate(parts) if rank]
        for work in works:
            self._wait(work)
        return torch.cat(parts, 1)

    def least(self, number: int) -> int:
        """The least of the numbers that the ranks give, each when it has begun.

        Raises:
            EngineDead: another rank is gone, or gave none in time.
        """
        found = torch.tensor([number], dtype=torch.int64, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        options.timeout = timedelta(seconds=START_TIMEOUT_S)
        self._wait(self._backend.allreduce([found], options))
        return int(found)

    def abort(self) -> None:
        """Let no call wait any longer for a rank that is gone; from any thread. gloo's end by themselves."""
        if dist.is_nccl_available() and isinstance(self._backend, dist.ProcessGroupNCCL):
            self._backend.abort()

    def _wait(self, work: dist.Work) -> None:
        # Of a GPU this only queues the wait.
        try:
            work.wait()
        except RuntimeError as error:
            raise EngineDead(f"another rank took no part in a step within {self._timeout_s:g} s: {error}") from error


def _gloo(store: Any, shard: Shard, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, shard.rank, shard.size, options)


def _nccl(store: Any, shard: Shard, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)
