"""Threads that work off what there is to do, however long a single job may block."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from lora_core.places import Places

J = TypeVar("J")


class Workers(Generic[J]):
    """Daemon threads, one for each of the `places`; each ends when there is nothing left to do."""

    def __init__(self, name: str, places: Places, take: Callable[[], J | None], run: Callable[[J], None]) -> None:
        """Start no thread yet.

        Args:
            name: Of the threads.
            places: How many work at a time.
            take: The next job, or None; called from any thread.
            run: Does a job; never raises.
        """
        self._name = name
        self._places = places
        self._take_job = take
        self._run = run
        self._threads: set[threading.Thread] = set()

    def start(self) -> None:
        """Start threads for jobs that nobody does; to be called when there may be some, and now and then.

        A job for which the system has no thread left is done here.
        """
        while (taken := self._take()) is not None:
            thread = threading.Thread(target=self._work, args=taken, name=self._name, daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:
                self._threads.discard(thread)
                self._work(*taken)

    def join(self, timeout_s: float) -> None:
        """Wait, for so long at most, until nobody works."""
        deadline_s = time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _take(self) -> tuple[int, J] | None:
        place = self._places.try_take()
        if place is None:
            return None
        job = self._take_job()
        if job is None:
            self._places.leave(place)
            return None
        return place, job

    def _work(self, place: int, job: J) -> None:
        taken: tuple[int, J] | None = (place, job)
        while taken is not None:
            try:
                self._run(taken[1])
            finally:
                self._places.leave(taken[0])
            taken = self._take()
        self._threads.discard(threading.current_thread())
