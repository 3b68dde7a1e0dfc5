"""An engine process whose fifth step after warming up goes wrong."""

import itertools
import os

from deployments import engine_process
from lora_core.engine.engine import LLMEngine
from lora_core.messages import EngineReady, TokenDelta


class FaultyEngine(LLMEngine):
    """Real until the fault."""

    _steps: "itertools.count[int] | None" = None

    def ready(self) -> EngineReady:
        self._steps = itertools.count(1)
        return super().ready()

    def step(self) -> list[TokenDelta]:
        if self._steps is not None and next(self._steps) == 5:
            raise RuntimeError("step 5 went wrong")
        return super().step()


if __name__ == "__main__":
    # `_serve` imports the class when it starts.
    import lora_core.engine.engine

    lora_core.engine.engine.LLMEngine = FaultyEngine  # type: ignore[misc]
    os._exit(engine_process.main())
