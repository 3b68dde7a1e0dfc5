"""An engine process that can stall, and speaks and answers health checks all the same.

A switch `stall-{pid}` says what of it stalls: everything, or the requests of one adapter until that is loaded anew.
"""

import os
import time

from deployments import engine_process
from lora_core.engine.engine import LLMEngine
from lora_core.engine.request import ScheduledBatch
from lora_core.messages import TokenDelta
from tests.chaos.switches import Switches

EVERYTHING = "*"


def switch_of(pid: int) -> str:
    """Name of the switch of one engine process."""
    return f"stall-{pid}"


class StallingEngine(LLMEngine):
    """Real while its switch is off."""

    _switches = Switches.of_this_process() if "LORA_FLEET_CHAOS" in os.environ else None
    _switch = switch_of(os.getpid())

    @property
    def _stalled(self) -> str | None:
        return None if self._switches is None else self._switches.text(self._switch)

    def step(self) -> list[TokenDelta]:
        if self._stalled == EVERYTHING:
            time.sleep(0.01)
            return []
        return super().step()

    def reset_adapter(self, name: str, reason: str) -> None:
        super().reset_adapter(name, reason)
        if self._stalled == name and self._switches is not None:
            self._switches.turn_off(self._switch)

    def _schedule(self) -> ScheduledBatch:
        batch = super()._schedule()
        stalled = self._stalled
        if stalled is None:
            return batch
        rows = [row for row in batch.rows if row.adapter is None or row.adapter.name != stalled]
        return ScheduledBatch(rows, batch.lost)


if __name__ == "__main__":
    # `_serve` imports the class when it starts.
    import lora_core.engine.engine

    lora_core.engine.engine.LLMEngine = StallingEngine  # type: ignore[misc]
    os._exit(engine_process.main())
