"""The router and real followers over links that lose, repeat, delay and reorder, with both ends dying now and then."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cluster import retries as retries_module
from cluster.changes import Change
from cluster.fleet import Outcome, Registration, SlotWishes
from deployments import adapter_follower
from deployments.adapter_follower import AdapterFollower
from deployments.router import AdapterRouter
from lora_core.errors import RequestTimeout
from lora_core.messages import Residency
from lora_core.types import LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus
from lora_core.workload import Workload
from tests.unit.router_fleet import Replica, make_router, settled

NUM_SLOTS = 2
"""So that of the two adapters one can be pinned."""

Fault = str
FAULTS = st.sampled_from(["none", "none", "lose request", "lose answer", "repeat", "delay"])

Call = Callable[[], Coroutine[Any, Any, Any]]


class World:
    """A router with a journal, its replicas, and what goes wrong between them."""

    def __init__(self, journal: Path, faults: list[Fault], failures: list[bool]) -> None:
        self._settings: dict[str, Any] = {
            "journal": str(journal),
            "num_slots": NUM_SLOTS,
            "lease_s": 0.6,
            "change_timeout_s": 0.4,
        }
        self._faults: Iterator[Fault] = iter(faults)
        self._failures = iter(failures)
        self._numbers = itertools.count()
        self.router = make_router(**self._settings)
        self.nodes: list[Node] = []
        self._retired: list[AdapterRouter] = []

    async def restart_router(self) -> None:
        """The actor is killed, and its successor finds the journal."""
        self._retired.append(self.router)
        self.router = make_router(**self._settings)

    async def add_node(self) -> None:
        node = Node(self, f"r{next(self._numbers)}")
        self.nodes.append(node)
        await node.start()

    async def kill_node(self) -> None:
        if len(self.nodes) > 1:
            await self.nodes.pop(0).stop()

    async def over(self, call: Call) -> Any:
        """Make a call as the link lets it through."""
        match next(self._faults, "none"):
            case "lose request":
                raise RequestTimeout("the request was lost")
            case "lose answer":
                await call()
                raise RequestTimeout("the answer was lost")
            case "repeat":
                first, second = await asyncio.gather(call(), call(), return_exceptions=True)
                if isinstance(second, BaseException):
                    raise second
                return second if isinstance(first, BaseException) else first
            case "delay":
                await asyncio.sleep(0.02)
        return await call()

    def load_fails(self) -> bool:
        """Whether the next load fails on the replica that tries it."""
        return next(self._failures, False)

    async def close(self) -> None:
        for node in self.nodes:
            await node.stop()
        for router in (self.router, *self._retired):
            await router.close()


class Link:
    """The router actor to one replica, whichever is alive."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last: list[Change] = []

    async def register(
        self, replica_id: str, holding: Mapping[str, int] | None = None, pinned: Collection[str] = ()
    ) -> Registration:
        found: Registration = await self._world.over(lambda: self._router.register(replica_id, holding, pinned))
        # What another router told is no answer to a call of this one, whose epochs may be the same numbers.
        self._last = []
        return found

    async def wait_changes(self, replica_id: str, since_epoch: int, timeout_s: float) -> list[Change]:
        changes: list[Change] = await self._world.over(
            lambda: self._router.wait_changes(replica_id, since_epoch, min(timeout_s, 0.05))
        )
        # What was told before is told again.
        self._last, again = changes or self._last, self._last
        return [*again, *changes]

    async def acknowledge(self, replica_id: str, outcomes: list[Outcome]) -> list[Change]:
        # Those of one message come in any order.
        unloads: list[Change] = await self._world.over(lambda: self._router.acknowledge(replica_id, outcomes[::-1]))
        return unloads

    async def report_residency(self, replica_id: str, residency: Residency, num_slots: int) -> None:
        await self._world.over(lambda: self._router.report_residency(replica_id, residency, num_slots))

    async def report_work(self, replica_id: str, work: Workload) -> SlotWishes:
        wishes: SlotWishes = await self._world.over(lambda: self._router.report_work(replica_id, work))
        return wishes

    async def wait_wishes(self, replica_id: str, version: int, timeout_s: float) -> SlotWishes:
        return await self._router.wait_wishes(replica_id, version, 0.05)

    @property
    def _router(self) -> AdapterRouter:
        return self._world.router


