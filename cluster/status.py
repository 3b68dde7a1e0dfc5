"""The operator's view: what should be, what replicas have acknowledged, and what is where, kept apart."""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from cluster.changes import Topic
from cluster.entry import AdapterEntry, AdapterFacts
from cluster.fleet import LastError
from cluster.member import Member, names_served
from cluster.names import served_name, staged_name
from cluster.progress import BASE
from cluster.verdict import text_of
from lora_core.portable import portable
from lora_core.types import LoRAStatus
from lora_core.workload import AdapterWork

Acknowledged = Literal["applied", "pending", "refused"]
"""What a replica last said to the newest change of an adapter: it has done it, nothing yet, or why it cannot."""

Tier = Literal["slot", "host", "disk", "none"]
"""The best place where a replica has an adapter's tensors: "disk" is the folder it loads them from."""


@portable
class AdapterOnReplica(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter's part in one replica."""

    acknowledged: Acknowledged
    tier: Tier
    error: str | None = None
    """Why it is refused, or stalled, or neither pinned nor unpinned as it should be."""
    num_running: int = 0
    num_waiting: int = 0
    oldest_idle_s: float = 0.0
    """Seconds since its oldest request there last got on."""


class AdapterReport(AdapterFacts, frozen=True, kw_only=True, gc=True):
    """One desired adapter, and what has come of it."""

    replaced_by: str | None
    """The path whose content is being loaded to take its place."""
    copies: tuple[str, ...]
    """Replicas granted to it, best first; empty where it has the one that its name gives it."""
    share: float
    """Of the fleet's work, lately."""
    replicas: dict[str, AdapterOnReplica]
    last_error: LastError | None


@portable
class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica with a current lease."""

    epoch: int
    """It has applied every change up to this one."""
    lag: int
    """Epochs by which it is behind the fleet."""
    joined: bool
    """Whether it has reported what it holds, and takes requests."""
    num_slots: int
    num_slots_used: int
    resident: tuple[str, ...]
    """Adapters in its slots, of the generations now served."""
    loading: tuple[str, ...]
    """Adapters on their way into a slot."""
    num_in_memory: int
    """Adapters in its host memory."""
    num_running: int
    num_waiting: int
    service_ms: float | None
    load_ms_per_mib: dict[str, float]
    refused: dict[str, str]
    """Adapter -> why it is not served there."""
    stalled: dict[str, str]
    """Adapter -> why it gets no requests there."""
    fault: str | None
    """Why the whole replica gets no requests, and is about to be replaced."""
    leaving: bool = False
    """Whether it gets no more requests, and ends with the last it has."""


@portable
class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet as a whole."""

    router_id: str
    """Changes when the router actor restarts."""
    epoch: int
    num_adapters: dict[str, int]
    """Adapters by state."""
    num_copies: int
    """Slots granted to adapters that should have more than one."""
    replicas: dict[str, ReplicaReport]
    failures: dict[str, LastError]
    """The last changes that failed, by the adapter's name, served or not."""


class Plan(NamedTuple):
    """What the router actor has decided of adapters, beside what was asked for."""

    copies: Mapping[str, tuple[str, ...]]
    """Name -> replicas granted to it."""
    shares: Mapping[str, float]
    """Name -> share of the fleet's work."""


class Page(NamedTuple):
    """A part of the adapters, in the order of their names."""

    adapters: list[AdapterReport]
    has_more: bool


def page(
    entries: Mapping[str, AdapterEntry],
    members: Iterable[Member],
    plan: Plan,
    failures: Mapping[str, LastError],
    *,
    after: str = "",
    limit: int = 1000,
) -> Page:
    """The first `limit` adapters whose names come after `after`."""
    members = list(members)
    names = heapq.nsmallest(limit + 1, (name for name in entries if name > after and served_name(name) == name))
    found = [adapter_report(entries[name], entries, members, plan, failures.get(name)) for name in names[:limit]]
    return Page(found, has_more=len(names) > limit)


def adapter_report(
    entry: AdapterEntry,
    entries: Mapping[str, AdapterEntry],
    members: Iterable[Member],
    plan: Plan,
    failure: LastError | None,
) -> AdapterReport:
    """One adapter, of all `entries`."""
    staged = entries.get(staged_name(entry.name))
    return AdapterReport(
        **{fact: getattr(entry, fact) for fact in AdapterFacts.__struct_fields__},
        replaced_by=None if staged is None else staged.path,
        copies=tuple(plan.copies.get(entry.name, ())),
        share=plan.shares.get(entry.name, 0.0),
        replicas={member.replica_id: _on_replica(entry, member) for member in members},
        last_error=failure,
    )


def fleet_report(
    router_id: str,
    epoch: int,
    entries: Mapping[str, AdapterEntry],
    members: Iterable[Member],
    plan: Plan,
    failures: Mapping[str, LastError],
) -> FleetReport:
    """The fleet as it is now."""
    return FleetReport(
        router_id=router_id,
        epoch=epoch,
        num_adapters=dict(Counter(entry.state for name, entry in entries.items() if served_name(name) == name)),
        num_copies=sum(len(replicas) for replicas in plan.copies.values() if len(replicas) > 1),
        replicas={member.replica_id: _replica(member, epoch, entries) for member in members},
        failures=dict(failures),
    )


def _on_replica(entry: AdapterEntry, member: Member) -> AdapterOnReplica:
    acknowledged, error = _word(entry, member)
    work, stalled = _work(member).get(entry.name), _stalled(member).get(entry.name)
    return AdapterOnReplica(
        acknowledged=acknowledged,
        tier=_tier(entry, member, acknowledged),
        error=stalled or error or _pin_fault(entry, member),
        num_running=0 if work is None else work.num_running,
        num_waiting=0 if work is None else work.num_waiting,
        oldest_idle_s=0.0 if work is None else work.oldest_idle_s,
    )


def _word(entry: AdapterEntry, member: Member) -> tuple[Acknowledged, str | None]:
    response = member.response(Topic(entry.name, is_pin=False), max(entry.generation, entry.epoch))
    if response is None:
        return "pending", None
    gone = entry.state == "unloading" and response.status is LoRAStatus.UNLOAD_NAME_NONEXISTENT
    if response.status is LoRAStatus.SUCCESS or gone:
        return "applied", None
    return "refused", text_of(response)


def _pin_fault(entry: AdapterEntry, member: Member) -> str | None:
    word = member.refusals.get(Topic(entry.name, is_pin=True))
    # Where it is not served there is nothing to pin.
    if word is None or word.response.status is LoRAStatus.PIN_NAME_NONEXISTENT:
        return None
    return f"{'not pinned' if entry.pinned else 'still pinned'}: {text_of(word.response)}"


def _tier(entry: AdapterEntry, member: Member, acknowledged: Acknowledged) -> Tier:
    match member.tier(entry.name, entry.generation):
        case "slot":
            return "slot"
        case "host":
            return "host"
    return "disk" if acknowledged == "applied" and entry.state != "unloading" else "none"


def _replica(member: Member, epoch: int, entries: Mapping[str, AdapterEntry]) -> ReplicaReport:
    held, work = member.residency, member.work
    applied = member.applied_epoch(epoch)
    adapters = _work(member).values()
    return ReplicaReport(
        epoch=applied,
        lag=epoch - applied,
        joined=held is not None,
        num_slots=member.num_slots,
        num_slots_used=0 if held is None else held.num_slots_used,
        resident=tuple(sorted(names_served(member.resident, entries))),
        loading=tuple(sorted(names_served(member.loading, entries))),
        num_in_memory=len(member.in_memory),
        num_running=sum(one.num_running for one in adapters),
        num_waiting=sum(one.num_waiting for one in adapters),
        service_ms=None if work is None else work.service_ms,
        load_ms_per_mib={} if work is None else dict(work.load_ms_per_mib),
        refused={
            topic.name: text_of(word.response)
            for topic, word in member.refusals.items()
            if topic.name in entries and not topic.is_pin
        },
        stalled=dict(_stalled(member)),
        fault=(work.fault or None) if work is not None else None,
        leaving=member.is_leaving,
    )


def _work(member: Member) -> dict[str, AdapterWork]:
    return {} if member.work is None else {one.name or BASE: one for one in member.work.adapters}


def _stalled(member: Member) -> Mapping[str, str]:
    return {} if member.work is None else member.work.stalled
