"""`SlotKeeper`: brings the adapters that the router actor wishes into this replica's slots, and has them kept there."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from cluster.fleet import SlotWishes
from deployments.bell import Bell
from lora_core.messages import Residency
from lora_core.types import LoRAStatus

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
"""How soon an adapter is asked for again that had no slot to spare, or lost its slot."""


class SlotKeeper:
    """Does what the last wishes say, again and again, since the engine forgets a warm-up that finds no slot to spare.

    Args:
        warm: Asks the engine to bring an adapter into a slot; returns how that was answered.
        protect: Tells the engine which adapters are to lose their slots last.
    """

    def __init__(self, warm: Callable[[str], Awaitable[LoRAStatus]], protect: Callable[[list[str]], None]) -> None:
        self._ask_engine = warm
        self._protect = protect
        self._wishes = SlotWishes()
        self._protected: list[str] = []
        self._there: frozenset[str] = frozenset()
        self._on_their_way: frozenset[str] = frozenset()
        # Of the wishes: those that found no slot to spare when last asked for.
        self._denied: set[str] = set()
        # By name: a question may wait for a load of that adapter.
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._wished, self._moved = Bell(), Bell()

    def wish(self, wishes: SlotWishes) -> None:
        """Take what is wished from now on."""
        if wishes != self._wishes:
            self._wishes = wishes
            self._wished.ring()

    def see(self, residency: Residency) -> None:
        """Take what the engine holds."""
        self._there = frozenset(ref.name for ref in residency.resident)
        self._on_their_way = frozenset(ref.name for ref in residency.loading)
        self._moved.ring()

    async def keep(self) -> None:
        """Do what is wished now; ends when something else is, or it is time to look again."""
        wishes = self._wishes
        protected = list(dict.fromkeys([*wishes.warm, *wishes.protected]))
        if protected != self._protected:
            self._protect(protected)
            self._protected = protected
        for name in wishes.warm:
            if not (name in self._there or name in self._on_their_way or name in self._asking):
                self._asking[name] = asyncio.create_task(self._warm(name), name=f"warm-{name}")
        if wishes is self._wishes:
            await self._wished.wait(AGAIN_S)

    async def wait(self, timeout_s: float) -> list[str]:
        """Wait until all that is wished is in slots, as far as slots are to spare; returns what is not by then."""
        deadline = time.monotonic() + timeout_s
        while missing := [name for name in self._wishes.warm if name not in self._there | self._denied]:
            if not await self._moved.wait(deadline - time.monotonic()):
                break
        return missing

    async def close(self) -> None:
        """Ask no more."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _warm(self, name: str) -> None:
        try:
            status = await self._ask_engine(name)
        except Exception as error:
            # The engine has ended, or does not answer: then there is nothing to warm up, or it is asked again.
            logger.warning("adapter %r is not warmed up: %s", name, error)
            status = LoRAStatus.UNAVAILABLE
        finally:
            del self._asking[name]
        if status is LoRAStatus.SUCCESS:
            self._denied.discard(name)
        else:
            self._denied.add(name)
            self._moved.ring()
