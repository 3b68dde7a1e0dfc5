"""The live replicas: leases, acknowledgements and residency, as the router actor sees them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.entry import AdapterEntry
from cluster.fleet import Applied, ReplicaState, ReplicaUnknown
from cluster.verdict import text_of
from lora_core.messages import Residency
from lora_core.types import AdapterRef, LoRAResponse, LoRAStatus

NOTHING_REPORTED = Residency(sequence=-1, resident=[], loaded=[])
"""What is known of a replica that has not reported its residency yet."""


class Word(NamedTuple):
    """A replica's last word on one adapter, and the epoch it acknowledged with it."""

    epoch: int
    response: LoRAResponse


@dataclass
class Member:
    """One live replica."""

    replica_id: str
    expires_at: float
    epoch: int
    """Last change acknowledged."""
    words: dict[str, Word] = field(default_factory=dict)
    """On loads and unloads, by name."""
    pin_words: dict[str, Word] = field(default_factory=dict)
    """On pins and unpins, by name."""
    residency: Residency | None = None
    num_slots: int = 0

    def response(self, name: str, epoch: int) -> LoRAResponse | None:
        """What the replica said of an adapter's load or unload at `epoch` or later; None before it did."""
        return _response(self.words, name, epoch)

    def pin_response(self, name: str, epoch: int) -> LoRAResponse | None:
        """What the replica said of an adapter's pin or unpin at `epoch` or later; None before it did."""
        return _response(self.pin_words, name, epoch)


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

    def add(self, replica_id: str, now: float, epoch: int, holding: Mapping[str, int]) -> None:
        """Enter a replica that has acknowledged up to `epoch` and holds these generations, by name."""
        member = Member(replica_id, now + self.lease_s, epoch)
        for name, generation in holding.items():
            member.words[name] = Word(generation, LoRAResponse(LoRAStatus.SUCCESS, "held when it registered"))
        self._members[replica_id] = member
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

    def acknowledge(self, member: Member, epoch: int, applied: Applied, entries: Mapping[str, AdapterEntry]) -> None:
        """Note what a replica applied. Words on adapters that are no longer in `entries` are not kept."""
        member.epoch = max(member.epoch, epoch)
        for words, results in ((member.words, applied.adapters), (member.pin_words, applied.pins)):
            for name, response in results.items():
                word = words.get(name)
                if name in entries and (word is None or word.epoch <= epoch):
                    words[name] = Word(epoch, response)
        self._states.pop(member.replica_id, None)

    def forget(self, name: str) -> None:
        """Drop every word on an adapter that is gone."""
        for member in self._members.values():
            member.words.pop(name, None)
            member.pin_words.pop(name, None)

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
        """Each member's part in one adapter that is served, see `cluster.fleet.AdapterStatus`."""
        states = {}
        for member in self._members.values():
            response = member.response(name, entry.generation)
            report, served = member.residency or NOTHING_REPORTED, AdapterRef(name, entry.generation)
            if served in report.resident:
                states[member.replica_id] = "resident"
            elif served in report.loaded:
                states[member.replica_id] = "loaded"
            elif response is None:
                states[member.replica_id] = "loading"
            else:
                loaded = response.status is LoRAStatus.SUCCESS
                states[member.replica_id] = "loaded" if loaded else f"refused: {text_of(response)}"
        return states

    def _state(self, member: Member) -> ReplicaState:
        report = member.residency or NOTHING_REPORTED
        said = {name: member.response(name, entry.generation) for name, entry in self._ready.items()}
        loaded = self._served(report.loaded)
        loaded |= {name for name, word in said.items() if word is not None and word.status is LoRAStatus.SUCCESS}
        return ReplicaState(
            resident=self._served(report.resident),
            # One object for all replicas that have everything: a pickled table then holds the names once.
            loaded=self._names if loaded == self._names else loaded,
            refused=frozenset(name for name, word in said.items() if word is not None and name not in loaded),
            num_slots=member.num_slots,
            num_slots_used=len(report.resident),
            sequence=report.sequence,
            epoch=member.epoch,
        )

    def _served(self, refs: Iterable[AdapterRef]) -> frozenset[str]:
        """Names of the references whose generation is the one served."""
        ready = self._ready
        return frozenset(name for name, generation in refs if name in ready and ready[name].generation == generation)


def _response(words: Mapping[str, Word], name: str, epoch: int) -> LoRAResponse | None:
    word = words.get(name)
    return word.response if word is not None and word.epoch >= epoch else None
