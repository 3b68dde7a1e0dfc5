"""The watchdog on real engine processes that stall and go on speaking: one adapter, again and again, and all of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.progress import Deadlines
from deployments.engine_client import EngineClient
from deployments.token_stream import TokenStream
from deployments.watchdog import Watchdog
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.errors import AdapterLost, EngineDead
from lora_core.messages import GenerateRequest, SamplingParams
from lora_core.types import LoRAOperation, LoRARequest, LoRAStatus
from tests.chaos.faulty_engine import EVERYTHING, switch_of
from tests.chaos.switches import VARIABLE, Switches

PROMPT = [5, 17, 99, 3, 42]
LORA = LoRAConfig(enable_lora=True, max_num_loras=2, max_lora_rank=8)
DEADLINES = Deadlines(adapter_s=4, waiting_s=20, replica_s=8)


class Watched:
    """An engine process under a watchdog, and what that has told."""

    def __init__(self, client: EngineClient, switches: Switches) -> None:
        self.client, self.switches = client, switches
        self.told: list[tuple[list[str], str]] = []
        self.num_heals = 0
        self.well = asyncio.Event()
        self.watchdog = Watchdog(client, DEADLINES, self._tell, self._count_heal)

    def _tell(self, stalled: dict[str, str], fault: str) -> None:
        self.told.append((sorted(stalled), fault))
        (self.well.clear if stalled or fault else self.well.set)()

    def _count_heal(self) -> None:
        self.num_heals += 1

    def stall(self, what: str) -> None:
        self.switches.turn_on(switch_of(self.client.pid), what)

    def submit(self, name: str | None, num_tokens: int = 16) -> TokenStream:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return self.client.submit(GenerateRequest("r", PROMPT, sampling, name))

    async def tokens(self, name: str | None) -> list[int]:
        return [token_id async for delta in self.submit(name) for token_id in delta.token_ids]


@contextlib.asynccontextmanager
async def watched(base: Path, adapters: dict[str, Path], folder: Path) -> AsyncIterator[Watched]:
    config = EngineConfig(model=base, dtype="float32", device="cpu", kv_cache_tokens=2048, num_threads=1)
    client = EngineClient(config, LORA, module="tests.chaos.faulty_engine")
    await client.start(60)
    try:
        for name, path in adapters.items():
            response = await client.lora(LoRARequest(LoRAOperation.LOAD, name, str(path)), 60)
            assert response.status is LoRAStatus.SUCCESS, response
        one = Watched(client, Switches(folder))
        watching = asyncio.create_task(one.watchdog.run())
        yield one
        watching.cancel()
    finally:
        await client.close()


async def test_a_stalled_adapter_is_healed_and_others_do_not_notice(
    tiny_base: Path, tiny_adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    adapters = {name: tiny_adapters[name] for name in ("linear-r4", "rslora-r8")}
    async with watched(tiny_base, adapters, tmp_path) as engine:
        right = {name: await engine.tokens(name) for name in (*adapters, None)}
        engine.stall("linear-r4")
        stuck = asyncio.create_task(engine.tokens("linear-r4"))
        while not stuck.done():
            assert await engine.tokens("rslora-r8") == right["rslora-r8"]
            assert await engine.tokens(None) == right[None]
        with pytest.raises(AdapterLost, match=r"'linear-r4'.*watchdog.adapter_deadline_s is 4.*loaded there anew"):
            stuck.result()
        # The reload has ended what stalled it.
        assert await engine.tokens("linear-r4") == right["linear-r4"]
        assert engine.num_heals == 1
        await asyncio.wait_for(engine.well.wait(), 10)
        assert engine.told == [(["linear-r4"], ""), ([], "")]
        engine.client.check_healthy()


async def test_an_engine_that_speaks_and_computes_nothing_is_condemned(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    async with watched(tiny_base, {}, tmp_path) as engine:
        await engine.tokens(None)
        engine.stall(EVERYTHING)
        with pytest.raises(EngineDead, match="the replica is stalled: no request has made progress"):
            await engine.tokens(None)
        with pytest.raises(EngineDead, match=r"watchdog\.replica_deadline_s is 8"):
            engine.client.check_healthy()
        ((stalled, fault),) = engine.told
        assert (stalled, "no request has made progress" in fault) == ([], True)
