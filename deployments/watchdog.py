"""`Watchdog`: notices when requests of a replica no longer get anywhere, reports it, and heals what it can.

The engine process may live, speak, and answer every question of health meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from cluster.progress import BASE, Deadlines, ProgressWatch, Sign
from lora_core.errors import AdapterLost, EngineDead, LoRAFleetError

logger = logging.getLogger(__name__)

TICK_S = 0.25
"""Pause between two looks."""


class WatchedEngine(Protocol):
    """What is watched; `deployments.engine_client.EngineClient` is one."""

    def signs(self) -> Mapping[str, Sign]:
        """A sign for each adapter with unfinished requests, and for the base model under `BASE`."""

    def end_requests(self, name: str, fault: LoRAFleetError) -> int:
        """Fail the open requests of an adapter, and have the engine forget them; returns how many."""

    def reset_adapter(self, name: str, reason: str) -> None:
        """Have the engine end what it has of an adapter, drop its slot and its host copy, and read it anew."""

    def condemn(self, fault: EngineDead) -> None:
        """Take no more requests, fail those under way, and be unhealthy from now on."""


class Watchdog:
    """Looks at one engine, four times a second.

    A stalled adapter is out of routing until its requests here are gone: they are ended with an error (one that has not
    been answered in part goes to another replica), and the adapter is loaded anew. A stalled replica is condemned:
    Serve replaces it, with a new engine process.

    Args:
        engine: What is watched.
        deadlines: The `watchdog` settings.
        tell: Called when what is stalled has changed, before anything is done about it: name -> why, and why the
            replica as a whole is stalled, empty while it is not.
        count_heal: Called for each adapter that is healed.
    """

    def __init__(
        self,
        engine: WatchedEngine,
        deadlines: Deadlines,
        tell: Callable[[dict[str, str], str], None],
        count_heal: Callable[[], None] = lambda: None,
    ) -> None:
        self._count_heal = count_heal
        self._engine = engine
        self._watch = ProgressWatch(deadlines)
        self._tell = tell
        # As last told.
        self._stalled: dict[str, str] = {}
        self._fault = ""
        self._to_heal: dict[str, str] = {}
        self._is_condemned = False
        # Counted in looks: while the loop is held up, the engine is not to blame.
        self._now_s = 0.0

    async def run(self) -> None:
        """Look until the replica is condemned. A look that fails is logged, and costs only itself."""
        while not self._is_condemned:
            await asyncio.sleep(TICK_S)
            try:
                self.look()
            except Exception:
                logger.exception("looking after the engine failed")

    def look(self) -> None:
        """Look once, a tick after the last time."""
        self._now_s += TICK_S
        verdict = self._watch.judge(self._now_s, self._engine.signs())
        stalled, fault = dict(verdict.adapters), verdict.replica or ""
        # It is said once what is to be healed: what fails below is done at the next look.
        self._to_heal = {name: stalled[name] for name in (*self._to_heal, *verdict.to_heal) if name in stalled}
        if (stalled, fault) != (self._stalled, self._fault) and _went_well(self._tell, stalled, fault):
            self._stalled, self._fault = stalled, fault
        if fault:
            logger.error("this replica is stalled and will be replaced: %s", fault)
            self._engine.condemn(EngineDead(f"the replica is stalled: {fault}"))
            self._is_condemned = True
            return
        for name, why in list(self._to_heal.items()):
            if _went_well(self._heal, name, why):
                self._count_heal()
                del self._to_heal[name]

    def _heal(self, name: str, why: str) -> None:
        if name == BASE:
            num_ended = self._engine.end_requests(name, EngineDead(f"{why}; its requests on this replica were ended"))
            logger.error("%s; %d request(s) ended", why, num_ended)
            return
        fault = AdapterLost(f"{why}; its requests on this replica were ended, and it is loaded there anew")
        num_ended = self._engine.end_requests(name, fault)
        self._engine.reset_adapter(name, why)
        logger.error("%s; %d request(s) ended, and the adapter is loaded anew", why, num_ended)


def _went_well(step: Callable[..., None], *args: object) -> bool:
    """Take a step of a look. One that fails is logged, and keeps none of the others from being taken."""
    try:
        step(*args)
    except Exception:
        logger.exception("looking after the engine failed; it is tried again")
        return False
    return True
