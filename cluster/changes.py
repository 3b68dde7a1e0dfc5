"""The steps by which the desired adapters change, for replicas that apply those of each name in order."""

import bisect
from typing import NamedTuple

import msgspec

from lora_core.portable import portable
from lora_core.types import LoRAOperation, LoRARequest

MAX_CHANGES_KEPT = 10_000
"""Changes kept for replicas that are behind; one further behind registers again."""


class Topic(NamedTuple):
    """What a later change makes an earlier one's outcome irrelevant to."""

    name: str
    is_pin: bool
    """Whether the adapter is pinned, rather than whether it is loaded."""


def topic_of(request: LoRARequest) -> Topic:
    """What a request is about."""
    return Topic(request.lora_name, request.operation in (LoRAOperation.PIN, LoRAOperation.UNPIN))


@portable
class Change(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step of the desired state, as replicas apply it."""

    epoch: int
    request: LoRARequest
    """Carries the generation: a load gives it to the adapter, an unload names the one to drop."""
    static: bool = False
    """A static adapter that cannot be loaded is a fault of the configuration: a starting replica should not start."""
    only: tuple[str, ...] = ()
    """Ids of the replicas that are told; empty tells all."""

    def is_for(self, replica_id: str) -> bool:
        """Whether this replica is told."""
        return not self.only or replica_id in self.only


class ChangeLog:
    """The last changes, by rising epoch.

    Args:
        epoch: Of the last change before the first one that will be recorded.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        """Of the last change, those that replicas have nothing to do for included."""
        self._horizon = epoch
        self._changes: list[Change] = []

    def record(self, change: Change) -> Change:
        """Add the newest change, and return it."""
        self.advance(change.epoch)
        self._changes.append(change)
        # Cut by halves, so that the cost of a cut is spread over many changes.
        if len(self._changes) > MAX_CHANGES_KEPT:
            dropped = len(self._changes) // 2
            self._horizon = self._changes[dropped - 1].epoch
            del self._changes[:dropped]
        return change

    def advance(self, epoch: int) -> None:
        """Note a change that replicas have nothing to do for."""
        assert epoch > self.epoch, f"epoch {epoch} does not come after {self.epoch}"
        self.epoch = epoch

    def since(self, epoch: int) -> list[Change] | None:
        """Changes later than `epoch`, oldest first; None where they are no longer known."""
        if not self._horizon <= epoch <= self.epoch:
            return None
        return self._changes[bisect.bisect_right(self._changes, epoch, key=lambda change: change.epoch) :]
