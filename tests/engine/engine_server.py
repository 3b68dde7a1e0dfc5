"""A real engine process behind the real routes on a loopback port, without a fleet: for clients on other threads."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import uvicorn

from deployments.engine_client import EngineClient
from deployments.generation import GenerateChunk
from deployments.generator import Generator
from deployments.http_api import Service, http_app
from deployments.local_cluster import free_port
from deployments.openai_api import GenerationRequest, model_card
from deployments.tokenizer import ModelTokenizer
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.errors import AdapterNotFound

BASE = "base"
NAMES = ("first", "second", "third")
"""Listed as adapters; the base model answers for each."""

Result = TypeVar("Result")


class Named:
    """A service of one engine that knows its names."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def models(self, is_wanted: Callable[[str], bool] | None = None) -> dict[str, dict[str, Any]]:
        cards = {name: model_card(name, root="r", parent=BASE, created=1) for name in NAMES}
        return {BASE: model_card(BASE, root="r", parent=None, created=1), **cards}

    async def collect(self, request: GenerationRequest) -> list[GenerateChunk]:
        return [chunk async for chunk in self.pieces(request)]

    async def pieces(self, request: GenerationRequest) -> AsyncGenerator[GenerateChunk, None]:
        if request.model not in (BASE, *NAMES):
            raise AdapterNotFound(f"no adapter named {request.model!r}")
        async with aclosing(self._generator.generate(request.call("r", None, 0))) as chunks:
            async for chunk in chunks:
                yield chunk


@contextmanager
def engine_server(base: Path) -> Iterator[str]:
    """Serve a model with a tokenizer; yields the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, loop).result(120)

    port = free_port()
    engine, server, serving = run(_start(base, port))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        run(_stop(engine, server, serving))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _start(base: Path, port: int) -> tuple[EngineClient, uvicorn.Server, "asyncio.Task[None]"]:
    config = EngineConfig(model=base, dtype="float32", device="cpu", max_model_len=256, num_threads=1)
    engine = EngineClient(config, LoRAConfig())
    ready = await engine.start(60)
    app = http_app(cast(Service, Named(Generator(engine, ready, ModelTokenizer(base)))))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    # It has no event for this.
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return engine, server, serving


async def _stop(engine: EngineClient, server: uvicorn.Server, serving: "asyncio.Task[None]") -> None:
    server.should_exit = True
    await serving
    await engine.close()
