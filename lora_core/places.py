"""Places for work that may block for ever, as on a dead mount, and must not hold up all other work with it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 5.0
"""Longer than it takes to read most adapters, and short for whoever waits behind one that cannot be read."""


class Places:
    """At most so many jobs at a time, those not counted that have taken longer than a bound. Thread-safe."""

    def __init__(
        self, num_places: int, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Offer `num_places`; a job keeps the place it takes from others for `patience_s`."""
        self._num_places = num_places
        self._patience_s = patience_s
        self._clock = clock
        self._left = threading.Condition()
        # Of each job its number, and when it took its place.
        self._jobs: dict[int, float] = {}
        self._num_taken = 0

    def try_take(self) -> int | None:
        """Take a place for a job, which the caller gives to `leave` when the job ends; None if there is none."""
        with self._left:
            return None if self._wait_s() > 0 else self._take()

    def leave(self, job: int) -> None:
        """End a job."""
        with self._left:
            del self._jobs[job]
            self._left.notify()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Have a place within the block; waits for one."""
        with self._left:
            while (wait_s := self._wait_s()) > 0:
                self._left.wait(wait_s)
            job = self._take()
        try:
            yield
        finally:
            self.leave(job)

    def _take(self) -> int:
        self._num_taken += 1
        self._jobs[self._num_taken] = self._clock()
        return self._num_taken

    def _wait_s(self) -> float:
        """Until a place is free if no job ends before."""
        oldest_first = sorted(self._jobs.values())
        if len(oldest_first) < self._num_places:
            return 0.0
        return oldest_first[-self._num_places] + self._patience_s - self._clock()
