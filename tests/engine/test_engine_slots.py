"""Slots of a real engine process: warm-ups, protection, resets, and what it tells of its work."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from deployments.engine_client import EngineClient
from lora_core.engine.engine import LLMEngine
from lora_core.errors import AdapterLost
from lora_core.messages import GenerateRequest, Residency
from lora_core.types import LoRAOperation, LoRARequest, LoRAStatus
from lora_core.workload import Workload
from tests.engine.test_engine_client import LORA, START_S, engine_config, load, request, tokens_of, unload, until
from tests.factories import reference_tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Ear:
    """What the engine process has told, in order."""

    def __init__(self) -> None:
        self.residencies: list[Residency] = []
        self.workloads: list[Workload] = []

    def total(self) -> Workload:
        """All accounts in one."""
        total = Workload()
        for work in self.workloads:
            total = work.after(total)
        return total


@pytest.fixture(scope="module")
def ear() -> Ear:
    return Ear()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(tiny_base: Path, ear: Ear) -> AsyncIterator[EngineClient]:
    client = EngineClient(
        engine_config(tiny_base), LORA, on_residency=ear.residencies.append, on_workload=ear.workloads.append
    )
    await client.start(START_S)
    yield client
    await client.close()


@contextlib.asynccontextmanager
async def loaded(client: EngineClient, tiny_adapters: dict[str, Path]) -> AsyncIterator[list[str]]:
    """Three adapters for two slots."""
    names = ["attention-r2", "linear-r4", "rslora-r8"]
    for name in names:
        assert (await client.lora(load(name, tiny_adapters[name]), 20)).status is LoRAStatus.SUCCESS
    yield names
    client.protect_adapters([])
    for name in names:
        await client.lora(unload(name), 20)


async def warm(client: EngineClient, name: str) -> LoRAStatus:
    return (await client.lora(LoRARequest(LoRAOperation.WARM, name), 20)).status


def in_slots(client: EngineClient) -> set[str]:
    return {ref.name for ref in client.residency.resident}


async def test_slots_are_warmed_and_protected_ones_kept_while_requests_go_on(
    client: EngineClient, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    async with loaded(client, tiny_adapters) as (a, b, c):
        running = client.submit(request("long", 200))
        assert await warm(client, a) is LoRAStatus.SUCCESS
        await until(lambda: in_slots(client) == {a}, 20)
        client.protect_adapters([a])
        for name in (b, c, b):
            assert await tokens_of(client.submit(request(name, 4, name))) == reference_tokens(
                tiny_base, tiny_adapters[name], [5, 17, 99, 3, 42], 4
            )
            assert in_slots(client) == {a, name}, "the protected one is least recently used, and stays"
        client.protect_adapters([a, b])
        assert await warm(client, c) is LoRAStatus.UNAVAILABLE
        assert in_slots(client) == {a, b}
        assert len(await tokens_of(running)) == 200


async def test_an_eviction_is_told_before_its_slot_has_another_owner(
    client: EngineClient, ear: Ear, tiny_adapters: dict[str, Path]
) -> None:
    async with loaded(client, tiny_adapters) as names:
        ear.residencies.clear()
        for name in names * 2:
            await tokens_of(client.submit(request(name, 2, name)))
        told = list(ear.residencies)
        assert [report.sequence for report in told] == sorted({report.sequence for report in told})
        assert all({ref.name for ref in report.loaded or ()} == set(names) for report in told), "in full, to listeners"
        for before, after in itertools.pairwise(told):
            came = set(after.resident) - set(before.resident)
            assert came <= set(before.loading), "nothing is in a slot that was not on its way first"
            assert not (came and set(before.resident) - set(after.resident)), "it had left before"
        assert max(report.num_slots_used for report in told) == 2


async def all_is_told(client: EngineClient, ear: Ear, adapter: Path) -> None:
    """Wait until nothing that was done so far is in an account to come."""
    last = "all-is-told"
    assert (await client.lora(load(last, adapter), 20)).status is LoRAStatus.SUCCESS
    await tokens_of(client.submit(request(last, 1, last)))
    await until(lambda: last in {work.name for work in ear.total().adapters} and not client.workload.adapters, 20)
    await client.lora(unload(last), 20)


async def test_work_is_told_by_adapter(client: EngineClient, ear: Ear, tiny_adapters: dict[str, Path]) -> None:
    async with loaded(client, tiny_adapters) as (name, *_):
        await all_is_told(client, ear, tiny_adapters[name])
        ear.workloads.clear()
        await asyncio.gather(
            *(tokens_of(client.submit(request(f"{name}-{n}", 6, name))) for n in range(3)),
            tokens_of(client.submit(request("base", 4))),
        )
        # Each computes five tokens of the prompt, and all of its answer but the last one; a prefix may be cached.
        await until(lambda: sum(work.num_tokens for work in ear.total().adapters) >= 5 + 3 + 10 + 3 * 5, 20)
        await until(lambda: client.workload.adapters == [], 20)
        work = {one.name: one for one in ear.total().adapters}
        assert work.keys() == {name, None}
        assert (work[name].num_started, work[None].num_started) == (3, 1)
        assert (work[None].num_tokens, work[name].num_running, work[name].num_waiting) == (8, 0, 0)
        slots = client.workload.slots
        assert slots.num_misses >= 1
        assert slots.num_loads["host"] >= 1
        assert client.workload.load_ms_per_mib["host"] > 0


async def test_a_reset_ends_an_adapters_requests_and_the_next_is_answered_as_ever(
    client: EngineClient, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    async with loaded(client, tiny_adapters) as (name, other, _):
        stuck, fine = client.submit(request("stuck", 300, name)), client.submit(request("fine", 40, other))
        await anext(stuck)
        client.reset_adapter(name, "no token for 60 s")
        with contextlib.suppress(StopAsyncIteration):
            while (delta := await anext(stuck)).error is None:
                pass
        assert (delta.error, delta.error_type) == ("no token for 60 s", AdapterLost.__name__)
        answer = await tokens_of(client.submit(request("again", 8, name)))
        assert answer == reference_tokens(tiny_base, tiny_adapters[name], [5, 17, 99, 3, 42], 8)
        assert len(await tokens_of(fine)) == 40


async def test_an_engine_counts_no_more_requests_than_it_has(tiny_base: Path, tiny_adapters: dict[str, Path]) -> None:
    engine = LLMEngine(engine_config(tiny_base), LORA)
    engine.warm_up()
    assert engine.workload().adapters == [], "warming up is nobody's work"
    engine.manager.load_adapter(f"a={tiny_adapters['linear-r4']}")
    for index in range(3):
        engine.add_request(GenerateRequest(str(index), [1, 2, 3], lora_name="a"))
    engine.add_request(GenerateRequest("absent", [1], lora_name="absent"))
    engine.step()
    engine.abort("0")
    (work,) = engine.workload().adapters
    assert (work.num_running + work.num_waiting, work.name) == (2, "a")
    engine.reset_adapter("a", "enough")
    assert [delta.error for delta in engine.step()] == ["enough"] * 2
    assert engine.workload().adapters == []
    engine.check_invariants()
