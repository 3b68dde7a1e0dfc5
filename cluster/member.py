"""`Member`: one live replica, as the router actor sees it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.changes import Topic
from cluster.entry import AdapterEntry
from cluster.fleet import ReplicaState
from lora_core.messages import Residency
from lora_core.types import AdapterRef, LoRAResponse, LoRAStatus
from lora_core.workload import Workload

AS_BEFORE = LoRAResponse(LoRAStatus.SUCCESS, "it is so already")
"""What stands for the answer of a replica that has acknowledged a change before, or had nothing to do for it."""

NOTICEABLE = 0.2
"""A measured time is published anew when it differs by this share of what was published."""


class Word(NamedTuple):
    """A replica's last word on a topic, and the epoch it acknowledged with it."""

    epoch: int
    response: LoRAResponse


@dataclass
class Member:
    """One live replica. On a topic of which nothing is kept here it is where the fleet is."""

    replica_id: str
    expires_at: float
    pending: dict[Topic, int] = field(default_factory=dict)
    """What it has yet to acknowledge, and with which epoch at least."""
    refusals: dict[Topic, Word] = field(default_factory=dict)
    """What it could not do, for as long as it has not done it since."""
    successes: dict[Topic, Word] = field(default_factory=dict)
    """What it has done, on topics that somebody waits for."""
    swapping: set[str] = field(default_factory=set)
    """Adapters it has yet to replace: requests are served as before."""
    hints: dict[str, float] = field(default_factory=dict)
    """Adapters that requests on their way there bring into a slot, and until when that is believed."""
    residency: Residency | None = None
    num_slots: int = 0
    work: Workload | None = None
    """What it last said it had done."""
    resident: dict[str, int] = field(default_factory=dict)
    """Name -> generation, of what is in a slot."""
    in_memory: dict[str, int] = field(default_factory=dict)
    loading: dict[str, int] = field(default_factory=dict)
    served_in_memory: frozenset[str] | None = None
    """Of `in_memory`, those of the generation served; None where that is to be worked out again."""
    load_ms_per_mib: dict[str, float] = field(default_factory=dict)
    """As published."""
    service_ms: float | None = None
    """As published."""
    published: ReplicaState = ReplicaState()  # noqa: RUF009 - frozen
    """Its row in the fleet's table, when that was last made."""

    @property
    def is_leaving(self) -> bool:
        """Whether it gets no more requests, and ends with the last it has."""
        return self.work is not None and self.work.is_leaving

    def response(self, topic: Topic, epoch: int) -> LoRAResponse | None:
        """What the replica answered to the change of `epoch`, or to a later one of the topic; None before it did."""
        for words in (self.successes, self.refusals):
            word = words.get(topic)
            if word is not None and word.epoch >= epoch:
                return word.response
        return None if topic in self.pending else AS_BEFORE

    def applied_epoch(self, epoch: int) -> int:
        """Up to which epoch it has acknowledged every change, where `epoch` is the last one."""
        return min(self.pending.values(), default=epoch + 1) - 1

    def expect(self, topic: Topic, epoch: int, *, swaps: bool) -> None:
        """Note a change that it has yet to acknowledge."""
        serves = topic not in self.pending and topic not in self.refusals
        if swaps and (serves or topic.name in self.swapping):
            self.swapping.add(topic.name)
        elif not topic.is_pin:
            self.swapping.discard(topic.name)
        self.pending[topic] = epoch
        self.successes.pop(topic, None)

    def hear(self, topic: Topic, epoch: int) -> bool:
        """Whether an acknowledgement is the one that was missing; the last word on the topic then no longer stands."""
        if topic not in self.pending or epoch < self.pending[topic]:
            return False
        del self.pending[topic]
        if not topic.is_pin:
            self.swapping.discard(topic.name)
        self.refusals.pop(topic, None)
        return True

    def forget(self, name: str) -> None:
        """Drop every word on an adapter."""
        self.swapping.discard(name)
        self.hints.pop(name, None)
        for is_pin in (False, True):
            self.refusals.pop(Topic(name, is_pin), None)
            self.successes.pop(Topic(name, is_pin), None)

    def take(self, residency: Residency, num_slots: int) -> None:
        """Note what it holds."""
        if self.residency is None or residency.in_memory is not self.residency.in_memory:
            self.in_memory, self.served_in_memory = _by_name(residency.in_memory or ()), None
        self.residency, self.num_slots = residency, num_slots
        self.resident, self.loading = _by_name(residency.resident), _by_name(residency.loading)
        for name in self.resident.keys() & self.hints.keys():
            del self.hints[name]

    def take_work(self, work: Workload) -> bool:
        """Note what it has done; whether what is published of that changes.

        Times are measured anew each time: they are published when they have changed noticeably.
        """
        last, self.work = self.work, work
        is_news = last is None or (last.stalled.keys(), last.fault, last.is_leaving) != (
            work.stalled.keys(),
            work.fault,
            work.is_leaving,
        )
        if not _near(self.service_ms, work.service_ms):
            self.service_ms, is_news = work.service_ms, True
        tiers = self.load_ms_per_mib.keys() | work.load_ms_per_mib.keys()
        if not all(_near(self.load_ms_per_mib.get(tier), work.load_ms_per_mib.get(tier)) for tier in tiers):
            self.load_ms_per_mib, is_news = work.load_ms_per_mib, True
        return is_news

    def speaks_of(self, name: str) -> bool:
        """Whether what is published of it does, or is to, depend on an adapter."""
        topic = Topic(name, is_pin=False)
        held = name in self.in_memory or name in self.resident or name in self.loading or name in self.hints
        return held or topic in self.pending or topic in self.refusals or name in self.published.refused

    def tier(self, name: str, generation: int) -> str | None:
        """Where it has an adapter, by its own word: "slot", "host", or None where it is in neither."""
        if self.resident.get(name) == generation:
            return "slot"
        return "host" if self.in_memory.get(name) == generation else None

    def state(self, served: Mapping[str, AdapterEntry]) -> ReplicaState:
        """Its row in the fleet's table, of the adapters that are served."""
        if self.served_in_memory is None:
            self.served_in_memory = names_served(self.in_memory, served)
        resident, work = names_served(self.resident, served), self.work
        topics = (*self.pending, *self.refusals)
        refused = {topic.name for topic in topics if not topic.is_pin and topic.name not in self.swapping}
        self.published = ReplicaState(
            resident=resident,
            in_memory=self.served_in_memory,
            refused=frozenset(served[name].name for name in refused if name in served),
            num_slots=self.num_slots,
            num_slots_used=0 if self.residency is None else self._num_slots_used(self.residency),
            sequence=-1 if self.residency is None else self.residency.sequence,
            loading=(names_served(self.loading, served) | (self.hints.keys() & served.keys())) - resident,
            load_ms_per_mib=self.load_ms_per_mib,
            service_ms=self.service_ms,
            stalled=frozenset(work.stalled) if work is not None else frozenset(),
            is_stalled=work is not None and work.fault != "",
            is_leaving=self.is_leaving,
        )
        return self.published

    def _num_slots_used(self, residency: Residency) -> int:
        return max(residency.num_slots_used, len(residency.resident))


def _by_name(refs: Iterable[AdapterRef]) -> dict[str, int]:
    return dict(refs)


def names_served(held: Mapping[str, int], served: Mapping[str, AdapterEntry]) -> frozenset[str]:
    """Names of what is held of the generation served: one object for each, so that a pickled table holds it once."""
    entries = ((served.get(name), generation) for name, generation in held.items())
    return frozenset(
        entry.name for entry, generation in entries if entry is not None and entry.generation == generation
    )


def _near(published: float | None, measured: float | None) -> bool:
    if published is None or measured is None:
        return published is measured
    return math.isclose(published, measured, rel_tol=NOTICEABLE)
