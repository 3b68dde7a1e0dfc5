"""A fleet without Ray: `AdapterRouter` as a plain object, and replicas that are asyncio tasks."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from cluster.changes import Change, topic_of
from cluster.fleet import Outcome, Registration
from deployments.held_adapters import HeldAdapters
from deployments.router import AdapterRouter
from lora_core.types import LoadReport, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus

Refusal = Callable[[LoRARequest], LoRAResponse | None]


def make_router(**settings: Any) -> AdapterRouter:
    return AdapterRouter({"base_name": "base", "lease_s": 0.5, "change_timeout_s": 5.0, **settings})


class Content(NamedTuple):
    """What an engine holds under a name."""

    generation: int
    path: str
    content_hash: str


class Replica:
    """Follows the router as a replica does; its engine is a dict, and its disk the hash of each path's content."""

    def __init__(self, router: AdapterRouter, name: str, refuse: Refusal = lambda _: None, delay_s: float = 0) -> None:
        self.router, self.name, self.refuse, self.delay_s = router, name, refuse, delay_s
        self.engine: dict[str, Content] = {}
        self.disk: dict[str, str] = {}
        self.pins: set[str] = set()
        self.most_pins: int | None = None
        self.generations: set[int] = set()
        self.may_swap = asyncio.Event()
        self.may_swap.set()
        self.held = HeldAdapters(self.ask)
        self.applied: list[Change] = []
        self.epoch = 0
        self.registration: Registration | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def holding(self) -> dict[str, int]:
        return {name: content.generation for name, content in self.engine.items()}

    @property
    def paths(self) -> dict[str, str]:
        return {name: content.path for name, content in self.engine.items()}

    async def start(self) -> "Replica":
        self.registration = await self.router.register(self.name, self.held.generations, self.held.pinned)
        for change in self.registration.changes:
            await self.acknowledge(change, self.registration.epoch, await self.apply(change))
        self.epoch = self.registration.epoch
        self._task = asyncio.create_task(self.follow())
        return self

    async def follow(self) -> None:
        while True:
            for change in await self.router.wait_changes(self.name, self.epoch, 0.1):
                await self.acknowledge(change, change.epoch, await self.apply(change))
                self.epoch = change.epoch

    async def acknowledge(self, change: Change, epoch: int, response: LoRAResponse) -> None:
        outcome = Outcome(topic=topic_of(change.request), epoch=epoch, response=response)
        for unload in await self.router.acknowledge(self.name, [outcome]):
            await self.held.give_up(unload, "other content")

    async def apply(self, change: Change) -> LoRAResponse:
        await asyncio.sleep(self.delay_s)
        self.applied.append(change)
        return await self.held.apply(change)

    async def ask(self, request: LoRARequest) -> LoRAResponse:
        if request.replace:
            await self.may_swap.wait()
        refusal = self.refuse(request)
        if refusal is not None:
            return refusal
        match request.operation:
            case LoRAOperation.LOAD:
                return self.load(request)
            case LoRAOperation.UNLOAD:
                self.pins.discard(request.lora_name)
                if self.engine.pop(request.lora_name, None) is None:
                    return LoRAResponse(LoRAStatus.UNLOAD_NAME_NONEXISTENT, "not here")
            case LoRAOperation.PIN:
                if self.most_pins is not None and len(self.pins - {request.lora_name}) >= self.most_pins:
                    return LoRAResponse(LoRAStatus.PIN_ERROR, f"{len(self.pins)} are pinned")
                self.pins.add(request.lora_name)
            case LoRAOperation.UNPIN:
                self.pins.discard(request.lora_name)
        return LoRAResponse(LoRAStatus.SUCCESS, "done")

    def load(self, request: LoRARequest) -> LoRAResponse:
        name, path = request.lora_name, request.lora_path
        assert path is not None
        assert request.generation is not None
        held = self.engine.get(name)
        assert held is None or request.replace, "loaded over another generation"
        in_memory = {content.content_hash for content in self.engine.values()}
        found = self.disk.get(path, f"of {path}")
        if request.content_hash in in_memory:
            found = request.content_hash
        elif request.content_hash is not None and request.content_hash != found:
            return LoRAResponse(LoRAStatus.LOAD_INVALID_ADAPTER, f"the files of {name!r} in {path} are other ones")
        assert request.generation not in self.generations, "a generation is given once"
        self.generations.add(request.generation)
        new = Content(request.generation, path, found)
        self.engine[name] = new
        report = LoadReport(
            generation=new.generation, content_hash=new.content_hash, num_modules=2, ranks={4: 2}, num_bytes=64
        )
        return LoRAResponse(LoRAStatus.SUCCESS, "done", report)

    async def stop(self) -> None:
        """Vanish as a killed process does, without a word."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def fleet(router: AdapterRouter, *replicas: Replica) -> AsyncIterator[list[Replica]]:
    for replica in replicas:
        await replica.start()
    yield list(replicas)
    for replica in replicas:
        await replica.stop()
    await router.close()


def refuse_all(status: LoRAStatus, message: str) -> Refusal:
    def refuse(request: LoRARequest) -> LoRAResponse | None:
        return LoRAResponse(status, message) if request.operation is LoRAOperation.LOAD else None

    return refuse


async def settled(condition: Callable[[], bool], timeout_s: float = 3) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.01)


async def names(router: AdapterRouter) -> set[str]:
    return set((await router.table()).adapters)
