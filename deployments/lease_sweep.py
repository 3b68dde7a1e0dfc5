"""`LeaseSweep`: drops replicas that have been silent for longer than their lease."""

import asyncio
import logging
import time
from collections.abc import Callable

from cluster.members import Members

logger = logging.getLogger(__name__)


class LeaseSweep:
    """Sleeps until the first lease ends.

    Args:
        members: The live replicas.
        on_gone: Called with the ids of those that were dropped.
    """

    def __init__(self, members: Members, on_gone: Callable[[list[str]], None]) -> None:
        self._members = members
        self._on_gone = on_gone
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self) -> None:
        """Have an eye on the leases, in the running event loop."""
        due = self._members.next_expiry
        if self._timer is None and due is not None:
            delay_s = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire, due)

    def close(self) -> None:
        """Drop nobody any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self, due: float) -> None:
        self._timer = None
        now, lease_s = time.monotonic(), self._members.lease_s
        # A loop that was held up has calls of replicas waiting: they are heard before anyone is dropped.
        if now - due > lease_s / 2:
            self._timer = asyncio.get_running_loop().call_later(lease_s / 2, self._expire, now + lease_s / 2)
            return
        gone = self._members.expire(now)
        if gone:
            logger.warning("no sign of life within %.1f s: dropped %s", lease_s, ", ".join(gone))
            self._on_gone(gone)
        self.schedule()
