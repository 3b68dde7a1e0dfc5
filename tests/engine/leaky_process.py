"""An engine process that loses a KV block with its first request, and serves as ever."""

import os

from deployments import engine_process
from lora_core.engine.engine import LLMEngine
from lora_core.messages import GenerateRequest


class LeakyEngine(LLMEngine):
    """Real but for the leak."""

    def add_request(self, message: GenerateRequest) -> None:
        if message.request_id.startswith("leak"):
            self._blocks._pool.allocate(1)
        super().add_request(message)


if __name__ == "__main__":
    # `_serve` imports the class when it starts.
    import lora_core.engine.engine

    lora_core.engine.engine.LLMEngine = LeakyEngine  # type: ignore[misc]
    os._exit(engine_process.main())
