"""`FleetPicture`: what the live page shows of the fleet at one moment. Its size does not grow with the adapters."""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec

from cluster.changes import Topic
from cluster.entry import AdapterEntry
from cluster.fleet import LastError
from cluster.member import Member
from cluster.names import served_name, staged_name
from cluster.slot_ages import SlotAges
from cluster.status import FleetReport, ReplicaReport
from lora_core.portable import portable
from lora_core.workload import AdapterWork, SlotCounts

MOST_ADAPTERS = 100
MOST_QUEUES = 20
"""Of one replica, adapters that have requests and no slot."""
MOST_ERRORS = 20
"""Of one replica, and three times as many of the fleet."""

SHARE_DIGITS = 4

Place = Literal["slot", "loading", "queue"]
"""In a slot, on its way into one, or neither, with requests that wait."""


@portable
class Occupant(msgspec.Struct, frozen=True, kw_only=True):
    """What has to do with one replica's slots: an adapter there, or the base model, which needs none."""

    adapter: str | None
    """None is the base model."""
    place: Place
    since_unix_s: float | None
    """When it came into its slot, as far as is known."""
    share: float | None
    """Of the whole fleet's work, lately; None for the base model."""
    num_running: int
    num_waiting: int
    pinned: bool


@portable
class ReplicaPicture(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. Fields that `cluster.status.ReplicaReport` has, too, mean the same."""

    epoch: int
    lag: int
    joined: bool
    leaving: bool
    num_slots: int
    num_slots_used: int
    num_in_memory: int
    num_running: int
    num_waiting: int
    service_ms: float | None
    occupants: tuple[Occupant, ...]
    """What is in slots, in the order in which it came; what is on its way; what only has requests."""
    counts: SlotCounts
    """Hits, misses, evictions and loads since its engine's start."""
    refused: dict[str, str]
    """The first ones."""
    num_refused: int
    stalled: dict[str, str]
    """The first ones."""
    fault: str | None


@portable
class AdapterPicture(msgspec.Struct, frozen=True, kw_only=True):
    """One desired adapter."""

    name: str
    state: str
    """"loading", "ready" or "unloading"; "replacing" while other content is being loaded to take its place."""
    generation: int
    epoch: int
    pinned: bool
    share: float
    num_in_slots: int
    """Replicas that have it in a slot."""
    num_in_memory: int
    """Replicas that have it in host memory, in a slot as well or not."""
    num_pending: int
    """Replicas that have yet to answer to its last change."""
    num_refused: int
    """Replicas that cannot serve it."""


@portable
class FleetPicture(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment."""

    unix_s: float
    """When, by the router actor's clock, as all times here."""
    router_id: str
    epoch: int
    num_adapters: dict[str, int]
    """All of them, by state."""
    num_copies: int
    adapters: tuple[AdapterPicture, ...]
    """At most `MOST_ADAPTERS`: those that are being changed first, then the busiest, then the last changed."""
    replicas: dict[str, ReplicaPicture]
    failures: dict[str, LastError]
    """The last ones."""


class FleetNow(NamedTuple):
    """What the router actor knows at one moment."""

    report: FleetReport
    members: list[Member]
    entries: Mapping[str, AdapterEntry]
    """All desired adapters."""
    served: Mapping[str, AdapterEntry]
    """Those of them that can be asked for."""
    shares: Mapping[str, float]
    """Name -> share of the fleet's work."""
    ages: SlotAges


def fleet_picture(now: FleetNow, unix_s: float) -> FleetPicture:
    """The picture of a moment."""
    report = now.report
    failures = itertools.islice(reversed(report.failures.items()), 3 * MOST_ERRORS)
    return FleetPicture(
        unix_s=unix_s,
        router_id=report.router_id,
        epoch=report.epoch,
        num_adapters=report.num_adapters,
        num_copies=report.num_copies,
        adapters=tuple(_adapter(name, now) for name in _shown_names(now)),
        replicas={member.replica_id: _replica(member, now) for member in now.members},
        failures=dict(failures),
    )


def _replica(member: Member, now: FleetNow) -> ReplicaPicture:
    report = now.report.replicas[member.replica_id]
    return ReplicaPicture(
        epoch=report.epoch,
        lag=report.lag,
        joined=report.joined,
        leaving=report.leaving,
        num_slots=report.num_slots,
        num_slots_used=report.num_slots_used,
        num_in_memory=report.num_in_memory,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        service_ms=report.service_ms,
        occupants=tuple(_occupants(member, report, now)),
        counts=SlotCounts() if member.work is None else member.work.slots,
        refused=dict(itertools.islice(report.refused.items(), MOST_ERRORS)),
        num_refused=len(report.refused),
        stalled=dict(itertools.islice(report.stalled.items(), MOST_ERRORS)),
        fault=report.fault,
    )


def _occupants(member: Member, report: ReplicaReport, now: FleetNow) -> Iterator[Occupant]:
    work = {} if member.work is None else {one.name: one for one in member.work.adapters}

    def occupant(name: str | None, place: Place, since: float | None = None) -> Occupant:
        one, entry = work.get(name, _NO_WORK), now.served.get(name or "")
        return Occupant(
            adapter=name,
            place=place,
            since_unix_s=since,
            share=None if name is None else round(now.shares.get(name, 0.0), SHARE_DIGITS),
            num_running=one.num_running,
            num_waiting=one.num_waiting,
            pinned=entry is not None and entry.pinned,
        )

    def since(name: str) -> float:
        return now.ages.since(member.replica_id, name, member.resident[name]) or 0.0

    for name in sorted(report.resident, key=lambda name: (since(name), name)):
        yield occupant(name, "slot", since(name) or None)
    loading = [name for name in report.loading if name not in report.resident]
    for name in loading:
        yield occupant(name, "loading")
    elsewhere = [
        one for name, one in work.items() if name not in report.resident and name not in loading and _has_requests(one)
    ]
    for one in heapq.nlargest(MOST_QUEUES, elsewhere, key=_has_requests):
        yield occupant(one.name, "queue")


_NO_WORK = AdapterWork()


def _has_requests(work: AdapterWork) -> int:
    return work.num_running + work.num_waiting


def _adapter(name: str, now: FleetNow) -> AdapterPicture:
    entry, topic = now.entries[name], Topic(name, is_pin=False)
    tiers = [member.tier(name, entry.generation) for member in now.members]
    is_replaced = entry.state == "ready" and staged_name(name) in now.entries
    return AdapterPicture(
        name=name,
        state="replacing" if is_replaced else entry.state,
        generation=entry.generation,
        epoch=entry.epoch,
        pinned=entry.pinned,
        share=round(now.shares.get(name, 0.0), SHARE_DIGITS),
        num_in_slots=tiers.count("slot"),
        num_in_memory=sum(member.in_memory.get(name) == entry.generation for member in now.members),
        num_pending=sum(topic in member.pending for member in now.members),
        num_refused=sum(topic in member.refusals for member in now.members),
    )


def _shown_names(now: FleetNow) -> list[str]:
    """Names of adapters, the most telling first, each once."""
    known = (name for name in map(served_name, _telling_names(now)) if name in now.entries)
    return list(itertools.islice(_each_once(known), MOST_ADAPTERS))


def _telling_names(now: FleetNow) -> Iterator[str]:
    # What is looked for later costs nothing where enough is found before.
    if len(now.entries) > len(now.served):
        yield from sorted(now.entries.keys() - now.served.keys())
    yield from _unanswered(now.members)
    for name, _ in heapq.nlargest(MOST_ADAPTERS, now.shares.items(), key=lambda item: item[1]):
        yield name
    for entry in heapq.nlargest(MOST_ADAPTERS, now.entries.values(), key=attrgetter("epoch")):
        yield entry.name


def _each_once(names: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name not in seen:
            seen.add(name)
            yield name


def _unanswered(members: Iterable[Member]) -> Iterator[str]:
    """Some of the adapters that a replica has yet to answer about, or cannot serve."""
    for member in members:
        topics = itertools.chain(member.refusals, member.pending)
        yield from (topic.name for topic in itertools.islice(topics, MOST_ERRORS))
