"""`LoadNotes`: tells router actors of the loads that one handle's requests bring about."""

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
"""A router actor is told of a load under way no more often than this; it believes it for twice as long."""

GATHER_S = 0.005
"""Loads that begin within this time are told of together."""

MAX_REMEMBERED = 1024
"""Loads remembered as told of before those told of long ago are forgotten."""


class ReplicaKey(NamedTuple):
    """Where a replica is found: its row, in the table of its router actor (Ray name, empty where it has none)."""

    router: str
    replica_id: str


class Router(Protocol):
    """A router actor, as far as it is told of loads; `deployments.router_client.RouterClient` is one."""

    async def note_loads(self, loads: Mapping[str, list[str]]) -> None:
        """Tell of adapters on their way into slots: replica id -> names."""


class LoadNotes:
    """Notes of adapters that requests go to, or wait for, a replica with, that has yet to load them.

    The router actor shows the load in the table, so that other handles send their requests to the same replica, and
    has the replica begin it, should the requests wait in front of it. Nobody waits for this, and nothing depends on it.

    Args:
        router: Gives the router actor of a Ray name; None where there is none.
        clock: Seconds, monotonic.
    """

    def __init__(self, router: Callable[[str], Router | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._router = router
        self._clock = clock
        self._told_at: dict[tuple[ReplicaKey, str], float] = {}
        self._untold: dict[ReplicaKey, set[str]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def add(self, key: ReplicaKey, adapter: str) -> None:
        """Note one load, in the running event loop."""
        now, load = self._clock(), (key, adapter)
        told_at = self._told_at.get(load)
        if not key.router or (told_at is not None and now < told_at + AGAIN_S):
            return
        if len(self._told_at) >= MAX_REMEMBERED:
            self._told_at = {kept: at for kept, at in self._told_at.items() if now < at + AGAIN_S}
        self._told_at[load] = now
        if not self._untold:
            # It does not keep these notes alive, nor the handle they belong to.
            asyncio.get_running_loop().call_later(GATHER_S, _tell, weakref.ref(self))
        self._untold.setdefault(key, set()).add(adapter)

    def tell(self) -> None:
        """Send what was noted since the last time."""
        untold, self._untold = self._untold, {}
        loads: dict[str, dict[str, list[str]]] = {}
        for key, adapters in untold.items():
            loads.setdefault(key.router, {})[key.replica_id] = sorted(adapters)
        for name, of_router in loads.items():
            router = self._router(name)
            if router is not None:
                task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(_send(router, of_router))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

    def close(self) -> None:
        """Give up what is being sent."""
        for task in self._telling:
            task.cancel()


def _tell(notes: "weakref.ref[LoadNotes]") -> None:
    alive = notes()
    if alive is not None:
        alive.tell()


async def _send(router: Router, loads: Mapping[str, list[str]]) -> None:
    try:
        await router.note_loads(loads)
    except Exception as error:
        logger.debug("the router actor was not told of loads %s: %s", loads, error)
