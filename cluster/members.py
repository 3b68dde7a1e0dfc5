"""The live replicas: leases, acknowledgements and residency, as the router actor sees them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.changes import Topic
from cluster.entry import AdapterEntry
from cluster.fleet import Outcome, ReplicaState
from cluster.verdict import text_of
from lora_core.errors import ReplicaUnknown
from lora_core.messages import Residency
from lora_core.types import AdapterRef, LoRAResponse, LoRAStatus

NOTHING_REPORTED = Residency(sequence=-1, resident=[], loaded=[])
"""What is known of a replica that has not reported its residency yet."""

AS_REGISTERED = LoRAResponse(LoRAStatus.SUCCESS, "it was so when the replica registered")
"""What stands for the answer of a replica that registered after a change, and had nothing to do for it."""


class Word(NamedTuple):
    """A replica's last word on a topic, and the epoch it acknowledged with it."""

    epoch: int
    response: LoRAResponse


@dataclass
class Member:
    """One live replica."""

    replica_id: str
    expires_at: float
    since: int
    """Last change before it registered."""
    behind: set[Topic]
    """What it was told to change when it registered, and has not acknowledged yet."""
    words: dict[Topic, Word] = field(default_factory=dict)
    residency: Residency | None = None
    num_slots: int = 0

    def response(self, topic: Topic, epoch: int) -> LoRAResponse | None:
        """What the replica answered to the change of `epoch`, or to a later one of the topic; None before it did."""
        word = self.words.get(topic)
        if word is not None and word.epoch >= epoch:
            return word.response
        return AS_REGISTERED if epoch <= self.since and topic not in self.behind else None


class Members:
    """Replicas with a current lease. Times are seconds on one clock of the caller's choice.

    Args:
        lease_s: A replica silent for longer than this is dropped.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._members: dict[str, Member] = {}
        # What `states` last worked out, for as long as neither the member nor the adapters have changed.
        self._states: dict[str, ReplicaState] = {}
        self._ready: dict[str, AdapterEntry] = {}
        self._names: frozenset[str] = frozenset()

    @property
    def live(self) -> list[Member]:
        """Members in the order of their first registration."""
        return list(self._members.values())

    @property
    def next_expiry(self) -> float | None:
        """When the first lease ends; None without members."""
        return min((member.expires_at for member in self._members.values()), default=None)

    def add(self, replica_id: str, now: float, since: int, behind: Iterable[Topic]) -> None:
        """Enter a replica that is where the fleet is at epoch `since`, except for the topics it is behind on."""
        self._members[replica_id] = Member(replica_id, now + self.lease_s, since, set(behind))
        self._states.pop(replica_id, None)

    def get(self, replica_id: str) -> Member:
        """The member of this id. Raises ReplicaUnknown."""
        try:
            return self._members[replica_id]
        except KeyError:
            raise ReplicaUnknown(f"replica {replica_id!r} is not registered, or its lease ended; register it") from None

    def renew(self, replica_id: str, now: float) -> Member:
        """Extend a lease. Raises ReplicaUnknown."""
        member = self.get(replica_id)
        member.expires_at = now + self.lease_s
        return member

    def expire(self, now: float) -> list[str]:
        """Drop members whose lease has ended; returns their ids."""
        gone = [replica_id for replica_id, member in self._members.items() if member.expires_at <= now]
        for replica_id in gone:
            del self._members[replica_id]
            self._states.pop(replica_id, None)
        return gone

    def acknowledge(self, member: Member, outcomes: Iterable[Outcome], entries: Mapping[str, AdapterEntry]) -> None:
        """Note what a replica has applied. Words on adapters that are no longer in `entries` are not kept."""
        for outcome in outcomes:
            if outcome.epoch >= member.since:
                member.behind.discard(outcome.topic)
            word = member.words.get(outcome.topic)
            if outcome.topic.name in entries and (word is None or word.epoch <= outcome.epoch):
                member.words[outcome.topic] = Word(outcome.epoch, outcome.response)
        self._states.pop(member.replica_id, None)

    def forget(self, name: str) -> None:
        """Drop every word on an adapter that is gone."""
        for member in self._members.values():
            for is_pin in (False, True):
                member.words.pop(Topic(name, is_pin), None)

    def report(self, member: Member, residency: Residency, num_slots: int) -> bool:
        """Note what a replica holds; False for a report older than the one known."""
        if member.residency is not None and residency.sequence <= member.residency.sequence:
            return False
        member.residency = residency
        member.num_slots = num_slots
        self._states.pop(member.replica_id, None)
        return True

    def states(self, ready: Mapping[str, AdapterEntry]) -> dict[str, ReplicaState]:
        """What each member holds of the adapters now served."""
        if ready != self._ready:
            self._ready, self._names = dict(ready), frozenset(ready)
            self._states.clear()
        for replica_id in self._members.keys() - self._states.keys():
            self._states[replica_id] = self._state(self._members[replica_id])
        return {replica_id: self._states[replica_id] for replica_id in self._members}

    def status(self, name: str, entry: AdapterEntry) -> dict[str, str]:
        """Each member's part in one adapter that is served, see `cluster.fleet.AdapterInFleet`."""
        states = {}
        for member in self._members.values():
            response = member.response(Topic(name, is_pin=False), entry.generation)
            report, served = member.residency or NOTHING_REPORTED, AdapterRef(name, entry.generation)
            if served in report.resident:
                states[member.replica_id] = "slot"
            elif served in report.in_memory:
                states[member.replica_id] = "host"
            elif served in report.loaded:
                states[member.replica_id] = "disk"
            elif response is None:
                states[member.replica_id] = "loading"
            else:
                loaded = response.status is LoRAStatus.SUCCESS
                states[member.replica_id] = "loaded" if loaded else f"refused: {text_of(response)}"
        return states

    def _state(self, member: Member) -> ReplicaState:
        report = member.residency or NOTHING_REPORTED
        loaded, in_memory = self._served(report.loaded) | self._acknowledged(member), self._served(report.in_memory)
        # While an adapter is replaced, a replica that has yet to swap serves requests as before: they ask for no more.
        before = ((name, entry.epoch) for name, entry in self._ready.items() if entry.epoch < entry.generation)
        usable = loaded | {name for name, epoch in before if _has_loaded(member, name, epoch)}
        return ReplicaState(
            resident=self._served(report.resident),
            # One object for all replicas that have everything: a pickled table then holds the names once.
            in_memory=self._names if in_memory == self._names else in_memory,
            loaded=self._names if loaded == self._names else loaded,
            refused=self._names - usable,
            num_slots=member.num_slots,
            num_slots_used=len(report.resident),
            sequence=report.sequence,
        )

    def _acknowledged(self, member: Member) -> set[str]:
        """Names whose generation now served the replica says it has loaded."""
        return {name for name, entry in self._ready.items() if _has_loaded(member, name, entry.generation)}

    def _served(self, refs: Iterable[AdapterRef]) -> frozenset[str]:
        """Names of the references whose generation is the one served."""
        ready = self._ready
        return frozenset(name for name, generation in refs if name in ready and ready[name].generation == generation)


def _has_loaded(member: Member, name: str, epoch: int) -> bool:
    response = member.response(Topic(name, is_pin=False), epoch)
    return response is not None and response.status is LoRAStatus.SUCCESS
