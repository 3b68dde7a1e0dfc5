"""An engine process that computes nothing: adapters are loaded as ever, and each request gets a token at every tick."""

import os
import time

from deployments import engine_process
from lora_core.engine.engine import LLMEngine
from lora_core.engine.kernel_variants import Progress
from lora_core.engine.warm_up import ignore_progress
from lora_core.messages import FinishReason, GenerateRequest, TokenDelta

TICK_S = 0.005
"""A step of a fast engine."""

TOKEN_ID = 7


class HopEngine(LLMEngine):
    """An engine whose steps take `TICK_S` and no processor, whatever they answer."""

    def warm_up(self, progress: Progress = ignore_progress) -> None:
        self._left: dict[str, int] = {}
        self._due = 0.0

    @property
    def num_running(self) -> int:
        return len(self._left)

    @property
    def num_waiting(self) -> int:
        return 0

    def add_request(self, message: GenerateRequest) -> None:
        self._left[message.request_id] = message.sampling.max_tokens

    def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._left)

    def step(self) -> list[TokenDelta]:
        now = time.monotonic()
        self._due = max(self._due + TICK_S, now)
        time.sleep(self._due - now)
        deltas = []
        for request_id, left in list(self._left.items()):
            reason: FinishReason | None = "length" if left <= 1 else None
            deltas.append(TokenDelta(request_id, [TOKEN_ID], reason))
            self._left[request_id] = left - 1
            if left <= 1:
                del self._left[request_id]
        return deltas


if __name__ == "__main__":
    # `_serve` imports the class when it starts.
    import lora_core.engine.engine

    lora_core.engine.engine.LLMEngine = HopEngine  # type: ignore[misc]
    os._exit(engine_process.main())
