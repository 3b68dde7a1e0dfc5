"""`FleetView`: what one handle knows of the replicas beyond what Serve tells it."""

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from cluster.fleet import FleetTable, ReplicaState

logger = logging.getLogger(__name__)

HINT_S = 2.0
"""A load this handle has caused counts as under way for this long, unless a table shows it done."""

RETRY_S = 1.0
"""Pause after following a table has failed."""

UNKNOWN = ReplicaState()


class ReplicaKey(NamedTuple):
    """Where a replica is found: its row, in the table of its router actor (Ray name, empty where it has none)."""

    router: str
    replica_id: str


class TableSource(Protocol):
    """Follows one router actor's table."""

    async def follow_table(self, callback: Callable[[FleetTable], None]) -> None:
        """Call back with the table now and at each change; returns when there will be no more."""


class FleetView:
    """The last table of each router actor, and hints of loads just caused.

    During a rolling update replicas of two versions live side by side, each with a router actor of its own. A table
    is kept while a replica names its router, whether or not that is alive.

    Args:
        connect: Makes the source of a router actor's table, given the actor's Ray name.
        clock: Seconds, monotonic.
    """

    def __init__(self, connect: Callable[[str], TableSource], clock: Callable[[], float] = time.monotonic) -> None:
        self._connect = connect
        self._clock = clock
        self._tables: dict[str, FleetTable] = {}
        # Rows of a router's predecessor, for replicas that have yet to come back to it.
        self._before: dict[str, dict[str, ReplicaState]] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._hints: dict[ReplicaKey, dict[str, float]] = {}

    def follow(self, keys: Iterable[ReplicaKey]) -> None:
        """Follow the routers of these replicas, in the running event loop, and no others."""
        keys = set(keys)
        routers = {key.router for key in keys if key.router}
        for gone in self._followers.keys() - routers:
            self._followers.pop(gone).cancel()
            self._tables.pop(gone, None)
            self._before.pop(gone, None)
        for gone_key in self._hints.keys() - keys:
            del self._hints[gone_key]
        loop = asyncio.get_running_loop()
        for router in routers:
            follower = self._followers.get(router)
            if follower is None or follower.done():
                take = _taker(weakref.ref(self), router)
                follower = loop.create_task(_follow(self._connect(router), take), name=f"follow {router}")
                self._followers[router] = follower
                # A handle that is dropped takes its followers with it.
                weakref.finalize(self, _stop, loop, follower).atexit = False

    def take(self, router: str, table: FleetTable) -> None:
        """Replace a router's table.

        A router that has just restarted has heard of few replicas: the others keep what was known of them.
        """
        last, before = self._tables.get(router), self._before.pop(router, {})
        if last is not None and last.router_id != table.router_id:
            before = {**before, **last.replicas}
        before = {replica_id: row for replica_id, row in before.items() if not _reported(table, replica_id)}
        if before:
            self._before[router] = before
        self._tables[router] = table

    def state(self, key: ReplicaKey) -> ReplicaState:
        """What the replica holds, as far as is known."""
        table = self._tables.get(key.router)
        if table is None:
            return UNKNOWN
        before = self._before.get(key.router, {}).get(key.replica_id)
        return before or table.replicas.get(key.replica_id, UNKNOWN)

    def loading(self, key: ReplicaKey) -> frozenset[str]:
        """Adapters on their way into a slot of this replica, by this handle's doing."""
        hints = self._hints.get(key)
        if not hints:
            return frozenset()
        now, resident = self._clock(), self.state(key).resident
        for adapter in [adapter for adapter, until in hints.items() if until <= now or adapter in resident]:
            del hints[adapter]
        return frozenset(hints)

    def hint(self, key: ReplicaKey, adapter: str) -> None:
        """Note that a request for this adapter goes to this replica, which loads it if it has not."""
        if adapter not in self.state(key).resident:
            self._hints.setdefault(key, {})[adapter] = self._clock() + HINT_S

    def close(self) -> None:
        """Stop following; the tables stay."""
        for follower in self._followers.values():
            follower.cancel()
        self._followers.clear()


def _reported(table: FleetTable, replica_id: str) -> bool:
    """Whether the replica has told this router what it holds."""
    row = table.replicas.get(replica_id)
    return row is not None and row.sequence >= 0


def _taker(view: "weakref.ref[FleetView]", router: str) -> Callable[[FleetTable], None]:
    """Hands tables to a view without keeping it alive."""

    def take(table: FleetTable) -> None:
        alive = view()
        if alive is not None:
            alive.take(router, table)

    return take


def _stop(loop: asyncio.AbstractEventLoop, follower: "asyncio.Task[None]") -> None:
    # The view may be forgotten on any thread, and after its loop has closed.
    if not loop.is_closed():
        loop.call_soon_threadsafe(follower.cancel)


async def _follow(source: TableSource, take: Callable[[FleetTable], None]) -> None:
    """Follow until the source ends. A fault costs the view nothing but news, and is tried again."""
    while True:
        try:
            return await source.follow_table(take)
        except Exception:
            logger.exception("following the router actor's table failed; the last one stays in use")
        await asyncio.sleep(RETRY_S)
