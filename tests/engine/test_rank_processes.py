"""An engine process with another rank: it answers exactly, and neither outlives the other."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from deployments.engine_client import EngineClient
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.errors import ConfigError, EngineDead
from lora_core.messages import GenerateRequest, SamplingParams
from lora_core.types import LoRAOperation, LoRARequest, LoRAStatus
from tests.factories import reference_tokens

PROMPT = [5, 17, 99, 3, 42]
START_S = 120.0


def settings(model: Path, size: int = 2) -> EngineConfig:
    return EngineConfig(
        model=model, dtype="float32", device="cpu", kv_cache_tokens=2048, num_threads=1, tensor_parallel_size=size
    )


@asynccontextmanager
async def started(model: Path) -> AsyncIterator[tuple[EngineClient, psutil.Process]]:
    """A client of an engine process, and the process of its other rank."""
    client = EngineClient(settings(model), LoRAConfig(enable_lora=True, max_num_loras=2, max_lora_rank=8))
    await client.start(START_S)
    try:
        (rank,) = [one for one in psutil.Process(client.pid).children() if one.name() == "lora-rank"]
        yield client, rank
    finally:
        await client.close()


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def request(n: int, name: str | None) -> GenerateRequest:
    return GenerateRequest("r", PROMPT, SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True), name)


async def test_an_engine_process_ends_with_its_rank_and_says_so(
    tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    async with started(tiny_base) as (client, rank):
        loaded = await client.lora(LoRARequest(LoRAOperation.LOAD, "a", str(tiny_adapters["linear-r4"])), 60)
        assert loaded.status is LoRAStatus.SUCCESS, loaded.message
        tokens = [token async for delta in client.submit(request(12, "a")) for token in delta.token_ids]
        assert tokens == reference_tokens(tiny_base, tiny_adapters["linear-r4"], PROMPT, 12)
        stream = client.submit(request(500, None))
        await anext(stream)
        engine = psutil.Process(client.pid)
        rank.kill()
        reason = rf"rank 1 \(process {rank.pid}\) was killed by signal 9"
        with pytest.raises(EngineDead, match=reason):
            async for _ in stream:
                pass
        with pytest.raises(EngineDead, match=reason):
            client.check_healthy()
        await until(lambda: has_ended(engine))


async def test_a_killed_engine_process_leaves_no_rank_not_even_a_stopped_one(tiny_base: Path) -> None:
    async with started(tiny_base) as (client, rank):
        os.kill(rank.pid, signal.SIGSTOP)
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: has_ended(rank))


async def test_a_model_that_does_not_divide_is_a_fault_of_the_configuration(tiny_base: Path) -> None:
    client = EngineClient(settings(tiny_base, 3), LoRAConfig())
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3, which does not divide"):
        await client.start(START_S)
