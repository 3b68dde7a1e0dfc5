"""`Retries`: what replicas refused to do for adapters, and when each replica is asked again."""

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.changes import Topic
from cluster.fleet import Retry

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses before a replica is asked again: each twice as long as the one before, up to the longest."""


@dataclass
class _Refused:
    generation: int
    reason: str
    num_attempts: int
    due: float
    is_asked: bool = False
    """It has been asked again, and has not answered."""


class Retries:
    """What has been refused stands here until it is done, or nobody wants it any more. Times are seconds on one clock
    of the caller's choice."""

    def __init__(self) -> None:
        self._refused: dict[Topic, dict[str, _Refused]] = {}

    @property
    def next_due(self) -> float | None:
        """When the next replica is to be asked again; None where none is."""
        return min(
            (one.due for replicas in self._refused.values() for one in replicas.values() if not one.is_asked),
            default=None,
        )

    def note_refusal(self, topic: Topic, replica_id: str, generation: int, reason: str, now: float) -> None:
        """A replica does not serve this generation of an adapter, or has not pinned or unpinned it."""
        replicas = self._refused.setdefault(topic, {})
        last = replicas.get(replica_id)
        num_attempts = 1 if last is None or last.generation != generation else last.num_attempts + 1
        # Beyond the longest pause the power would only grow, to no purpose.
        pause_s = min(FIRST_PAUSE_S * 2 ** min(num_attempts - 1, 32), LONGEST_PAUSE_S)
        replicas[replica_id] = _Refused(generation, reason, num_attempts, now + pause_s)

    def note_success(self, topic: Topic, replica_id: str) -> None:
        """A replica has done what was asked of it."""
        replicas = self._refused.get(topic, {})
        replicas.pop(replica_id, None)
        if not replicas:
            self._refused.pop(topic, None)

    def forget(self, topic: Topic) -> None:
        """The adapter is gone."""
        self._refused.pop(topic, None)

    def drop(self, replica_ids: Iterable[str]) -> None:
        """These replicas are gone, or have registered anew."""
        for topic in list(self._refused):
            for replica_id in replica_ids:
                self.note_success(topic, replica_id)

    def take_due(self, now: float) -> dict[Topic, list[str]]:
        """Topic -> ids of the replicas that are to be asked now. Each comes once for each refusal."""
        due: dict[Topic, list[str]] = {}
        for topic, replicas in self._refused.items():
            ids = [replica_id for replica_id, one in replicas.items() if not one.is_asked and one.due <= now]
            for replica_id in ids:
                replicas[replica_id].is_asked = True
            if ids:
                due[topic] = ids
        return due

    def postpone(self, topic: Topic, replica_ids: Iterable[str], now: float) -> None:
        """What was taken cannot be asked for now: it is due again after the first pause."""
        for replica_id in replica_ids:
            one = self._refused.get(topic, {}).get(replica_id)
            if one is not None:
                one.is_asked, one.due = False, now + FIRST_PAUSE_S

    def of(self, name: str, now: float) -> dict[str, Retry]:
        """Replica id -> when it is asked to load an adapter again."""
        return {
            replica_id: Retry(
                reason=one.reason,
                num_attempts=one.num_attempts,
                in_s=0.0 if one.is_asked else round(max(0.0, one.due - now), 1),
            )
            for replica_id, one in self._refused.get(Topic(name, is_pin=False), {}).items()
        }
