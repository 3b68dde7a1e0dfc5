"""`Admission`: how many requests may wait for their first token, and when one that may not is worth sending again."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from lora_core.errors import QueueFull

SHORTEST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Bounds of `Retry-After`: sooner is a busy loop, and what is further away than a minute nobody can foresee."""

NEWEST_SHARE = 0.2
"""Of the newest departure's interval in the mean of them all."""


class Admission:
    """Requests of one process that wait for their first token, counted and bounded, by adapter and in total.

    Args:
        max_waiting: Most requests that wait, of all models.
        max_waiting_per_adapter: Most of them that wait for one adapter. The base model is bound by the total alone.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        max_waiting: int,
        max_waiting_per_adapter: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_per_adapter = max_waiting_per_adapter
        self._clock = clock
        self._all = _Line()
        # Of models with requests that wait, and of no others.
        self._lines: dict[str | None, _Line] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait now."""
        return self._all.length

    def waiting_by_model(self) -> Mapping[str | None, int]:
        """Adapter (None: the base model) -> its requests that wait now; those without any are left out."""
        return {model: line.length for model, line in self._lines.items()}

    def enter(self, adapter: str | None, load_s: Callable[[], float] = float) -> "Place":
        """Let a request wait; its place is given back at the end of a `with` block, if not before.

        Args:
            adapter: Its name; None is the base model.
            load_s: Gives the seconds that bringing the adapter to a slot should take; asked only for a refusal.

        Raises:
            QueueFull: as many wait as may. It says when the queue should be through: by the pace at which its requests
                have got their first tokens, and not before the adapter can be loaded.
        """
        now = self._clock()
        line = self._lines.get(adapter)
        if self._all.length >= self._max_waiting:
            raise _full(
                f"{self._all.length} requests are waiting, which is as many as may (queue.max_waiting)",
                max(load_s(), self._all.drain_s(now)),
            )
        if adapter is not None and line is not None and line.length >= self._max_waiting_per_adapter:
            raise _full(
                f"{line.length} requests for adapter {adapter!r} are waiting, which is as many as may "
                "(queue.max_waiting_per_adapter)",
                max(load_s(), line.drain_s(now)),
            )
        if line is None:
            line = self._lines[adapter] = _Line()
        for entered in (self._all, line):
            entered.enter(now)
        return Place(self, adapter)

    def leave(self, place: "Place", *, started: bool) -> None:
        """Called by a place, once."""
        now, line = self._clock(), self._lines[place.adapter]
        for left in (self._all, line):
            left.leave(now, started=started)
        if not line.length:
            del self._lines[place.adapter]


class Place:
    """One request's place among those that wait."""

    def __init__(self, admission: Admission, adapter: str | None) -> None:
        self.adapter = adapter
        self._admission: Admission | None = admission

    def start(self) -> None:
        """The first token has come: the request waits no longer. Later calls do nothing."""
        self._leave(started=True)

    def __enter__(self) -> "Place":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(started=False)

    def _leave(self, *, started: bool) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.leave(self, started=started)


class _Line:
    """Requests that wait for the same thing, and the pace at which they go."""

    def __init__(self) -> None:
        self.length = 0
        # The last departure, or when somebody came to an empty line: idle time says nothing of the pace.
        self._since = 0.0
        self._interval_s: float | None = None

    def enter(self, now: float) -> None:
        if not self.length:
            self._since = now
        self.length += 1

    def leave(self, now: float, *, started: bool) -> None:
        self.length -= 1
        if not started:
            return
        interval_s = now - self._since
        mean_s = interval_s if self._interval_s is None else self._interval_s
        self._interval_s = mean_s + NEWEST_SHARE * (interval_s - mean_s)
        self._since = now

    def drain_s(self, now: float) -> float:
        """Seconds until all that wait now have started: at the pace so far, or as long again as nobody has by now."""
        return max(self.length * (self._interval_s or 0.0), now - self._since)


def _full(what: str, after_s: float) -> QueueFull:
    after_s = min(max(after_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
    return QueueFull(
        f"{what}; try again in {after_s:.0f} s, or ask who runs this server for a larger limit or more replicas",
        after_s,
    )
