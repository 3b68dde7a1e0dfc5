"""`Refusals`: asks replicas again for what others have done and they have not."""

import asyncio
import logging
import time
from collections.abc import Iterable

from cluster.fleet import Outcome, Retry
from cluster.registry import AdapterRegistry
from cluster.retries import Retries
from cluster.verdict import text_of
from deployments.broadcast import Broadcast
from deployments.turns import Turns
from lora_core.types import LoRAStatus

logger = logging.getLogger(__name__)


class Refusals:
    """Whatever a replica refused it for, an adapter that is served is asked of it again and again, with growing pauses:
    its disk may have room again, its mount be back, or the files be put right. So are pins, and their ends.

    Args:
        registry: The desired adapters.
        broadcast: Brings changes to replicas.
        turns: An adapter that is being changed is not asked for meanwhile.
    """

    def __init__(self, registry: AdapterRegistry, broadcast: Broadcast, turns: Turns) -> None:
        self._registry = registry
        self._broadcast = broadcast
        self._turns = turns
        self._retries = Retries()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, replica_id: str, outcomes: Iterable[Outcome]) -> None:
        """Take what a replica has just acknowledged."""
        now = time.monotonic()
        for outcome in outcomes:
            topic, response = outcome.topic, outcome.response
            entry = self._registry.entries.get(topic.name)
            if entry is None:
                continue
            # What a replica does not serve it has not to pin: it is asked for both again together.
            if response.status in (LoRAStatus.SUCCESS, LoRAStatus.PIN_NAME_NONEXISTENT):
                self._retries.note_success(topic, replica_id)
                continue
            self._retries.note_refusal(topic, replica_id, entry.generation, text_of(response), now)
            if topic.name in self._registry.served:
                what = "pin, or unpin," if topic.is_pin else "serve"
                logger.warning("replica %s does not %s adapter %r: %s", replica_id, what, topic.name, text_of(response))
        self._schedule()

    def drop(self, replica_ids: Iterable[str]) -> None:
        """These replicas are gone, or have registered anew."""
        self._retries.drop(list(replica_ids))

    def of(self, name: str) -> dict[str, Retry]:
        """Replica id -> when it is asked to load an adapter again."""
        return self._retries.of(name, time.monotonic())

    def close(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        due = self._retries.next_due
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            delay_s = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._ask_again)

    def _ask_again(self) -> None:
        now = time.monotonic()
        for topic, replica_ids in self._retries.take_due(now).items():
            entry = self._registry.entries.get(topic.name)
            if entry is None:
                self._retries.forget(topic)
            elif entry.state != "ready" or self._turns.is_taken(topic.name):
                self._retries.postpone(topic, replica_ids, now)
            elif topic.is_pin:
                self._registry.repeat_pin(topic.name, replica_ids)
            else:
                self._registry.repeat_load(topic.name, replica_ids)
        self._broadcast.announce()
        self._schedule()
