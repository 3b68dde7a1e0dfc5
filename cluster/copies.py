"""Which adapters get slots on which replicas: a pure plan, made anew each period from each adapter's share of the work.

An adapter's home is its first replica in rendezvous order (`cluster.rendezvous`). The plan departs from that only as
far as it pays: a hot adapter gets more replicas, homes are moved until no replica has too much of the work, and for
each replica it says which adapters should keep a slot there. Nothing moves without need: copies are added at once and
given back after several quiet periods, and what changes in a period is bounded.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType

from cluster.draft import Draft, Host
from cluster.rendezvous import first_choices

__all__ = ["CopySettings", "Host", "Plan", "plan"]

NO_MINIMUM: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class CopySettings:
    """How eagerly copies are granted and moved."""

    headroom: float = 1.25
    """An adapter gets a replica for each part of the work that one replica has, times this."""
    quiet_periods: int = 5
    """Periods in a row in which fewer copies would do, before there are fewer."""
    churn: float = 0.25
    """At most this part of all slots is promised to another adapter, or relieved of one's work, in a period."""
    reserve: float = 0.25
    """Part of a replica's slots that is promised to nobody: for adapters that are asked for now and then. Less where
    there are about as many slots as adapters with work."""
    tolerance: float = 0.03
    """A replica may have this much more of the work than is its due before homes are moved."""
    incumbent: float = 1.25
    """How many times as popular another adapter must be to get a slot that was promised already."""
    worth: float = 0.5
    """No slot is promised to an adapter with less than this part of the work that a slot sees on average."""

    def __post_init__(self) -> None:
        least = {"headroom": 1.0, "quiet_periods": 1, "incumbent": 1.0}
        for name, value in vars(self).items():
            if not math.isfinite(value) or value < least.get(name, 0):
                raise ValueError(f"{name} is {value}; it must be a number of at least {least.get(name, 0)}")
        if self.reserve >= 1:
            raise ValueError(f"reserve is {self.reserve}; it must be below 1, or no slot can be promised")


@dataclass(frozen=True)
class Plan:
    """Where each adapter's requests should go, and which slots are promised."""

    replica_ids: tuple[str, ...] = ()
    slots: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Replicas that promise an adapter a slot, and get its requests."""
    homes: Mapping[str, str] = field(default_factory=dict)
    """Replica for the requests of an adapter without a promise, where that is not its first in rendezvous order."""
    pinned: frozenset[str] = frozenset()
    """Adapters that are in a slot of every replica by an operator's wish."""
    quiet: Mapping[str, int] = field(default_factory=dict)
    """Periods in a row in which fewer copies of an adapter would have done."""
    firsts: Mapping[str, str] = field(default_factory=dict)
    """First replica in rendezvous order of each adapter that has work."""
    fresh: Mapping[str, int] = field(default_factory=dict)
    """Periods since an adapter was promised a slot it was not promised before, while these are few."""
    keep_lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def routes(self) -> dict[str, tuple[str, ...]]:
        """What handles must be told: adapters whose replicas are not just the first in rendezvous order."""
        routes = {name: ids for name, ids in self.slots.items() if ids != (self.firsts.get(name),)}
        routes.update((name, (home,)) for name, home in self.homes.items())
        routes.update((name, self.replica_ids) for name in self.pinned)
        return routes

    def keep(self, replica_id: str) -> tuple[str, ...]:
        """Adapters whose slots on this replica should go to others last, most popular first; those pinned aside."""
        return self.keep_lists.get(replica_id, ())

    def warm(self, replica_id: str) -> tuple[str, ...]:
        """Those of `keep` to bring to a slot before requests ask for it: copies beside others, and new promises.

        An adapter that has lost the only slot it had for a while comes back with its next request. Loading it sooner
        would save that request little and cost another adapter its slot.
        """
        return tuple(name for name in self.keep(replica_id) if name in self.fresh or len(self.slots[name]) > 1)


def plan(
    shares: Mapping[str, float],
    hosts: Sequence[Host],
    settings: CopySettings = CopySettings(),
    previous: Plan | None = None,
    *,
    min_copies: Mapping[str, int] = NO_MINIMUM,
    pinned: AbstractSet[str] = frozenset(),
) -> Plan:
    """Plan the next period.

    Args:
        shares: Each adapter's share of all work; their sum is at most 1, and below it by what the base model has.
        hosts: The replicas that take requests or soon will, ids unique.
        settings: How eagerly.
        previous: The last plan. Without one, what is in slots now counts as promised, and nothing bounds the changes.
        min_copies: Least replicas that should have an adapter in a slot, where that is more than one.
        pinned: Adapters in a slot of every replica.

    Returns:
        A plan that promises no more slots than there are. Where slots are short, the most popular have them.
    """
    hosts = sorted(hosts, key=lambda host: host.replica_id)
    if not hosts:
        return Plan()
    # Pinned adapters are everywhere: their requests go wherever there is least to do.
    shares = {name: share for name, share in shares.items() if share > 0 and name not in pinned}
    min_copies = {name: number for name, number in min_copies.items() if name not in pinned}
    firsts = _firsts({*shares, *min_copies}, tuple(host.replica_id for host in hosts), previous)
    before = _resident(hosts, firsts) if previous is None else previous.slots
    copies, quiet = _num_copies(shares, hosts, settings, previous, min_copies)
    shortage = _shortage(shares, hosts, len(pinned), settings)
    draft = Draft(hosts, shares, firsts, len(pinned), settings.reserve * shortage, settings.tolerance)
    least = settings.worth * shortage * math.fsum(shares.values()) / max(1, draft.num_rooms)
    chosen = _chosen(draft.num_rooms, least, shares, copies, before, settings, min_copies)
    for name in chosen:
        draft.keep(name, before.get(name, ()), copies.get(name, 1))
    draft.settle(previous.homes if previous is not None else {})
    budget = max(1, math.ceil(settings.churn * draft.num_slots)) if previous is not None else None
    draft.grant({name: copies.get(name, 1) for name in chosen}, budget)
    draft.balance()
    slots = draft.slots()
    return Plan(
        replica_ids=tuple(host.replica_id for host in hosts),
        slots=slots,
        homes=draft.homes(),
        pinned=frozenset(pinned),
        quiet=quiet,
        firsts=firsts,
        fresh=_fresh(slots, before, previous, settings),
        keep_lists=draft.keep_lists(),
    )


