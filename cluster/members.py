"""The live replicas: leases, acknowledgements and residency, as the router actor sees them.

Of what replicas have acknowledged only the exceptions are kept: what one has yet to do, and what it has refused. The
cost is theirs, not that of adapters times replicas.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from cluster.changes import Change, Topic, topic_of
from cluster.entry import AdapterEntry
from cluster.fleet import Outcome, ReplicaState
from cluster.member import Member, Word
from cluster.verdict import text_of
from lora_core.errors import ReplicaUnknown
from lora_core.messages import Residency
from lora_core.types import LoRAStatus
from lora_core.workload import Workload


class Members:
    """Replicas with a current lease. Times are seconds on one clock of the caller's choice.

    Args:
        lease_s: A replica silent for longer than this is dropped.
        served: The adapters that can be asked for, by name: a live view.
    """

    def __init__(self, lease_s: float, served: Mapping[str, AdapterEntry]) -> None:
        self.lease_s = lease_s
        self._served = served
        self._members: dict[str, Member] = {}
        # Topics somebody waits for the answers on: successes are kept, too.
        self._asked: set[Topic] = set()
        self._dirty: set[str] = set()

    @property
    def live(self) -> list[Member]:
        """Members in the order of their first registration."""
        return list(self._members.values())

    @property
    def next_expiry(self) -> float | None:
        """When the first lease ends; None without members."""
        return min((member.expires_at for member in self._members.values()), default=None)

    @property
    def num_joined(self) -> int:
        """Members that take requests: they have reported what they hold, and do not leave."""
        return sum(member.residency is not None and not member.is_leaving for member in self._members.values())

    # Coming and going

    def add(self, replica_id: str, now: float, epoch: int, behind: Iterable[Topic]) -> None:
        """Enter a replica that is where the fleet is at `epoch`, except for the topics it is behind on."""
        self._drop(replica_id)
        self._members[replica_id] = Member(replica_id, now + self.lease_s, pending=dict.fromkeys(behind, epoch))

    def get(self, replica_id: str) -> Member:
        """The member of this id. Raises ReplicaUnknown."""
        try:
            return self._members[replica_id]
        except KeyError:
            raise ReplicaUnknown(f"replica {replica_id!r} is not registered, or its lease ended; register it") from None

    def find(self, replica_id: str) -> Member | None:
        """The member of this id; None where there is none."""
        return self._members.get(replica_id)

    def renew(self, replica_id: str, now: float) -> Member:
        """Extend a lease. Raises ReplicaUnknown."""
        member = self.get(replica_id)
        member.expires_at = now + self.lease_s
        return member

    def expire(self, now: float) -> list[str]:
        """Drop members whose lease has ended; returns their ids."""
        gone = [replica_id for replica_id, member in self._members.items() if member.expires_at <= now]
        for replica_id in gone:
            self._drop(replica_id)
        return gone

    # Changes and their outcomes

    def expect(self, change: Change) -> None:
        """Note that those it is for have yet to acknowledge a change; called for each one as it is recorded."""
        topic = topic_of(change.request)
        for member in self._members.values():
            if change.is_for(member.replica_id):
                member.expect(topic, change.epoch, swaps=change.request.replace)
                self._stir(member, topic.name)

    @contextmanager
    def asked(self, topic: Topic) -> Iterator[None]:
        """Keep successes on a topic, too, within the block."""
        self._asked.add(topic)
        try:
            yield
        finally:
            self._asked.discard(topic)
            for member in self._members.values():
                member.successes.pop(topic, None)

    def acknowledge(self, member: Member, outcomes: Iterable[Outcome], names: Mapping[str, object]) -> list[Outcome]:
        """Note what a replica has applied; returns what it had yet to acknowledge.

        Words on adapters that are none of `names` are not kept.
        """
        news = [outcome for outcome in outcomes if member.hear(outcome.topic, outcome.epoch)]
        for outcome in news:
            topic, word = outcome.topic, Word(outcome.epoch, outcome.response)
            if topic.name not in names:
                continue
            if outcome.response.status is not LoRAStatus.SUCCESS:
                member.refusals[topic] = word
            elif topic in self._asked:
                member.successes[topic] = word
            self._stir(member, topic.name)
        return news

    def end_swap(self, name: str) -> None:
        """Note that requests now need what has replaced an adapter: who has yet to swap does not serve it."""
        for member in self._members.values():
            if name in member.swapping:
                member.swapping.discard(name)
                self._dirty.add(member.replica_id)

    def forget(self, name: str) -> None:
        """Drop every word on an adapter that is gone."""
        for member in self._members.values():
            member.forget(name)
            self._stir(member, name)

    # Residency and work

    def report(self, member: Member, residency: Residency, num_slots: int) -> bool:
        """Note what a replica holds; False for a report older than the one known, or one that builds on one unknown."""
        before = member.residency
        if before is not None and residency.sequence <= before.sequence:
            return False
        full = residency.over(before)
        if full is None:
            return False
        member.take(full, num_slots)
        self._dirty.add(member.replica_id)
        return True

    def note_work(self, member: Member, work: Workload) -> bool:
        """Note what a replica has done; whether this changes what is published of it."""
        is_news = member.take_work(work)
        if is_news:
            self._dirty.add(member.replica_id)
        return is_news

    def hint(self, replica_id: str, names: Iterable[str], until: float) -> bool:
        """Note that served adapters are on their way to a slot of a replica; False where nothing of this is news."""
        member = self._members.get(replica_id)
        wanted = {name: until for name in names if name in self._served} if member is not None else {}
        if member is None or not wanted:
            return False
        is_news = not wanted.keys() <= member.hints.keys()
        member.hints.update(wanted)
        if is_news:
            self._dirty.add(replica_id)
        return is_news

    @property
    def any_hints(self) -> bool:
        """Whether any load is believed to be on its way for a hint's sake."""
        return any(member.hints for member in self._members.values())

    def drop_hints(self, now: float) -> bool:
        """Forget hints that are older than they last; whether there were any."""
        any_dropped = False
        for member in self._members.values():
            for name in [name for name, until in member.hints.items() if until <= now]:
                del member.hints[name]
                self._dirty.add(member.replica_id)
                any_dropped = True
        return any_dropped

    # For the table

    def names_changed(self, names: Iterable[str]) -> None:
        """Note that these adapters are served, no longer served, or served as another generation."""
        names = list(names)
        for member in self._members.values():
            if any(member.speaks_of(name) for name in names):
                member.served_in_memory = None
                self._dirty.add(member.replica_id)

    def take_changed(self) -> dict[str, ReplicaState | None]:
        """Rows of the members that may have changed since this was last asked; None for those that are gone."""
        changed = {replica_id: self._row(replica_id) for replica_id in self._dirty}
        self._dirty.clear()
        return changed

    def status(self, entry: AdapterEntry) -> dict[str, str]:
        """Each member's part in one adapter that is served, see `cluster.fleet.AdapterInFleet`."""
        states = {}
        for member in self._members.values():
            tier = member.tier(entry.name, entry.generation)
            response = member.response(Topic(entry.name, is_pin=False), entry.generation)
            if tier is not None:
                states[member.replica_id] = tier
            elif response is None:
                states[member.replica_id] = "loading"
            elif response.status is LoRAStatus.SUCCESS:
                states[member.replica_id] = "loaded" if member.residency is None else "disk"
            else:
                states[member.replica_id] = f"refused: {text_of(response)}"
        return states

    def _stir(self, member: Member, name: str) -> None:
        """Note that a member's part in an adapter has changed. Of one that is not served nothing is published."""
        if name in self._served:
            self._dirty.add(member.replica_id)

    def _row(self, replica_id: str) -> ReplicaState | None:
        member = self._members.get(replica_id)
        return None if member is None else member.state(self._served)

    def _drop(self, replica_id: str) -> None:
        self._members.pop(replica_id, None)
        self._dirty.add(replica_id)
