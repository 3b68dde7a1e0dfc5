"""What placement costs in a large fleet: decisions, plans, tables and broadcasts, by the product's own code."""

import asyncio
import pickle
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from cluster.board import Board
from cluster.copies import CopySettings, Host, Plan, plan
from cluster.entry import AdapterEntry
from cluster.fleet import ReplicaState
from cluster.placement import PlacementSettings, rank
from cluster.published_table import PublishedTable
from lora_core.types import LoRAStatus
from tests.bench.result import report, require
from tests.unit.router_fleet import Replica, fleet, make_router

NUM_SLOTS, MIB, IN_FLIGHT = 32, 40.0, 16
NEWS_EVERY = 4
"""Decisions between two replicas' news of a slot: a table every 200 ms and each reply bring some."""
CHECKED = 50
"""Decisions compared with `cluster.placement.rank` before any is timed."""


class Decisions(NamedTuple):
    """Processor time of single decisions in microseconds: other work on the machine does not count."""

    num_replicas: int
    num_adapters: int
    p50_us: float
    p99_us: float
    first_p50_us: float
    """Where only the best replica is asked for."""


class Scale(NamedTuple):
    """Everything measured."""

    decisions: list[Decisions]
    figures: dict[str, Any]


class LargeFleet:
    """A fleet under load whose slots are as the plan wishes, popularity Zipf 1.0."""

    def __init__(self, num_replicas: int, num_adapters: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.names = [f"adapter-{number}" for number in range(num_adapters)]
        weights = [1 / rank for rank in range(1, num_adapters + 1)]
        self._sums = list(accumulate(weights))
        self.shares = {name: weight / self._sums[-1] for name, weight in zip(self.names, weights, strict=True)}
        self.hosts = [Host(f"replica-{number}", NUM_SLOTS) for number in range(num_replicas)]
        began_s = time.thread_time()
        self.plan = plan(self.shares, self.hosts)
        self.first_plan_s = time.thread_time() - began_s
        self.states = {host.replica_id: self._state(host) for host in self.hosts}

    def _state(self, host: Host) -> ReplicaState:
        kept = self.plan.keep(host.replica_id)
        others = self.rng.sample(self.names, NUM_SLOTS - len(kept))
        return ReplicaState(
            resident=frozenset((*kept, *others)), in_memory=frozenset(self.rng.sample(self.names, 4 * NUM_SLOTS)),
            num_slots=NUM_SLOTS, num_slots_used=NUM_SLOTS, sequence=1, service_ms=50.0,
            load_ms_per_mib={"host": 0.5, "disk": 2.0},
        )  # fmt: skip

    def board(self) -> Board:
        """As a handle sees it."""
        board = Board(PlacementSettings())
        board.set_replicas(dict.fromkeys(self.states, 256))
        for replica_id, state in self.states.items():
            board.set_state(replica_id, state)
            board.set_in_flight(replica_id, self.rng.randrange(2 * IN_FLIGHT))
        board.set_copies(self.plan.routes())
        return board

    def asked_for(self, number: int) -> list[str]:
        """So many requests' adapters."""
        return self.rng.choices(self.names, cum_weights=self._sums, k=number)

    def news(self) -> tuple[str, ReplicaState]:
        """A replica, and what it holds now that one of its adapters has lost its slot to another."""
        replica_id = self.rng.choice(list(self.states))
        state = self.states[replica_id]
        come, gone = self.rng.choice(self.names), next(iter(state.resident))
        self.states[replica_id] = msgspec.structs.replace(
            state, resident=(state.resident - {gone}) | {come}, in_memory=(state.in_memory - {gone}) | {come},
            sequence=state.sequence + 1,
        )  # fmt: skip
        return replica_id, self.states[replica_id]


def decide(large: LargeFleet, number: int) -> Decisions:
    """Time decisions of one handle, each after a request was sent and another one ended, some after news of a slot."""
    board, routes = large.board(), large.plan.routes()
    for name in large.asked_for(CHECKED):
        views = [board.view(replica_id) for replica_id in board.replica_ids]
        expected = rank(name, views, board.settings, mib=MIB, granted=routes.get(name, ()))
        require(board.order(name, mib=MIB).open == expected[:8], f"{name} is not sent where the policy says")
        require(board.first(name, mib=MIB) == expected[0], f"{name} is not sent where the policy says")
    orders, firsts = [], []
    for turn, name in enumerate(large.asked_for(number)):
        if turn % NEWS_EVERY == 0:
            board.set_state(*large.news())
        began_ns = time.thread_time_ns()
        chosen = board.order(name, mib=MIB).open[0]
        between_ns = time.thread_time_ns()
        board.first(name, mib=MIB)
        firsts.append((time.thread_time_ns() - between_ns) / 1e3)
        orders.append((between_ns - began_ns) / 1e3)
        board.set_in_flight(chosen, board.num_in_flight(chosen) + 1)
        other = large.rng.choice(board.replica_ids)
        board.set_in_flight(other, max(0, board.num_in_flight(other) - 1))
    p99_us = statistics.quantiles(orders, n=100)[98]
    return Decisions(len(large.hosts), len(large.names), statistics.median(orders), p99_us, statistics.median(firsts))


def tables(large: LargeFleet) -> dict[str, int]:
    """Pickled bytes of the whole table, of its exceptions from rendezvous order, and of one replica's news."""
    adapters = {
        name: AdapterEntry(
            name=name, path=f"/adapters/{name}", generation=1, state="ready", slot_bytes=int(MIB * 2**20)
        )
        for name in large.names
    }
    published = PublishedTable("router")
    published.update(1, adapters=adapters, replicas=large.states, copies=large.plan.routes())
    version = published.table.version
    replica_id, state = next(iter(large.states.items()))
    swapped = (state.resident - {next(iter(state.resident))}) | {large.names[-1]}
    published.update(1, replicas={replica_id: msgspec.structs.replace(state, resident=swapped, sequence=2)})
    return {
        "table_bytes": len(pickle.dumps(published.table)),
        "replicas_bytes": len(pickle.dumps(published.table.replicas)),
        "copies_bytes": len(pickle.dumps(published.table.copies)),
        "delta_bytes": len(pickle.dumps(published.since(version, "router"))),
    }


def plan_again(large: LargeFleet) -> tuple[float, Plan]:
    """Processor time of a later plan in seconds, with shares as they come the next time."""
    shifted = {name: share * large.rng.uniform(0.9, 1.1) for name, share in large.shares.items()}
    hosts = [replace(host, resident=large.states[host.replica_id].resident) for host in large.hosts]
    began_s = time.thread_time()
    made = plan(shifted, hosts, CopySettings(), large.plan)
    return time.thread_time() - began_s, made


async def register(names: Sequence[str]) -> float:
    """Seconds of processor time until a replica that holds nothing is told of so many adapters, pickling included."""
    router = make_router(lease_s=60.0, lora_paths=[f"{name}=/adapters/{name}" for name in names])
    began_s = time.thread_time()
    told = pickle.dumps(await router.register("r0"))
    passed_s = time.thread_time() - began_s
    await router.close()
    require(len(pickle.loads(told).changes) == len(names), "a registration lacks adapters")
    return passed_s


async def broadcast(num_replicas: int) -> float:
    """Seconds until a load is acknowledged by so many replicas, all of them and the router on one event loop."""
    router = make_router(lease_s=60.0, change_timeout_s=60.0)
    async with fleet(router, *(Replica(router, f"r{number}") for number in range(num_replicas))):
        began_s = time.perf_counter()
        outcome = await router.load("adapter", "/adapters/adapter")
        passed_s = time.perf_counter() - began_s
        require(outcome.status is LoRAStatus.SUCCESS, outcome.message)
        require(len(outcome.per_replica) == num_replicas, f"{len(outcome.per_replica)} replicas acknowledged")
    return passed_s


def scale(*, is_quick: bool = False) -> Scale:
    """Measure and print everything."""
    sizes: Sequence[tuple[int, int]] = ((100, 1000), (100, 10_000), (100, 100_000), (1000, 10_000), (1000, 100_000))
    if is_quick:
        sizes = ((20, 400), (20, 4000))
    decisions = []
    for num_replicas, num_adapters in sizes:
        large = LargeFleet(num_replicas, num_adapters)
        found = decide(large, 500 if is_quick else 20_000 if num_replicas == 100 else 5000)
        decisions.append(found)
        report(
            "decision", **found._asdict(), compared="one decision of one handle, the eight best replicas in order",
            goal="p50_us <= 50 at 100 replicas, whatever the adapters", met=found.p50_us <= 50 or num_replicas > 100,
        )  # fmt: skip
    again_s, made = plan_again(large)
    sizes_bytes = tables(large)
    moved = sum(made.slots.get(name) != ids for name, ids in large.plan.slots.items())
    num_acknowledging = len(large.hosts)
    broadcast_s = asyncio.run(broadcast(num_acknowledging))
    register_s = asyncio.run(register(large.names))
    report(
        "fleet", replicas=len(large.hosts), adapters=len(large.names), first_plan_s=large.first_plan_s,
        plan_s=again_s, promises=len(made.slots), promises_changed=moved, routes=len(made.routes()), **sizes_bytes,
        broadcast_s=broadcast_s, broadcast_us_per_replica=1e6 * broadcast_s / num_acknowledging, register_s=register_s,
        compared="nothing: what each costs the router actor", goal="none", met=None,
    )  # fmt: skip
    of_goal = decisions[1]
    return Scale(
        decisions,
        {
            "decision_p50_us": round(of_goal.p50_us, 1),
            "decision_p99_us": round(of_goal.p99_us, 1),
            "decision_first_p50_us": round(of_goal.first_p50_us, 1),
            "decision_p50_us_largest": round(decisions[-1].p50_us, 1),
            "plan_s": round(again_s, 2),
            "table_bytes": sizes_bytes["table_bytes"],
            "delta_bytes": sizes_bytes["delta_bytes"],
            "broadcast_s": round(broadcast_s, 2),
            "register_s": round(register_s, 3),
        },
    )
