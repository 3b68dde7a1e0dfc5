"""Where a request goes: pure functions on plain data, no Ray, no clock.

Replicas are ordered by a score in milliseconds (`terms`), under a cap on load (bounded-load consistent hashing,
Mirrokni et al. 2018). Ties follow rendezvous hashing, so that handles that know nothing of one another agree; so does
an adapter's home, unless a plan (`cluster.copies`) grants it other replicas.

`rank` is the readable truth; `cluster.board` comes to the same order faster, for a handle that decides all the time.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from cluster.progress import BASE
from cluster.rendezvous import hash_order, weight

__all__ = [
    "TERMS",
    "PlacementSettings",
    "ReplicaView",
    "Terms",
    "cap_on",
    "hash_order",
    "load_cap",
    "rank",
    "terms",
    "turnovers",
    "weight",
]

TERMS = ("wait", "load", "ahead", "evict", "last_copy", "busy", "prefix", "stray", "cap")
"""What `PlacementSettings.without` can switch off."""

NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """Weights of the score, for what a replica has not measured itself."""

    load_cap: float = 1.25
    """A replica above this many times the mean requests in flight is passed over while another is below; 0: no cap."""
    cap_slack: float = 1.3
    """Added to the cap, times the square root of the mean: what chance alone does to a queue is no imbalance."""
    wait_ms: float = 5.0
    """Cost of one request in flight: what a further sequence in the batch slows the others by, over an answer."""
    load_ms: float = 20.0
    """Cost of bringing an adapter from host memory to a slot."""
    fetch_ms: float = 500.0
    """Cost of bringing an adapter to a slot on a replica not known to have it in memory: its files are read first."""
    evict_ms: float = 10.0
    """Further cost where another adapter loses its slot."""
    last_copy_ms: float = 20.0
    """Further cost where that adapter is in no slot of another replica, whichever it is."""
    hold_ms: float = 1_000.0
    """How long a request keeps its adapter in a slot, where the handle has not measured it. An adapter without a slot
    waits for some part of this where requests keep all of a replica's: see `turnovers`."""
    lend_below: float = 0.7
    """A replica takes an adapter that is in no slot, and whose own replicas have none to give, as its own while it has
    at most this part of the mean requests in flight. With more it would get too much of the work in the long run."""
    stray_ms: float = 10_000.0
    """Cost of a replica that the plan does not grant the adapter, while one that it does has it in a slot: a further
    copy takes a slot that others are sent there for, and they then take one from others again. So an adapter spreads
    when its replicas are above the cap, and hardly before. Twice as much where it has no slot."""
    without: Sequence[str] = ()
    """Names of terms (`TERMS`) to leave out, to see what each is worth."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "without" and (not math.isfinite(value) or value < 0):
                raise ValueError(f"{name} is {value}; it must be a number of at least 0")
        if 0 < self.load_cap < 1:
            raise ValueError(f"load_cap is {self.load_cap}; it must be at least 1, or 0 for no cap")
        without = (self.without,) if isinstance(self.without, str) else tuple(self.without)
        if unknown := [term for term in without if term not in TERMS]:
            raise ValueError(f"without is {unknown}; it takes some of {', '.join(TERMS)}")
        object.__setattr__(self, "without", without)

    def ms(self, term: str) -> float:
        """The weight of a term that has a fixed one ("evict", "last_copy", "stray"); 0 where it is left out."""
        return 0.0 if term in self.without else float(getattr(self, f"{term}_ms"))


@dataclass(frozen=True)
class ReplicaView:
    """One replica as a handle sees it now."""

    replica_id: str
    in_flight: int = 0
    """Requests it has, as far as is known."""
    capacity: int = 1_000_000
    """Requests it takes at once; at this many it is full."""
    resident: AbstractSet[str] = frozenset()
    """Adapters in a slot."""
    in_memory: AbstractSet[str] = frozenset()
    """Adapters in host memory."""
    refused: AbstractSet[str] = frozenset()
    """Adapters it cannot serve, or whose requests there make no progress; so may those of the base model (`BASE`)."""
    loading: AbstractSet[str] = frozenset()
    """Adapters on their way into a slot, not resident yet."""
    num_slots: int = 0
    """0: not known."""
    num_slots_used: int = 0
    num_busy: int = 0
    """Adapters whose requests it has, or that are pinned: no other adapter can have their slots now."""
    hold_ms: float | None = None
    """Measured time for which a request keeps its adapter in a slot; None: not known."""
    is_stalled: bool = False
    """No request there makes progress."""
    service_ms: float | None = None
    """Measured cost of one request in flight; None: not known."""
    load_ms_per_mib: Mapping[str, float] = field(default_factory=dict)
    """Measured milliseconds for a MiB of adapter into a slot, by where it comes from ("host", "disk")."""

    def cannot_serve(self, adapter: str | None) -> bool:
        """Whether a request for it has no hope there."""
        return self.is_stalled or (BASE if adapter is None else adapter) in self.refused

    def holds(self, adapter: str | None) -> bool:
        """Whether the adapter is in a slot, or on its way into one."""
        return adapter in self.resident or adapter in self.loading


class Terms(NamedTuple):
    """The score of one replica for one request, by term."""

    wait_ms: float
    load_ms: float
    holds: bool
    """The adapter is in a slot, or on its way into one."""
    stray_ms: float = 0.0
    prefix_ms: float = 0.0

    def cost(self, is_somewhere: bool) -> float:
        """All of them in milliseconds; the wait only where it should decide.

        That is not so where no replica holds the adapter, nor on one to which it would be new and is not granted: by
        their names, the requests that are too many for an adapter's replicas meet on one further replica.
        """
        counts_wait = is_somewhere and (self.holds or self.stray_ms == 0)
        # The order of additions is that of `cluster.board`, to the last bit.
        return (self.load_ms + self.stray_ms) + self.prefix_ms + (self.wait_ms if counts_wait else 0.0)


def rank(
    adapter: str | None,
    replicas: Sequence[ReplicaView],
    settings: PlacementSettings,
    *,
    mib: float = 0.0,
    granted: Sequence[str] = (),
    prefix_ms: Mapping[str, float] = NOTHING,
) -> list[str]:
    """Order all replicas for a request, best first.

    Replicas that cannot serve the adapter come last, full ones before them, then those above the load cap. Where a
    replica holds the adapter the score decides; otherwise its part without the wait, whatever the load, so that one
    adapter's requests meet on one replica. What is left equal follows `weight`. Base requests go by load alone.

    Args:
        adapter: Its name; None is the base model.
        replicas: Views in any order, ids unique.
        settings: Weights and cap.
        mib: What the adapter takes in a slot, in MiB; 0: not known.
        granted: Replicas that a plan grants it; where none of them is there, the first in rendezvous order. Those that
            hold it stand in for them while none of these does. So do those with little to do, where nobody holds it and
            these have no slot to give.
        prefix_ms: By replica id, the cost of computing the prompt there, less what its cache has.

    Returns:
        Every replica's id, once.
    """
    cap = load_cap(replicas, settings)
    homes = _homes(adapter, replicas, granted)
    holders = {view.replica_id for view in replicas if view.holds(adapter)}
    if holders.isdisjoint(homes):
        homes = homes | holders
    if not holders and all(_slot_wait_ms(view, settings) for view in replicas if view.replica_id in homes):
        most = settings.lend_below * sum(view.in_flight for view in replicas)
        homes = homes | {view.replica_id for view in replicas if view.in_flight * len(replicas) <= most}
    num_copies = Counter(name for view in replicas for name in view.resident)
    scores = {}
    for view in replicas:
        only_last = view.num_slots_used > 0 and _num_last(view, num_copies) >= view.num_slots_used
        scores[view.replica_id] = terms(
            adapter, view, settings, mib=mib, is_granted=view.replica_id in homes, only_last=only_last,
            prefix_ms=prefix_ms.get(view.replica_id, 0.0),
        )  # fmt: skip
    somewhere = adapter is None or any(score.holds for score in scores.values())

    def key(view: ReplicaView) -> tuple[bool, bool, bool, float, int, str]:
        cost = scores[view.replica_id].cost(somewhere)
        full, above = view.in_flight >= view.capacity, view.in_flight >= cap
        hopeless = view.cannot_serve(adapter)
        return hopeless, full, above, cost, -weight(adapter or "", view.replica_id), view.replica_id

    return [view.replica_id for view in sorted(replicas, key=key)]


def turnovers(num_slots: int, num_busy: int) -> float:
    """How often all slots of a replica change hands before one more adapter has its turn: as many as wait before it,
    and itself, over the slots. 0 where one is to be had now, or `num_slots` is not known.

    To the middle of a half: where no replica has a slot to give, handles that have not heard of one another should
    still agree on one.
    """
    return 0.25 + 0.5 * (2 * (num_busy - num_slots) // num_slots) if 0 < num_slots <= num_busy else 0.0


def load_cap(replicas: Sequence[ReplicaView], settings: PlacementSettings) -> float:
    """Requests in flight at which a replica is passed over, the request to place included in the mean.

    At least one replica is always below it.
    """
    return cap_on(sum(view.in_flight for view in replicas), len(replicas), settings)


def cap_on(num_in_flight: int, num_replicas: int, settings: PlacementSettings) -> float:
    """The load cap of a fleet with so many requests in flight on so many replicas."""
    if settings.load_cap == 0 or "cap" in settings.without or num_replicas == 0:
        return math.inf
    mean = (1 + num_in_flight) / num_replicas
    return math.ceil(settings.load_cap * mean + settings.cap_slack * math.sqrt(mean))


def terms(
    adapter: str | None,
    view: ReplicaView,
    settings: PlacementSettings,
    *,
    mib: float = 0.0,
    is_granted: bool = True,
    only_last: bool = False,
    prefix_ms: float = 0.0,
) -> Terms:
    """Score one replica: what the request would wait for others, and for its adapter.

    A load waits for a slot that no request needs, and for the loads before it. It evicts once these have taken the
    free slots.

    Args:
        adapter, view, settings, mib, prefix_ms: As for `rank`.
        is_granted: The replica is one of the adapter's homes.
        only_last: Every adapter in its slots is in a slot of no other replica.
    """
    service_ms = settings.wait_ms if view.service_ms is None else view.service_ms
    wait_ms = 0.0 if "wait" in settings.without else view.in_flight * service_ms
    prefix_ms = 0.0 if "prefix" in settings.without else prefix_ms
    if adapter is None:
        return Terms(wait_ms, 0.0, False, 0.0, prefix_ms)
    stray_ms = 0.0 if is_granted else settings.ms("stray")
    if view.holds(adapter):
        return Terms(wait_ms, 0.0, True, stray_ms, prefix_ms)
    return Terms(wait_ms, _load_ms(adapter, view, settings, mib, only_last), False, 2 * stray_ms, prefix_ms)


def _load_ms(adapter: str, view: ReplicaView, settings: PlacementSettings, mib: float, only_last: bool) -> float:
    host_ms = _transfer_ms(view.load_ms_per_mib.get("host"), mib, settings.load_ms)
    disk_ms = _transfer_ms(view.load_ms_per_mib.get("disk"), mib, settings.fetch_ms)
    load_ms = 0.0
    if "load" not in settings.without:
        load_ms = host_ms if adapter in view.in_memory else disk_ms
    if "ahead" not in settings.without:
        load_ms += len(view.loading) * host_ms
    if view.num_slots and view.num_slots_used + len(view.loading) >= view.num_slots:
        load_ms += settings.ms("evict") + (settings.ms("last_copy") if only_last else 0.0)
    return load_ms + _slot_wait_ms(view, settings)


def _slot_wait_ms(view: ReplicaView, settings: PlacementSettings) -> float:
    """How long an adapter that has no slot there waits until the requests of another have ended."""
    if "busy" in settings.without:
        return 0.0
    return turnovers(view.num_slots, view.num_busy) * (settings.hold_ms if view.hold_ms is None else view.hold_ms)


def _transfer_ms(ms_per_mib: float | None, mib: float, otherwise_ms: float) -> float:
    return otherwise_ms if ms_per_mib is None or mib == 0 else mib * ms_per_mib


def _homes(adapter: str | None, replicas: Sequence[ReplicaView], granted: Sequence[str]) -> AbstractSet[str]:
    """Where an adapter belongs."""
    ids = {view.replica_id for view in replicas}
    homes = ids.intersection(granted)
    if homes or adapter is None or not ids:
        return homes
    return {min(ids, key=lambda replica_id: (-weight(adapter, replica_id), replica_id))}


def _num_last(view: ReplicaView, num_copies: Mapping[str, int]) -> int:
    return sum(num_copies[name] == 1 for name in view.resident)
