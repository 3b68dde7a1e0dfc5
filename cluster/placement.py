"""Where a request goes: pure functions on plain data, no Ray, no clock.

Replicas are ordered by a score in milliseconds (`terms`), under a cap on load (bounded-load consistent hashing,
Mirrokni et al. 2018). Ties, and adapters that no replica holds, follow rendezvous hashing (highest random weight,
Thaler and Ravishankar 1998), so that handles that know nothing of one another agree.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """Weights of the score; a weight of 0 switches its term off."""

    load_cap: float = 1.25
    """A replica above this many times the mean requests in flight is passed over while another is below; 0: no cap."""
    wait_ms: float = 5.0
    """Cost of one request in flight: what a further sequence in the batch slows the others by, over an answer."""
    load_ms: float = 20.0
    """Cost of bringing an adapter from host memory to a slot."""
    fetch_ms: float = 500.0
    """Cost of bringing an adapter to a slot on a replica not known to have it in memory: its files are read first."""
    evict_ms: float = 10.0
    """Further cost where another adapter loses its slot."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} is {value}; it must be a number of at least 0")
        if 0 < self.load_cap < 1:
            raise ValueError(f"load_cap is {self.load_cap}; it must be at least 1, or 0 for no cap")


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
    """Adapters it cannot serve."""
    loading: AbstractSet[str] = frozenset()
    """Adapters on their way into a slot, not resident yet."""
    num_slots: int = 0
    """0: not known."""
    num_slots_used: int = 0


class Terms(NamedTuple):
    """The score of one replica for one request, by term."""

    wait_ms: float
    load_ms: float
    holds: bool
    """The adapter is in a slot, or on its way into one."""


def rank(adapter: str | None, replicas: Sequence[ReplicaView], settings: PlacementSettings) -> list[str]:
    """Order all replicas for a request, best first.

    Replicas that refused the adapter come last, full ones before them, then those above the load cap. Where a replica
    holds the adapter the score decides; otherwise the cost of the load alone does, whatever the load, so that one
    adapter's requests meet on one replica. What is left equal follows `weight`. Base requests go by load alone.

    Args:
        adapter: Its name; None is the base model.
        replicas: Views in any order, ids unique.
        settings: Weights and cap.

    Returns:
        Every replica's id, once.
    """
    cap = load_cap(replicas, settings)
    scores = {view.replica_id: terms(adapter, view, settings) for view in replicas}
    somewhere = adapter is None or any(score.holds for score in scores.values())

    def key(view: ReplicaView) -> tuple[bool, bool, bool, float, int, str]:
        score = scores[view.replica_id]
        cost = score.load_ms + (score.wait_ms if somewhere else 0.0)
        full, above = view.in_flight >= view.capacity, view.in_flight >= cap
        refused = adapter in view.refused
        return refused, full, above, cost, -weight(adapter or "", view.replica_id), view.replica_id

    return [view.replica_id for view in sorted(replicas, key=key)]


def load_cap(replicas: Sequence[ReplicaView], settings: PlacementSettings) -> float:
    """Requests in flight at which a replica is passed over, the request to place included in the mean.

    At least one replica is always below it.
    """
    if settings.load_cap == 0 or not replicas:
        return math.inf
    total = 1 + sum(view.in_flight for view in replicas)
    return math.ceil(settings.load_cap * total / len(replicas))


def terms(adapter: str | None, view: ReplicaView, settings: PlacementSettings) -> Terms:
    """Score one replica: what the request would wait for others, and for its adapter.

    A load waits for the loads before it, and evicts once these have taken the free slots.
    """
    wait_ms = view.in_flight * settings.wait_ms
    if adapter is None:
        return Terms(wait_ms, 0.0, False)
    if adapter in view.resident or adapter in view.loading:
        return Terms(wait_ms, 0.0, True)
    load_ms = settings.load_ms if adapter in view.in_memory else settings.fetch_ms
    load_ms += len(view.loading) * settings.load_ms
    if view.num_slots and view.num_slots_used + len(view.loading) >= view.num_slots:
        load_ms += settings.evict_ms
    return Terms(wait_ms, load_ms, False)


def hash_order(adapter: str, replica_ids: Iterable[str]) -> list[str]:
    """All replicas in rendezvous order for an adapter: a replica that joins or leaves moves only its own share."""
    return sorted(replica_ids, key=lambda replica_id: (-weight(adapter, replica_id), replica_id))


@functools.lru_cache(maxsize=1 << 17)
def weight(adapter: str, replica_id: str) -> int:
    """Rendezvous weight of a pair: 64 bits, the same in every process."""
    digest = hashlib.blake2b(
        f"{len(adapter)}:{adapter}{replica_id}".encode(errors="surrogatepass"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big")
