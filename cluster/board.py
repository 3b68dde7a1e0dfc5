"""`Board`: the replicas as one handle sees them, and where its next request goes.

The policy is `cluster.placement.rank`, to the same order. Here what each replica is and holds is kept in arrays and
indices that change with the news, so that a decision takes a few vector operations over the replicas and looks at no
adapter but its own. What requests have in common is kept, too: the rendezvous order of each adapter, and what a load of
so many MiB would cost on each replica, until there is news of one.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.copy_index import NOWHERE, CopyIndex
from cluster.fleet import ReplicaState
from cluster.placement import NOTHING, PlacementSettings, ReplicaView, Terms, cap_on, terms, turnovers
from cluster.progress import BASE
from cluster.rendezvous import replica_hashes, weights

Floats = NDArray[np.float64]
Indices = NDArray[np.uint16 | np.uint32]
"""Numbers of replicas, as small as they can be: many are kept."""

_UNKNOWN = ReplicaState()
_ORDERS_KEPT, _ORDER_BYTES_KEPT = 1 << 17, 32 << 20
"""Adapters whose rendezvous order is remembered, and what these orders may take."""
_FULL, _HOPELESS = 2, 4
"""What puts a replica in a later group for a request; being above the load cap counts 1."""
_SIZES_KEPT = 64
"""Sizes of adapters for which the costs of a load are remembered."""


class Order(NamedTuple):
    """Where a request may go."""

    open: list[str]
    """Replica ids, best first: those that are not full and can serve the adapter. Where none of all can, each may."""
    full: list[str]
    """Full ones, best first; only filled in where `open` has all there are and room for more."""


class Board:
    """Decides for one handle. Not thread-safe.

    Args:
        settings: Weights and cap.
    """

    def __init__(self, settings: PlacementSettings) -> None:
        self.settings = settings
        self.replica_ids: list[str] = []
        """Sorted."""
        self._copies: Mapping[str, tuple[str, ...]] = {}
        self._states: dict[str, ReplicaState] = {}
        self._hints: dict[str, frozenset[str]] = {}
        self._counts: dict[str, int] = {}
        self._busy: dict[str, int] = {}
        self._hold_ms = settings.hold_ms
        self._capacities: dict[str, int] = {}
        self._arrange()

    # News

    def set_replicas(self, capacities: Mapping[str, int]) -> None:
        """The replicas there are now, each with how many requests it takes at once. Those that stay are remembered."""
        self._capacities = dict(capacities)
        self._states = {name: state for name, state in self._states.items() if name in capacities}
        self._hints = {name: hints for name, hints in self._hints.items() if name in capacities}
        self._counts = {name: count for name, count in self._counts.items() if name in capacities}
        self._busy = {name: count for name, count in self._busy.items() if name in capacities}
        self._arrange()

    def set_in_flight(self, replica_id: str, num_in_flight: int) -> None:
        """Requests a replica has, as far as is known. Unknown replicas are ignored, here and below."""
        index = self._index.get(replica_id)
        if index is not None:
            self._total += num_in_flight - self._counts.get(replica_id, 0)
            self._counts[replica_id] = num_in_flight
            self._in_flight[index] = num_in_flight
            self._full[index] = _FULL if num_in_flight >= self._capacities[replica_id] else 0
            self._wait[index] = num_in_flight * self._service_ms[index]

    def set_state(self, replica_id: str, state: ReplicaState) -> None:
        """What a replica holds and has measured."""
        index = self._index.get(replica_id)
        if index is None or self._states.get(replica_id) is state:
            return
        self._states[replica_id] = state
        self._enter(index, state)

    def set_hints(self, replica_id: str, adapters: frozenset[str]) -> None:
        """Loads on a replica that this handle has caused and no news has shown yet: they count as under way."""
        index = self._index.get(replica_id)
        if index is not None and self._hints.get(replica_id, frozenset()) != adapters:
            self._hints[replica_id] = adapters
            self._enter_loading(index)
            self._weigh_evictions([index])

    def set_busy(self, replica_id: str, num_busy: int) -> None:
        """Adapters on a replica whose slots no other can have now, as far as is known."""
        index = self._index.get(replica_id)
        if index is not None and self._busy.get(replica_id, 0) != num_busy:
            self._busy[replica_id] = num_busy
            self._weigh_slots(index)

    def set_hold_ms(self, hold_ms: float) -> None:
        """How long a request keeps its adapter in a slot, as measured."""
        self._hold_ms = hold_ms
        for index in range(len(self.replica_ids)):
            self._weigh_slots(index)

    def set_copies(self, copies: Mapping[str, tuple[str, ...]]) -> None:
        """Replicas that the plan grants adapters, where they are not the first in rendezvous order alone. Kept."""
        self._copies = copies

    # Questions

    def num_in_flight(self, replica_id: str) -> int:
        """Requests a replica has, as last set."""
        return self._counts.get(replica_id, 0)

    def holders(self, adapter: str) -> list[str]:
        """Replicas that have the adapter in a slot, or on its way into one."""
        return [self.replica_ids[index] for index in sorted(self._holders(adapter))]

    def holds(self, adapter: str, replica_id: str) -> bool:
        """Whether the replica is one of `holders`."""
        return self._index.get(replica_id) in self._holders(adapter)

    def num_held(self, replica_id: str) -> int:
        """Adapters that the replica has in slots or on their way there."""
        return len(self._residents.of(self._index[replica_id]) | self._loading.of(self._index[replica_id]))

    def first(self, adapter: str | None, *, mib: float = 0.0, prefix_ms: Mapping[str, float] = NOTHING) -> str | None:
        """The best replica, full ones included where all are; None without replicas."""
        if not self.replica_ids:
            return None
        if adapter is not None and not prefix_ms and not self._choosy:
            home = self._warm_home(adapter)
            if home is not None:
                return self.replica_ids[home]
        order = self.order(adapter, mib=mib, limit=1, prefix_ms=prefix_ms)
        return (order.open or order.full)[0]

    def order(
        self, adapter: str | None, *, mib: float = 0.0, limit: int = 8, prefix_ms: Mapping[str, float] = NOTHING
    ) -> Order:
        """The best replicas for a request, as `cluster.placement.rank` has them.

        Args:
            adapter: Its name; None is the base model.
            mib: What it takes in a slot, in MiB; 0: not known.
            limit: At most so many.
            prefix_ms: By replica id, the cost of computing the prompt there, less what its cache has.
        """
        if not self.replica_ids:
            return Order([], [])
        # From what matters least to what matters most: each sort leaves what it finds equal as it was.
        order = self._hash_order(adapter or "")
        order = order[self._costs(adapter, mib, prefix_ms)[order].argsort(kind="stable")]
        groups = self._groups(adapter)[order]
        by_group = groups.argsort(kind="stable")[:limit]
        ids, open_ids, full_ids = self.replica_ids, [], []
        for index, group in zip(order[by_group].tolist(), groups[by_group].tolist(), strict=True):
            if group < _FULL:
                open_ids.append(ids[index])
            elif group < _HOPELESS:
                full_ids.append(ids[index])
        return Order(open_ids, full_ids)

    def view(self, replica_id: str) -> ReplicaView:
        """One replica as `rank` takes it."""
        state = self._states.get(replica_id, _UNKNOWN)
        return ReplicaView(
            replica_id=replica_id,
            in_flight=self.num_in_flight(replica_id),
            capacity=self._capacities[replica_id],
            resident=state.resident,
            in_memory=state.in_memory,
            refused=state.refused | state.stalled,
            loading=(state.loading | self._hints.get(replica_id, frozenset())) - state.resident,
            num_slots=state.num_slots,
            num_slots_used=state.num_slots_used,
            num_busy=self._busy.get(replica_id, 0),
            hold_ms=self._hold_ms,
            is_stalled=state.is_stalled,
            service_ms=state.service_ms,
            load_ms_per_mib=state.load_ms_per_mib,
        )

    def terms(self, adapter: str | None, replica_id: str, *, mib: float = 0.0) -> Terms:
        """The score of one replica, term by term."""
        index = self._index[replica_id]
        homes = [] if adapter is None else self._homes_now(adapter, self._holders(adapter))
        return terms(
            adapter, self.view(replica_id), self.settings, mib=mib, is_granted=adapter is None or index in homes,
            only_last=self._has_only_last(index),
        )  # fmt: skip

    # Scores, over all replicas

    def _costs(self, adapter: str | None, mib: float, prefix_ms: Mapping[str, float]) -> Floats:
        """`Terms.cost` of each replica, `[R]`."""
        holders: frozenset[int] | set[int] = NOWHERE
        homes: list[int] = []
        if adapter is None:
            cost = np.zeros(len(self.replica_ids))
        else:
            # Most replicas have the adapter nowhere and are not its homes; then come the few that differ.
            from_disk, from_memory = self._load_costs(mib)
            holders = self._holders(adapter)
            homes = self._homes_now(adapter, holders)
            cost = from_disk + 2 * self._stray_ms
            # Asking each replica's own set beats an index of all, which every piece of news would have to change.
            for index in [index for index, names in enumerate(self._in_memory) if adapter in names]:
                cost[index] = from_memory[index] + 2 * self._stray_ms
            for index in holders:
                cost[index] = self._stray_ms
            for index in homes:
                load_costs = from_memory if adapter in self._in_memory[index] else from_disk
                cost[index] = 0.0 if index in holders else load_costs[index]
        if prefix_ms and "prefix" not in self.settings.without:
            cost += np.array([prefix_ms.get(replica_id, 0.0) for replica_id in self.replica_ids])
        if adapter is None or (holders and not self._stray_ms):
            cost += self._wait
        elif holders:
            for index in holders.union(homes):
                cost[index] += self._wait[index]
        return cost

    def _load_costs(self, mib: float) -> tuple[Floats, Floats]:
        """What a load of so many MiB costs on each replica, from its disk and from its host memory, `[R]` each."""
        found = self._loads.get(mib)
        if found is None:
            if len(self._loads) >= _SIZES_KEPT:
                self._loads.clear()
            host_ms: Floats | float = self.settings.load_ms
            disk_ms: Floats | float = self.settings.fetch_ms
            if mib:
                host_ms = mib * self._host_slope + self._host_base
                disk_ms = mib * self._disk_slope + self._disk_base
            found = self._loads[mib] = self._queued(disk_ms, host_ms), self._queued(host_ms, host_ms)
        return found

    def _queued(self, load_ms: Floats | float, host_ms: Floats | float) -> Floats:
        """A load with what comes before it: loads, and evictions."""
        cost = np.zeros(len(self.replica_ids))
        if "load" not in self.settings.without:
            cost += load_ms
        if "ahead" not in self.settings.without:
            cost += self._num_loading * host_ms
        return cost + self._evict_ms + self._slot_wait_ms

    def _groups(self, adapter: str | None) -> NDArray[np.int8]:
        """The group of each replica, `[R]`."""
        groups: NDArray[np.int8] = (self._in_flight >= self._cap()).view(np.int8) + self._full
        excluded = self._hopeless(adapter)
        if 0 < len(excluded) < len(self.replica_ids):
            groups[excluded] = _HOPELESS
        return groups

    def _warm_home(self, adapter: str) -> int | None:
        """The best replica, where it is plain that it is a home that holds the adapter: no other can cost less."""
        cap, holders = self._cap(), self._holders(adapter)
        ready = []
        for index in self._homes(adapter):
            if self._in_flight[index] < min(cap, self._capacity[index]):
                if index not in holders:
                    return None
                ready.append((self._wait[index], index))
        if not ready:
            return None
        wait_ms, best = min(ready)
        is_tied = sum(wait == wait_ms for wait, _ in ready) > 1
        elsewhere_ms = min(self._wait.min() + self._stray_ms, 2 * self._stray_ms)
        return None if is_tied or wait_ms >= elsewhere_ms else best

    def _cap(self) -> float:
        return cap_on(self._total, len(self.replica_ids), self.settings)

    def _holders(self, adapter: str) -> frozenset[int] | set[int]:
        return self._residents.holders(adapter) | self._loading.holders(adapter)

    def _homes(self, adapter: str) -> list[int]:
        granted = self._copies.get(adapter)
        if granted is not None:
            homes = [self._index[replica_id] for replica_id in granted if replica_id in self._index]
            if homes:
                return homes
        return [int(self._hash_order(adapter)[0])]

    def _homes_now(self, adapter: str, holders: AbstractSet[int]) -> list[int]:
        """Where it belongs as things are: `_homes`, and who stands in for them."""
        homes = self._homes(adapter)
        if holders:
            return [*homes, *holders] if holders.isdisjoint(homes) else homes
        if not self._slot_wait_ms[homes].all():
            return homes
        most = self.settings.lend_below * self._total
        lenders: list[int] = np.flatnonzero(self._in_flight * len(self.replica_ids) <= most).tolist()
        return [*homes, *lenders]

    def _hash_order(self, adapter: str) -> Indices:
        """Replicas in rendezvous order, `[R]`."""
        order = self._orders.get(adapter)
        if order is None:
            if len(self._orders) >= self._most_orders:
                self._orders.clear()
            found = np.argsort(~weights(adapter, self._hashes), kind="stable")
            order = self._orders[adapter] = found.astype(self._index_type)
        return order

    def _hopeless(self, adapter: str | None) -> list[int]:
        if not self._choosy:
            return []
        name = BASE if adapter is None else adapter
        states = {index: self._states[self.replica_ids[index]] for index in self._choosy}
        return [
            index
            for index, state in states.items()
            if state.is_stalled or name in state.refused or name in state.stalled
        ]

    # What is kept of each replica

    def _arrange(self) -> None:
        """Make rows for the replicas there are, and fill in what is known of them."""
        self.replica_ids = sorted(self._capacities)
        num = len(self.replica_ids)
        self._index = {replica_id: index for index, replica_id in enumerate(self.replica_ids)}
        self._hashes = replica_hashes(self.replica_ids)
        self._capacity = np.array([self._capacities[replica_id] for replica_id in self.replica_ids], dtype=np.float64)
        self._in_flight, self._wait, self._num_loading, self._evict_ms = (np.zeros(num) for _ in range(4))
        self._service_ms, self._host_slope, self._host_base, self._disk_slope, self._disk_base = (
            np.zeros(num) for _ in range(5)
        )
        self._in_memory: list[AbstractSet[str]] = [frozenset()] * num
        self._choosy: set[int] = set()
        self._full = np.zeros(num, dtype=np.int8)
        self._index_type = np.dtype(np.uint16 if num < 1 << 16 else np.uint32)
        self._orders: dict[str, Indices] = {}
        self._most_orders = min(_ORDERS_KEPT, _ORDER_BYTES_KEPT // (self._index_type.itemsize * max(1, num)))
        self._loads: dict[float, tuple[Floats, Floats]] = {}
        self._residents, self._loading = CopyIndex(num), CopyIndex(num)
        self._slot_wait_ms = np.zeros(num)
        self._stray_ms = self.settings.ms("stray")
        self._total = 0
        counts, self._counts = self._counts, {}
        for index, replica_id in enumerate(self.replica_ids):
            self._enter(index, self._states.get(replica_id, _UNKNOWN))
            self.set_in_flight(replica_id, counts.get(replica_id, 0))

    def _enter(self, index: int, state: ReplicaState) -> None:
        settings, replica_id = self.settings, self.replica_ids[index]
        service_ms = settings.wait_ms if state.service_ms is None else state.service_ms
        self._service_ms[index] = 0.0 if "wait" in settings.without else service_ms
        self._wait[index] = self._counts.get(replica_id, 0) * self._service_ms[index]
        host, disk = state.load_ms_per_mib.get("host"), state.load_ms_per_mib.get("disk")
        self._host_slope[index], self._host_base[index] = (0.0, settings.load_ms) if host is None else (host, 0.0)
        self._disk_slope[index], self._disk_base[index] = (0.0, settings.fetch_ms) if disk is None else (disk, 0.0)
        self._in_memory[index] = state.in_memory
        if state.is_stalled or state.refused or state.stalled:
            self._choosy.add(index)
        else:
            self._choosy.discard(index)
        self._weigh_slots(index)
        touched = self._residents.set(index, state.resident)
        self._enter_loading(index)
        self._weigh_evictions({index, *touched})

    def _weigh_slots(self, index: int) -> None:
        if "busy" in self.settings.without:
            return
        replica_id = self.replica_ids[index]
        num_slots = self._states.get(replica_id, _UNKNOWN).num_slots
        wait_ms = turnovers(num_slots, self._busy.get(replica_id, 0)) * self._hold_ms
        if wait_ms != self._slot_wait_ms[index]:
            self._slot_wait_ms[index] = wait_ms
            self._loads.clear()

    def _enter_loading(self, index: int) -> None:
        replica_id = self.replica_ids[index]
        reported = self._states.get(replica_id, _UNKNOWN).loading
        loading = (reported | self._hints.get(replica_id, frozenset())) - self._residents.of(index)
        self._loading.set(index, loading)
        self._num_loading[index] = len(loading)

    def _weigh_evictions(self, indices: Iterable[int]) -> None:
        self._loads.clear()
        evict_ms, last_copy_ms = self.settings.ms("evict"), self.settings.ms("last_copy")
        for index in indices:
            state = self._states.get(self.replica_ids[index], _UNKNOWN)
            is_full = state.num_slots and state.num_slots_used + self._num_loading[index] >= state.num_slots
            last_ms = last_copy_ms if self._has_only_last(index) else 0.0
            self._evict_ms[index] = evict_ms + last_ms if is_full else 0.0

    def _has_only_last(self, index: int) -> bool:
        num_used = self._states.get(self.replica_ids[index], _UNKNOWN).num_slots_used
        return 0 < num_used <= self._residents.num_last(index)
