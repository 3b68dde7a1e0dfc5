"""What an engine computes and has to compute, by adapter, and how long a request takes of it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from lora_core.engine.request import Request, ScheduledBatch
from lora_core.engine.step_line import StepLine
from lora_core.types import AdapterRef
from lora_core.workload import AdapterWork, Workload

FADE = 0.999
"""What a step's tokens, and the requests that ended, count for after the next step, in a typical request's tokens."""

LEAST_ENDED = 3.0
"""Ended requests from which on their tokens say something of the next one's."""


@dataclass
class _Oldest:
    """The oldest request of a name, how far it had come when last looked at, and since when."""

    request: Request
    came_to: tuple[int, int]
    since_s: float


class WorkMeter:
    """Counts for one engine. All calls come from the step thread.

    Args:
        clock: Seconds, never falling.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._taken_s = clock()
        self._line = StepLine()
        # Requests that have not ended, by when they came; and those of them that have not run yet.
        self._came_s: dict[Request, float] = {}
        self._new: set[Request] = set()
        self._num_tokens: Counter[str | None] = Counter()
        self._num_started: Counter[str | None] = Counter()
        self._wait_s: dict[str | None, float] = {}
        self._oldest: dict[str | None, _Oldest] = {}
        self._recent_tokens = 0.0
        self._recent_ends = 0.0

    @property
    def service_ms(self) -> float | None:
        """What a typical request adds to the steps of those that run beside it; None while not known."""
        per_token_s = self._line.per_token_s
        if per_token_s is None or self._recent_ends < LEAST_ENDED:
            return None
        return 1e3 * per_token_s * self._recent_tokens / self._recent_ends

    def came(self, request: Request) -> None:
        """Note a new request."""
        self._came_s[request] = self._clock()
        self._new.add(request)

    def ended(self, request: Request) -> None:
        """Note that a request has ended, however."""
        del self._came_s[request]
        self._new.discard(request)
        self._recent_ends += 1

    def begins(self, batch: ScheduledBatch) -> None:
        """Note the requests that run for the first time in the step about to run."""
        now_s = self._clock()
        for request in (row.request for row in batch.rows):
            if request in self._new:
                self._new.remove(request)
                name = _name(request.adapter)
                self._num_started[name] += 1
                self._wait_s[name] = self._wait_s.get(name, 0.0) + now_s - self._came_s[request]

    def ran(self, batch: ScheduledBatch, seconds: float) -> None:
        """Note a step that has run."""
        for row in batch.rows:
            self._num_tokens[_name(row.adapter)] += row.num_tokens
        self._line.add(batch.num_tokens, seconds)
        self._recent_tokens = FADE * self._recent_tokens + batch.num_tokens
        self._recent_ends *= FADE

    def take(self) -> Workload:
        """What was done since the last call, and is to be done, by adapter."""
        queues: dict[str | None, list[Request]] = {}
        for request in self._came_s:
            queues.setdefault(_name(request.adapter), []).append(request)
        now_s = self._clock()
        self._oldest = {name: self._look(name, queue, now_s) for name, queue in queues.items()}
        adapters = [
            msgspec.structs.replace(
                self._queue(name, queues.get(name, ()), now_s),
                num_tokens=self._num_tokens[name],
                num_started=self._num_started[name],
                wait_s=self._wait_s.get(name, 0.0),
            )
            for name in dict.fromkeys([*queues, *self._num_tokens])
        ]
        work = Workload(seconds=now_s - self._taken_s, adapters=adapters, service_ms=self.service_ms)
        self._taken_s = now_s
        self._num_tokens, self._num_started, self._wait_s = Counter(), Counter(), {}
        return work

    def _look(self, name: str | None, queue: Iterable[Request], now_s: float) -> _Oldest:
        request = min(queue, key=self._came_s.__getitem__)
        came_to = (request.num_computed, len(request.token_ids))
        before = self._oldest.get(name)
        if before is not None and before.request is request:
            return before if before.came_to == came_to else _Oldest(request, came_to, now_s)
        return _Oldest(request, came_to, self._came_s[request] if request in self._new else now_s)

    def _queue(self, name: str | None, queue: Iterable[Request], now_s: float) -> AdapterWork:
        requests = list(queue)
        if not requests:
            return AdapterWork(name=name)
        oldest = self._oldest[name]
        num_running = sum(map(_runs, requests))
        return AdapterWork(
            name=name,
            num_running=num_running,
            num_waiting=len(requests) - num_running,
            oldest_age_s=now_s - self._came_s[oldest.request],
            oldest_idle_s=now_s - oldest.since_s,
            oldest_waits=not _runs(oldest.request),
        )


def _runs(request: Request) -> bool:
    return bool(request.block_table) and not request.is_parked


def _name(adapter: AdapterRef | None) -> str | None:
    return None if adapter is None else adapter.name
