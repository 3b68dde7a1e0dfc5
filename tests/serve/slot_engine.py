"""A replica without a model, for tests whose subject is where requests go: it follows its router actor as ours do."""

import asyncio
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.fleet import ROUTER_ACTOR
from deployments.adapter_follower import AdapterFollower
from deployments.engine_handle import EngineHandle
from deployments.generation import GenerateCall, GenerateChunk, SlotSnapshot
from deployments.leaving import watch_leaving
from deployments.router_client import RouterClient
from lora_core.messages import Residency
from lora_core.types import AdapterRef, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus
from lora_core.workload import AdapterWork, Workload

LOAD_S = 0.2
"""How long an adapter takes into a slot when a request of `generate` comes for it, or the router actor wishes it."""
TOKEN_S = 0.05
WORKLOAD_S = 0.5
WARM_TIMEOUT_S = 5.0


class SlotEngine:
    """Adapters are names, and slots a list with the last used at its end.

    Args:
        start_s: How long a replica takes to start.
        num_slots: How many adapters it has in slots at once.
    """

    async def __init__(self, start_s: float = 0.0, num_slots: int = 2) -> None:  # type: ignore[misc]  # Serve awaits it
        self._id = serve.get_replica_context().replica_id.unique_id
        self._num_slots = num_slots
        self._loaded: dict[str, int] = {}
        self._slots: list[str] = []
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._num_loads: dict[str, int] = {}
        self._at_first_request: list[str] | None = None
        self._sequence = 0
        await asyncio.sleep(start_s)
        self._follower = AdapterFollower(RouterClient(), self._apply, self._id, num_slots)
        await self._follower.join()
        self._num_tokens: Counter[str] = Counter()
        self._working = asyncio.create_task(self._report_work())
        self._leaving = asyncio.create_task(watch_leaving(self._follower.set_leaving))
        self._report()
        await self._follower.warm_share(WARM_TIMEOUT_S)

    async def where(self) -> str:
        """Take a request, as an engine does: its adapter gets a slot at once. Returns this replica's id."""
        adapter = serve.get_multiplexed_model_id()
        if adapter:
            self._note_first_request()
            assert adapter in self._loaded, f"{adapter!r} is not loaded here"
            self._give_slot(adapter)
        return str(self._id)

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateChunk]:
        """Answer with this replica's id, and `call.max_tokens` tokens in all; a cold adapter takes its time first."""
        if call.lora_name is not None:
            self._note_first_request()
            assert call.lora_name in self._loaded, f"{call.lora_name!r} is not loaded here"
            await self._bring(call.lora_name)
            self._num_tokens[call.lora_name] += call.max_tokens or 1
        snapshot = SlotSnapshot(
            replica_id=self._id,
            sequence=self._sequence,
            resident=tuple(self._slots),
            loading=tuple(self._loading),
            num_slots_used=len(self._slots),
        )
        yield GenerateChunk(text=self._id, token_ids=[1], snapshot=snapshot)
        for index in range(1, call.max_tokens or 1):
            await asyncio.sleep(TOKEN_S)
            yield GenerateChunk(
                text="", token_ids=[1], finish_reason="length" if index + 1 == call.max_tokens else None
            )

    async def router_name(self) -> str:
        return self._follower.router_name

    async def holding(self) -> dict[str, int]:
        """Name -> generation of what is loaded."""
        return self._loaded

    async def num_loads(self) -> dict[str, int]:
        """Name -> how often the adapter came to a slot because `generate` or the router actor asked for it."""
        return self._num_loads

    async def at_first_request(self) -> list[str] | None:
        """What was in the slots when the first request for an adapter came; None before that."""
        return self._at_first_request

    async def pid(self) -> int:
        return os.getpid()

    async def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def record_replica_metadata(self) -> dict[str, Any]:
        return {ROUTER_ACTOR: self._follower.router_name, "replica_id": self._id}

    async def _apply(self, request: LoRARequest) -> LoRAResponse:
        if request.lora_name.startswith("slow"):
            await asyncio.sleep(1.0)
        match request.operation:
            case LoRAOperation.UNLOAD:
                self._loaded.pop(request.lora_name, None)
                self._slots = [name for name in self._slots if name != request.lora_name]
            case LoRAOperation.WARM:
                if request.lora_name in self._loaded and len(self._slots) + len(self._loading) < self._num_slots:
                    await self._bring(request.lora_name)
            case _ if request.lora_path == "/bad":
                return LoRAResponse(LoRAStatus.LOAD_INVALID_ADAPTER, "bad adapter")
            case LoRAOperation.LOAD:
                assert request.generation is not None
                self._loaded[request.lora_name] = request.generation
        self._report()
        return LoRAResponse(LoRAStatus.SUCCESS, "done")

    async def _report_work(self) -> None:
        while True:
            await asyncio.sleep(WORKLOAD_S)
            done, self._num_tokens = self._num_tokens, Counter()
            adapters = [AdapterWork(name=name, num_tokens=count, num_started=1) for name, count in done.items()]
            self._follower.report_work(Workload(seconds=WORKLOAD_S, adapters=adapters))

    def _note_first_request(self) -> None:
        if self._at_first_request is None:
            self._at_first_request = list(self._slots)

    async def _bring(self, name: str) -> None:
        if name in self._slots:
            self._give_slot(name)
            return
        load = self._loading.get(name)
        if load is None:
            self._num_loads[name] = self._num_loads.get(name, 0) + 1
            load = self._loading[name] = asyncio.create_task(self._load(name))
            self._report()
        await asyncio.shield(load)

    async def _load(self, name: str) -> None:
        await asyncio.sleep(LOAD_S)
        del self._loading[name]
        if name in self._loaded:
            self._give_slot(name)

    def _give_slot(self, name: str) -> None:
        self._slots = [*[other for other in self._slots if other != name], name][-self._num_slots :]
        self._report()

    def _report(self) -> None:
        def refs(names: Any) -> list[AdapterRef]:
            return [AdapterRef(name, self._loaded[name]) for name in names if name in self._loaded]

        self._sequence += 1
        self._follower.report(
            Residency(
                self._sequence, refs(self._slots), refs(self._loaded), refs(self._loaded), refs(self._loading),
                len(self._slots),
            )
        )  # fmt: skip


