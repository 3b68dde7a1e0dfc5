"""A real engine process behind the routes and OpenAI's own client, without a fleet."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
import openai

from deployments.engine_client import EngineClient
from deployments.generation import GenerateCall, GenerateChunk
from deployments.generator import Generator
from deployments.http_api import Service, http_app
from deployments.openai_api import GenerationRequest
from deployments.prompt_batch import collect_all, stream_all
from deployments.tokenizer import ModelTokenizer
from lora_core.config import EngineConfig, LoRAConfig
from tests.engine.byte_model import byte_model

MAX_NUM_SEQS = 6
MESSAGES: Any = [{"role": "user", "content": "Grüße, 世界"}]
RENDERED = "<user>Grüße, 世界<assistant>"


class Direct:
    """A service of one engine, without routing."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def collect(self, request: GenerationRequest) -> list[GenerateChunk]:
        return await collect_all(self._collect, self._calls(request))

    async def pieces(self, request: GenerationRequest) -> AsyncGenerator[GenerateChunk, None]:
        async with aclosing(stream_all(self._generator.generate, self._calls(request))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _collect(self, call: GenerateCall) -> list[GenerateChunk]:
        return [chunk async for chunk in self._generator.generate(call)]

    def _calls(self, request: GenerationRequest) -> list[GenerateCall]:
        return [request.call(f"r{index}", None, 0, index) for index in range(request.num_prompts)]


class Served(NamedTuple):
    """One engine, the client that asks it, and its tokenizer."""

    base: Path
    engine: EngineClient
    client: openai.AsyncOpenAI
    tokenizer: ModelTokenizer


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    """Serve a model of bytes, saved in this folder, within the block."""
    base = byte_model(folder)
    config = EngineConfig(
        model=base, dtype="float32", device="cpu", max_model_len=256, max_num_seqs=MAX_NUM_SEQS, num_threads=1
    )
    engine = EngineClient(config, LoRAConfig())
    try:
        ready = await engine.start(60)
        tokenizer = ModelTokenizer(base)
        app = http_app(cast(Service, Direct(Generator(engine, ready, tokenizer))))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            client = openai.AsyncOpenAI(
                base_url="http://fleet/v1", api_key="none", http_client=cast(Any, http), max_retries=0
            )
            yield Served(base, engine, client, tokenizer)
    finally:
        await engine.close()


async def assert_idle(served: Served) -> None:
    """The engine soon has nothing to do."""
    for _ in range(100):
        await asyncio.sleep(0.1)
        if served.engine.status.num_running == 0:
            break
    assert served.engine.status.num_running == 0
