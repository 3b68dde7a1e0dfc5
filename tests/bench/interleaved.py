"""Processor time of several methods on the same work, taken in turns, with caches that hold none of their weights."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

_HOPELESS = 20

_EVICTION_BYTES = 96 << 20
"""Read before each turn: more than the last cache of most processors."""


class Task(NamedTuple):
    """One method's work: what it does once a step, and each of its operations on each of its layers."""

    prepare: Callable[[], None]
    operations: Sequence[Callable[[int], None]]
    num_layers: int


class Cost(NamedTuple):
    """Processor time in microseconds: of what is done once a step, and of each operation.

    Of many times it is the first quartile: other work on the machine slows its caches and memory, never speeds them.
    """

    prepare_us: float
    operations_us: tuple[float, ...]

    @property
    def layer_us(self) -> float:
        """All operations of a layer."""
        return sum(self.operations_us)

    def step_us(self, num_layers: int) -> float:
        """A step of so many layers."""
        return self.prepare_us + num_layers * self.layer_us


class Cache:
    """Memory to read, so that nothing else stays in the caches."""

    def __init__(self) -> None:
        self._memory = torch.ones(_EVICTION_BYTES // 4)

    def evict(self) -> None:
        """Fill the caches with this memory."""
        self._memory.sum()

    def stream_rate(self) -> float:
        """Bytes read in a second by one thread, at best."""
        return _EVICTION_BYTES / best_seconds(self.evict)


def take_turns(tasks: Sequence[Task], cache: Cache, budget_s: float, *, max_turns: int = 12) -> list[Cost]:
    """Time each task turn by turn until they took about `budget_s` of processor time together, in two turns at least.

    A turn is a step over all layers; where a whole one would take too long, it is one over the first few. A task that
    is `_HOPELESS` times as slow as another at its first layer is timed no further.
    """
    timed = [_Timed(task) for task in tasks]
    for each in timed:
        cache.evict()
        each.turn(1)
    fastest = min(sum(times[0] for times in each.samples) for each in timed)
    running = []
    for each in timed:
        first_s = sum(times[0] for times in each.samples)
        if first_s < _HOPELESS * fastest:
            # The first layer warmed up what is made once; it says how many layers a turn can afford.
            each.num_layers = max(1, min(each.task.num_layers, int(budget_s / len(tasks) / 3 / first_s)))
            each.forget()
            running.append(each)
    spent = 0.0
    for turn in range(max_turns):
        for each in running:
            cache.evict()
            spent += each.turn(each.num_layers)
        if turn > 0 and spent > budget_s:
            break
    return [each.cost() for each in timed]


class _Timed:
    """A task and its times in seconds."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.num_layers = 1
        self.samples: list[list[float]] = [[] for _ in task.operations]
        self._prepares: list[float] = []

    def turn(self, num_layers: int) -> float:
        """Time a step of so many layers; returns how long it took."""
        took = _seconds(self.task.prepare)
        self._prepares.append(took)
        for layer in range(num_layers):
            for operation, times in zip(self.task.operations, self.samples, strict=True):
                began = time.thread_time()
                operation(layer)
                times.append(time.thread_time() - began)
                took += times[-1]
        return took

    def forget(self) -> None:
        """Drop the times of all operations."""
        for times in self.samples:
            times.clear()

    def cost(self) -> Cost:
        """The first quartile of all times."""
        return Cost(_quartile_us(self._prepares), tuple(_quartile_us(times) for times in self.samples))


def _quartile_us(times: Sequence[float]) -> float:
    return 1e6 * sorted(times)[len(times) // 4]


def best_seconds(work: Callable[[], object], repeats: int = 8) -> float:
    """Least processor time of this thread that the work took."""
    return min(_seconds(work) for _ in range(repeats))


def _seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