def _fresh(
    slots: Mapping[str, tuple[str, ...]],
    before: Mapping[str, tuple[str, ...]],
    previous: Plan | None,
    settings: CopySettings,
) -> dict[str, int]:
    fresh = {}
    ages = previous.fresh if previous is not None else {}
    for name, ids in slots.items():
        is_new = not set(ids).issubset(before.get(name, ()))
        age = 0 if is_new else ages.get(name, settings.quiet_periods) + 1
        if age < settings.quiet_periods:
            fresh[name] = age
    return fresh


def _firsts(names: Iterable[str], replica_ids: tuple[str, ...], previous: Plan | None) -> dict[str, str]:
    known = previous.firsts if previous is not None and previous.replica_ids == replica_ids else {}
    firsts = {name: known[name] for name in names if name in known}
    others = sorted(name for name in names if name not in known)
    firsts.update(zip(others, first_choices(others, replica_ids), strict=True))
    return firsts


def _resident(hosts: Sequence[Host], firsts: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Where adapters are in slots, the first in rendezvous order in front."""
    found: dict[str, list[str]] = {}
    for host in hosts:
        for name in host.resident:
            found.setdefault(name, []).append(host.replica_id)
    return {
        name: tuple(sorted(ids, key=lambda replica_id: replica_id != firsts[name]))
        for name, ids in found.items()
        if name in firsts
    }


def _shortage(shares: Mapping[str, float], hosts: Sequence[Host], num_pinned: int, settings: CopySettings) -> float:
    """How far slots are short, from 0 to 1: where there are enough for all adapters with work, each gets its own."""
    num_slots = sum(max(0, host.num_slots - num_pinned) for host in hosts)
    missing = (len(shares) - num_slots) / max(1, num_slots)
    return min(1.0, max(0.0, missing / settings.reserve)) if settings.reserve else 1.0


def _num_copies(
    shares: Mapping[str, float],
    hosts: Sequence[Host],
    settings: CopySettings,
    previous: Plan | None,
    min_copies: Mapping[str, int],
) -> tuple[dict[str, int], dict[str, int]]:
    """Copies of the adapters that get more than one, and the quiet periods of those that would do with fewer."""
    scale = len(hosts) * settings.headroom
    copies = {name: math.ceil(share * scale) for name, share in shares.items() if share * scale > 1}
    for name, least in min_copies.items():
        copies[name] = max(copies.get(name, 1), least)
    copies = {name: min(number, len(hosts)) for name, number in copies.items()}
    quiet = {}
    for name, ids in (previous.slots if previous is not None else {}).items():
        had = min(len(ids), len(hosts))
        if copies.get(name, 1) < had and name in shares:
            passed = previous.quiet.get(name, 0) + 1 if previous is not None else 1
            if passed < settings.quiet_periods:
                quiet[name], copies[name] = passed, had
    return copies, quiet


def _chosen(
    num_rooms: int,
    least: float,
    shares: Mapping[str, float],
    copies: Mapping[str, int],
    before: Mapping[str, tuple[str, ...]],
    settings: CopySettings,
    min_copies: Mapping[str, int],
) -> list[str]:
    """Adapters to promise slots to, first those of the operator's wish, then by their work per copy.

    None with less work than `least` is among them, but for the operator's wish.
    """

    def worth(name: str) -> float:
        per_copy = shares.get(name, 0.0) / copies.get(name, 1)
        return per_copy * settings.incumbent if name in before else per_copy

    wished = {name for name, number in min_copies.items() if number > 1}
    names = [
        name
        for name, share in shares.items()
        if name in wished or share * (settings.incumbent if name in before else 1.0) >= least
    ]
    names += [name for name in wished if name not in shares]
    names.sort(key=lambda name: (name not in wished, -worth(name), name))
    chosen, left = [], num_rooms
    for name in names:
        if left <= 0:
            break
        chosen.append(name)
        left -= copies.get(name, 1)
    return chosen
