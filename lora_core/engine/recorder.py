"""Records what a function launches on a device, to be launched again in one go."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

Run = Callable[[], None]


class Recorder(Protocol):
    """Records launches at the addresses, and with the grids and numbers, of the moment they are recorded."""

    def record(self, run: Run) -> Run:
        """Record what `run` launches; it runs at least once.

        Args:
            run: Reads and writes tensors that others hold as long as the recording; what it allocates itself is gone
                when the next recording is replayed.

        Returns:
            Launches all of it again, on the current stream.
        """


class CudaRecorder:
    """Captures CUDA graphs, which share one pool of memory: they must be replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for warming up and capturing: handles and workspaces that libraries make for a stream on first use
        # are then there, which capture would refuse to make.
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def record(self, run: Run) -> Run:
        """As `Recorder`: kernels are compiled and libraries set up before anything is captured."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        self._pool = graph.pool()
        replay: Run = graph.replay
        return replay


def recorder_for(device: torch.device) -> Recorder | None:
    """What records on a device; None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None
