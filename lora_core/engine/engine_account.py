"""`EngineAccount`: what an engine tells of its requests and steps, and what it learns from them for its next ones."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from lora_core.engine.request import Request, ScheduledBatch
from lora_core.engine.timelines import Timelines
from lora_core.engine.work_meter import WorkMeter
from lora_core.engine.write_pace import WritePace
from lora_core.manager import LoRAManagerV3
from lora_core.messages import Timeline
from lora_core.workload import CacheCounts, Workload


class EngineAccount:
    """Notes what happens to requests and how long steps take. All calls come from the step thread.

    Args:
        manager: The engine's.
        clock: Seconds, never falling.
    """

    def __init__(self, manager: LoRAManagerV3, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._clock = clock
        self._write_pace = WritePace()
        self._work = WorkMeter(clock)
        self._timelines = Timelines(manager.slot_of)

    @property
    def write_budget_s(self) -> float:
        """Seconds that the next step may spend on writing adapters into slots."""
        return self._write_pace.budget_s

    def came(self, request: Request) -> None:
        """Note a new request."""
        self._work.came(request)
        if request.is_traced:
            self._timelines.came(request)

    def ended(self, request: Request) -> None:
        """Note that a request has ended, however."""
        self._work.ended(request)
        self._timelines.ended(request)

    def has_token(self, request: Request, *, is_last: bool) -> Timeline | None:
        """Note a request's token; returns when a traced one got where, with its first and its last."""
        return self._timelines.has_token(request, is_last=is_last) if request.is_traced else None

    def begins(self, batch: ScheduledBatch) -> None:
        """Note a step that is about to run, or that there is nothing to run."""
        if self._timelines:
            self._timelines.begins(batch)

    @contextmanager
    def timed(self, batch: ScheduledBatch) -> Iterator[None]:
        """Note a step, of at least one row, that runs within the block."""
        self._work.begins(batch)
        started_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - started_s
        self._write_pace.note(seconds)
        self._work.ran(batch, seconds)

    def take(self, cache: CacheCounts) -> Workload:
        """What was done since the last call, and is to be done now.

        Args:
            cache: What there is to say of the KV cache.
        """
        return msgspec.structs.replace(
            self._work.take(),
            load_ms_per_mib=self._manager.load_ms_per_mib(),
            slots=self._manager.slot_counts(),
            cache=cache,
        )

    def forget_work(self) -> None:
        """Begin to count anew what is done, while there are no requests."""
        self._work = WorkMeter(self._clock)
