"""`FleetView`: what one handle knows of the replicas beyond what Serve tells it."""

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from cluster.board import Board
from cluster.entry import AdapterEntry
from cluster.fleet import FleetTable, ReplicaState
from cluster.hold_time import HoldTime
from cluster.side_by_side import behind
from deployments.generation import SlotSnapshot
from deployments.known_replica import UNKNOWN, KnownReplica
from deployments.load_notes import LoadNotes, ReplicaKey, Router

logger = logging.getLogger(__name__)

ABSENT = ReplicaState(is_stalled=True)
"""A replica that its router actor does not know any more may lack what the others have been told: it gets requests only
where no other replica can."""

RETRY_S = 1.0
"""Pause after following a table has failed."""


class TableSource(Router, Protocol):
    """One router actor, as far as a handle needs it."""

    async def follow_table(self, callback: Callable[[FleetTable], None]) -> None:
        """Call back with the table now, at each change, and now and then without one. Returns when there is no more."""


class FleetView:
    """The last table of each router actor, and what replies and this handle's own requests add to it.

    During a rolling update replicas of two versions live side by side, each with a router actor of its own. A table
    is kept while a replica names its router, whether or not that is alive. All methods are called on one event loop,
    but for `entry`, `load_s` and `is_warm`.

    Args:
        connect: Makes the source of a router actor's table, given the actor's Ray name.
        board: Where decisions are made; it has the replicas that are followed.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, connect: Callable[[str], TableSource], board: Board, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connect = connect
        self._board = board
        self._clock = clock
        self._tables: dict[str, FleetTable] = {}
        self._taken_at: dict[str, float] = {}
        # Rows of a router's predecessor, for replicas that have yet to come back to it.
        self._before: dict[str, dict[str, ReplicaState]] = {}
        # By router, adapters that its replicas have not been told of.
        self._behind: dict[str, frozenset[str]] = {}
        self._sources: dict[str, TableSource] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._replicas: dict[ReplicaKey, KnownReplica] = {}
        self._keys: dict[str, ReplicaKey] = {}
        self._notes = LoadNotes(self._sources.get, clock)
        self._hold_time = HoldTime()

    def follow(self, keys: Iterable[ReplicaKey]) -> None:
        """Follow the routers of these replicas, in the running event loop, and no others."""
        keys = list(keys)
        known = self._replicas
        self._replicas = {key: known.get(key) or KnownReplica() for key in keys}
        lost = [replica for key, replica in known.items() if key not in self._replicas]
        self._hold_time.lose(sum(replica.num_claims() for replica in lost), self._clock())
        self._keys = {key.replica_id: key for key in keys}
        routers = {key.router for key in keys if key.router}
        gone = self._followers.keys() - routers
        for router in gone:
            self._followers.pop(router).cancel()
            for kept in (self._tables, self._taken_at, self._before, self._sources):
                kept.pop(router, None)
        loop = asyncio.get_running_loop()
        for router in routers:
            follower = self._followers.get(router)
            if follower is None or follower.done():
                self._sources[router] = source = self._connect(router)
                take = _taker(weakref.ref(self), router)
                follower = loop.create_task(_follow(source, take), name=f"follow {router}")
                self._followers[router] = follower
                # A handle that is dropped takes its followers with it.
                weakref.finalize(self, _stop, loop, follower).atexit = False
        if gone:
            self._compare_tables()
        for key in self._replicas.keys() - known.keys():
            self._give_row(key)
            self._replicas[key].take_behind(self._behind.get(key.router, frozenset()))
            self._show(key)
        self._show_copies()

    def take(self, router: str, table: FleetTable) -> None:
        """Replace a router's table.

        A router that has just restarted has heard of few replicas: the others keep what was known of them.
        """
        last = self._tables.get(router)
        self._taken_at[router] = self._clock()
        if last is table:
            return
        before = self._before.pop(router, {})
        if last is not None and last.router_id != table.router_id:
            before = {**before, **last.replicas}
        before = {replica_id: row for replica_id, row in before.items() if not _reported(table, replica_id)}
        if before:
            self._before[router] = before
        self._tables[router] = table
        for key in self._replicas:
            if key.router == router and self._give_row(key):
                self._show(key)
        if last is None or last.copies is not table.copies:
            self._show_copies()
        if last is None or last.adapters is not table.adapters:
            self._compare_tables()

    def take_snapshot(self, snapshot: SlotSnapshot) -> None:
        """Take what a replica's reply says of its slots."""
        key = self._keys.get(snapshot.replica_id)
        if key is None:
            return
        if self._replicas[key].take_busy(snapshot.num_busy):
            self._show_busy(key)
        if self._replicas[key].take_snapshot(snapshot):
            self._show(key)

    def take_stock(self) -> None:
        """Have the board know how long requests take by now; and forget what replicas have said of other handles'
        requests, where they have not said it since the last call."""
        hold_s = self._hold_time.mean_s
        if hold_s is not None:
            self._board.set_hold_ms(1000 * hold_s)
        for key, replica in self._replicas.items():
            if replica.doubt_busy():
                self._show_busy(key)

    def claim(self, key: ReplicaKey, adapter: str) -> None:
        """Note that a request for this adapter goes to this replica, which loads it if it has not."""
        replica = self._replicas.get(key)
        if replica is None:
            return
        self._hold_time.begin(self._clock())
        if replica.claim(adapter):
            self._board.set_hints(key.replica_id, replica.hints)
            self._notes.add(key, adapter)
        self._show_busy(key)

    def release(self, key: ReplicaKey, adapter: str) -> None:
        """Note that a request that was claimed for has ended."""
        replica = self._replicas.get(key)
        if replica is None or not replica.num_claims(adapter):
            return
        self._hold_time.end(self._clock())
        if replica.release(adapter):
            self._board.set_hints(key.replica_id, replica.hints)
            self._show_busy(key)

    def wait_for_load(self, key: ReplicaKey, adapter: str) -> None:
        """Note that a request for this adapter waits in front of this replica: it can be loaded in the meantime."""
        state = self.state(key)
        if adapter not in state.resident and adapter not in state.loading:
            self._notes.add(key, adapter)

    def state(self, key: ReplicaKey) -> ReplicaState:
        """What the replica says of itself, as far as is known; the same object until that changes."""
        replica = self._replicas.get(key)
        return UNKNOWN if replica is None else replica.state

    def entry(self, adapter: str) -> AdapterEntry | None:
        """The adapter as the fleet serves it; None where no table has it. May be called on any thread."""
        # Other threads ask, too.
        entries = (table.adapters.get(adapter) for table in list(self._tables.values()))
        return next((entry for entry in entries if entry is not None), None)

    @property
    def table_age_s(self) -> float | None:
        """Seconds since a router was last heard of, the one that has been silent for longest; None without any."""
        return self._clock() - min(self._taken_at.values()) if self._taken_at else None

    def is_warm(self, adapter: str) -> bool:
        """Whether the adapter is in a slot where it can be served. May be called on any thread."""
        return any(_is_warm(adapter, replica.state) for replica in list(self._replicas.values()))

    def load_s(self, adapter: str) -> float:
        """Seconds until the adapter can be in a slot somewhere, by the measured rate of the best place it is in.

        0 where it is in a slot, or where nothing is known. May be called on any thread.
        """
        entry = self.entry(adapter)
        states = [replica.state for replica in list(self._replicas.values())]
        if entry is None or any(_is_warm(adapter, state) for state in states):
            return 0.0
        known = [_load_s(adapter, entry, state) for state in states]
        return min((load_s for load_s in known if load_s is not None), default=0.0)

    def close(self) -> None:
        """Stop following; the tables stay."""
        for task in self._followers.values():
            task.cancel()
        self._followers.clear()
        self._notes.close()

    def _give_row(self, key: ReplicaKey) -> bool:
        table = self._tables.get(key.router)
        if table is None:
            return False
        before = self._before.get(key.router, {}).get(key.replica_id)
        return self._replicas[key].take_row(before or table.replicas.get(key.replica_id, ABSENT))

    def _show(self, key: ReplicaKey) -> None:
        replica = self._replicas[key]
        self._board.set_state(key.replica_id, replica.state)
        self._board.set_hints(key.replica_id, replica.hints)
        self._show_busy(key)

    def _show_busy(self, key: ReplicaKey) -> None:
        self._board.set_busy(key.replica_id, self._replicas[key].num_busy)

    def _compare_tables(self) -> None:
        self._behind = behind(self._tables)
        for key, replica in self._replicas.items():
            if replica.take_behind(self._behind.get(key.router, frozenset())):
                self._show(key)

    def _show_copies(self) -> None:
        tables = list(self._tables.values())
        if len(tables) == 1:
            self._board.set_copies(tables[0].copies)
            return
        copies: dict[str, tuple[str, ...]] = {}
        for table in tables:
            for adapter, replicas in table.copies.items():
                copies[adapter] = copies.get(adapter, ()) + replicas
        self._board.set_copies(copies)


def _can_serve(adapter: str, state: ReplicaState) -> bool:
    return not (state.is_stalled or adapter in state.stalled or adapter in state.refused)


def _is_warm(adapter: str, state: ReplicaState) -> bool:
    return adapter in state.resident and _can_serve(adapter, state)


def _load_s(adapter: str, entry: AdapterEntry, state: ReplicaState) -> float | None:
    """Seconds until one replica can have the adapter in a slot; None where that is not known."""
    tier = "host" if adapter in state.in_memory else "disk"
    if not _can_serve(adapter, state) or tier not in state.load_ms_per_mib or not entry.slot_bytes:
        return None
    return state.load_ms_per_mib[tier] * entry.slot_bytes / 2**20 / 1000


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
