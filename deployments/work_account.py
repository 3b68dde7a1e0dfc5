"""`WorkAccount`: what a replica has to tell the router actor of its engine's work."""

import time
from collections.abc import Callable

import msgspec

from lora_core.workload import Workload


class WorkAccount:
    """Adds the engine's accounts up, until they are told.

    Args:
        clock: Seconds, never falling.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._account = Workload()
        self._heard_s = clock()
        self._has_news = False

    @property
    def has_news(self) -> bool:
        """Whether something was added, or something in it waits longer and longer, since it was last taken."""
        return self._has_news or bool(self._account.adapters)

    def add(self, work: Workload) -> None:
        """Take the engine's newest account."""
        mine = self._account
        self._account = msgspec.structs.replace(
            work.after(mine), stalled=mine.stalled, fault=mine.fault, is_leaving=mine.is_leaving
        )
        self._heard_s = self._clock()
        self._has_news = True

    def set_stalled(self, stalled: dict[str, str], fault: str) -> bool:
        """Take what makes no progress, see `Workload.stalled`; whether it is other than it was."""
        if (self._account.stalled, self._account.fault) == (stalled, fault):
            return False
        self._account = msgspec.structs.replace(self._account, stalled=dict(stalled), fault=fault)
        self._has_news = True
        return True

    def set_leaving(self) -> None:
        """Take that the replica gets no more requests, see `Workload.is_leaving`."""
        self._account = msgspec.structs.replace(self._account, is_leaving=True)
        self._has_news = True

    def begin(self) -> None:
        """Tell what stays so to somebody who knows nothing of it yet."""
        self._has_news = True

    def take(self) -> Workload:
        """All that is to be told now; only what comes later is told again."""
        taken = self._account.later(self._clock() - self._heard_s)
        self._account = self._account.told()
        self._has_news = False
        return taken

    def put_back(self, taken: Workload) -> None:
        """Tell again what was taken, and did not arrive."""
        self._account = self._account.after(taken)
        self._has_news = True
