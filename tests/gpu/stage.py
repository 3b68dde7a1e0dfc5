"""Where launches are recorded and replayed: CUDA graphs on a GPU, a list of launches under Triton's interpreter."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

import torch

from kernels.launch import Launch

Run = Callable[[], object]


class Graph(Protocol):
    """Recorded launches. They run again at the addresses, and with the grids, they were recorded with."""

    def replay(self) -> None:
        """Run them again, in order."""


class Stage(Protocol):
    """A device, and how to record and time on it."""

    device: torch.device

    def record(self, run: Run) -> Graph:
        """Record what `run` launches. It runs at least once, so that what it writes must be reset after."""

    def times_us(self, graphs: Sequence[Graph], repeats: int) -> list[float]:
        """Median time of a replay of each graph, replayed in turn."""


@dataclass(frozen=True)
class CudaGraph:
    """A captured CUDA graph, and what it was captured from: its tensors must live as long."""

    graph: Any
    source: Run

    def replay(self) -> None:
        """As `Graph`, on the current stream."""
        self.graph.replay()


class CudaStage:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        # One stream for warming up and capturing: handles and workspaces that libraries make for a stream on first
        # use are then there, which capture would refuse to make.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, run: Run) -> CudaGraph:
        """As `Stage`: kernels are compiled and libraries set up before anything is captured."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            run()
        return CudaGraph(graph, run)

    def times_us(self, graphs: Sequence[Graph], repeats: int) -> list[float]:
        """As `Stage`, between events of the device; the first replays are not counted."""
        for _ in range(3):
            for graph in graphs:
                graph.replay()
        spans: list[list[tuple[Any, Any]]] = [[] for _ in graphs]
        for _ in range(repeats):
            for graph, pairs in zip(graphs, spans, strict=True):
                began, ended = _event(), _event()
                began.record()
                graph.replay()
                ended.record()
                pairs.append((began, ended))
        torch.cuda.synchronize()
        return [statistics.median(began.elapsed_time(ended) * 1e3 for began, ended in pairs) for pairs in spans]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Recording:
    """Launches as they were made, with the tensors, numbers and grids of that moment, as a captured graph has them."""

    launches: tuple[Launch, ...]

    def replay(self) -> None:
        """As `Graph`."""
        for launch in self.launches:
            launch.run()


class InterpretedStage:
    """The CPU, under Triton's interpreter. Only launches of this project's kernels are recorded."""

    device = torch.device("cpu")

    def record(self, run: Run) -> Recording:
        """As `Stage`."""
        launches: list[Launch] = []
        plain_run = Launch.run

        def recorded_run(launch: Launch) -> None:
            launches.append(launch)
            plain_run(launch)

        with patch.object(Launch, "run", recorded_run):
            run()
        return Recording(tuple(launches))

    def times_us(self, graphs: Sequence[Graph], repeats: int) -> list[float]:
        """A stand-in: how many programs a graph runs. It replays each once."""
        for graph in graphs:
            graph.replay()
        return [
            float(sum(launch.programs for launch in graph.launches)) if isinstance(graph, Recording) else 0.0
            for graph in graphs
        ]
