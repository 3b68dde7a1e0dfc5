"""`Timelines`: when requests that are traced got where. Most engines trace none, and pay for none."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lora_core.engine.request import Request, ScheduledBatch
from lora_core.messages import Timeline
from lora_core.types import AdapterRef


@dataclass
class _Times:
    came_ns: int
    slot_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0


class Timelines:
    """Of one engine's traced requests that have not ended. All calls come from the step thread.

    Args:
        slot_of: The slot an adapter is in; None where it is in none.
        clock_ns: Nanoseconds of Unix time, which other processes read, too.
    """

    def __init__(self, slot_of: Callable[[AdapterRef], int | None], clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._slot_of = slot_of
        self._clock_ns = clock_ns
        self._times: dict[Request, _Times] = {}

    def __len__(self) -> int:
        return len(self._times)

    def came(self, request: Request) -> None:
        """Note a new request that is traced."""
        self._times[request] = _Times(self._clock_ns())
        self._look_at_slots([request])

    def begins(self, batch: ScheduledBatch) -> None:
        """Note a step that is about to run, and the slots there are by now."""
        self._look_at_slots(self._times)
        for request in (row.request for row in batch.rows):
            times = self._times.get(request)
            if times is not None and not times.started_ns:
                times.started_ns = self._clock_ns()

    def has_token(self, request: Request, *, is_last: bool) -> Timeline | None:
        """Note a token of a traced request; the times so far, if it is the first or the last one."""
        times = self._times.get(request)
        if times is None:
            return None
        now_ns, is_first = self._clock_ns(), not times.first_token_ns
        times.first_token_ns = times.first_token_ns or now_ns
        if not is_first and not is_last:
            return None
        last_ns = now_ns if is_last else 0
        return Timeline(times.came_ns, times.slot_ns, times.started_ns, times.first_token_ns, last_ns)

    def ended(self, request: Request) -> None:
        """Forget a request, traced or not."""
        self._times.pop(request, None)

    def _look_at_slots(self, requests: Iterable[Request]) -> None:
        for request in requests:
            times = self._times[request]
            if not times.slot_ns and (request.adapter is None or self._slot_of(request.adapter) is not None):
                times.slot_ns = self._clock_ns()