class Node:
    """A replica: an engine that is a dict, and the product's own follower."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.engine = Replica(world.router, name, self._refuse)
        self.engine.most_pins = NUM_SLOTS - 1
        self._world = world
        self.follower = AdapterFollower(Link(world), self.engine.ask, name, NUM_SLOTS)

    def _refuse(self, request: LoRARequest) -> LoRAResponse | None:
        if request.operation is LoRAOperation.LOAD and self._world.load_fails():
            return LoRAResponse(LoRAStatus.LOAD_ERROR, "no memory just now")
        return None

    async def start(self) -> None:
        self._joining = asyncio.create_task(self._join())

    async def _join(self) -> None:
        await self.follower.join()
        self.follower.report(Residency(1, [], [], []))

    async def stop(self) -> None:
        self._joining.cancel()
        await asyncio.gather(self._joining, return_exceptions=True)
        await self.follower.close()

    @property
    def holding(self) -> dict[str, int]:
        held = self.follower._held
        assert held.generations.keys() == self.engine.engine.keys(), "what it believes is what its engine has"
        return dict(held.generations)


OPERATIONS = st.sampled_from(
    ["load", "load", "replace", "unload", "pin", "unpin", "restart router", "add node", "kill node", "wait"]
)
STEPS = st.lists(st.tuples(OPERATIONS, st.sampled_from("ab"), st.sampled_from(["/x", "/y"])), min_size=6, max_size=14)


async def take(world: World, step: tuple[str, str, str]) -> None:
    operation, name, path = step
    match operation:
        case "load" | "replace":
            await world.router.load(name, path, operation == "replace")
        case "unload":
            await world.router.unload(name)
        case "pin":
            await world.router.pin(name)
        case "unpin":
            await world.router.unpin(name)
        case "restart router":
            await world.restart_router()
        case "add node":
            await world.add_node()
        case "kill node":
            await world.kill_node()
        case "wait":
            await asyncio.sleep(0.05)


async def history(journal: Path, steps: list[tuple[str, str, str]], faults: list[Fault], failures: list[bool]) -> None:
    world = World(journal, faults, failures)
    await world.add_node()
    await world.add_node()
    tasks = []
    for step in steps:
        # Side by side: each is begun some time after the one before, and none waits for it.
        tasks.append(asyncio.create_task(take(world, step)))
        await asyncio.sleep(0.01)
    done = asyncio.gather(*tasks, return_exceptions=True)
    # A router that was killed leaves its callers without an answer: in Ray they are told so.
    await asyncio.wait([done], timeout=2)
    registry = world.router._registry

    def agreed() -> bool:
        desired = {name: entry.generation for name, entry in registry.entries.items()}
        pinned = {name for name, entry in registry.entries.items() if entry.pinned}
        members = world.router._members
        return all(node.holding == desired and node.follower._held.pinned == pinned for node in world.nodes) and all(
            (found := members.find(node.name)) is not None and found.applied_epoch(registry.epoch) == registry.epoch
            for node in world.nodes
        )

    await settled(agreed, 10)
    assert all(entry.state == "ready" for entry in registry.entries.values())
    table = await world.router.table()
    assert all(not table.replicas[node.name].refused for node in world.nodes)
    done.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await world.close()
    successor = make_router(journal=str(journal))
    assert (await successor.table()).adapters == table.adapters, "the journal tells the same"
    await successor.close()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_follower, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(adapter_follower, "LONGEST_PAUSE_S", 0.05)
    # A link this bad would keep a real replica from starting; here it must only not forget anything.
    monkeypatch.setattr(adapter_follower, "JOIN_ATTEMPTS", 1000)
    monkeypatch.setattr(retries_module, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(retries_module, "LONGEST_PAUSE_S", 0.1)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    # Each example that fails waits long to see whether it does: a smaller one is not looked for.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(steps=STEPS, faults=st.lists(FAULTS, min_size=10, max_size=60), failures=st.lists(st.booleans(), max_size=20))
def test_whatever_happens_all_replicas_end_where_the_journal_says(
    steps: list[tuple[str, str, str]],
    faults: list[Fault],
    failures: list[bool],
    short_pauses: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    asyncio.run(history(tmp_path_factory.mktemp("history") / "journal.sqlite", steps, faults, failures))