class Fan:
    """Makes many calls to the engines inside one request, as an ingress does for several answers to one prompt."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self._engine = engine
        self._handle = EngineHandle(engine)

    async def gather(self, adapter: str, num_calls: int) -> list[str]:
        handle = self._engine.options(multiplexed_model_id=adapter)
        return list(await asyncio.gather(*(handle.where.remote() for _ in range(num_calls))))

    async def stream(self, adapter: str, num_tokens: int, num_calls: int = 1) -> list[tuple[str, int]]:
        """Answers as an ingress has them: for each the replica that gave it, and how many tokens came."""
        calls = [_call(adapter, num_tokens) for _ in range(num_calls)]
        return list(await asyncio.gather(*(_answer(self._handle.generate(call)) for call in calls)))

    async def starts_on_demand(self) -> bool:
        """As an ingress answers for its health where there is no replica."""
        return await self._handle.starts_on_demand()

    async def router_name(self) -> str:
        """As an ingress finds the router actor."""
        return await self._handle.router_name()

    async def wake(self) -> None:
        """As an ingress has a replica started."""
        await self._handle.wake()

    async def stream_on(self, replica: str, num_tokens: int) -> tuple[str, int]:
        """The answer of one replica."""
        handle = self._engine.options(stream=True, session_id=f"replica:{replica}")
        return await _answer(handle.generate.remote(_call("", num_tokens)))


def _call(adapter: str, num_tokens: int) -> GenerateCall:
    return GenerateCall(request_id=uuid.uuid4().hex, lora_name=adapter or None, max_tokens=num_tokens, prompt="hi")


async def _answer(chunks: AsyncIterator[GenerateChunk]) -> tuple[str, int]:
    """Who answers, and how many tokens come."""
    found = [chunk async for chunk in chunks]
    return found[0].text, len(found)


def eventually(condition: Any, timeout_s: float = 15) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.05)
