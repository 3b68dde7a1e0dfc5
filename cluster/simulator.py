"""The routing policy at work on a simulated fleet: events in order of time, everything drawn from a seed.

What is simulated: several handles that know what handles know (`cluster.simulated_handle`), the router actor's table
and plan (`cluster.simulated_router`), and replicas with seats, slots and a loader (`cluster.simulated_replica`). The
decisions are the product's own code. What is not: the network, tokens, prompts, and the time a decision takes.
"""

import functools
import heapq
import random
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cluster.baselines import Policy, least_loaded
from cluster.copies import CopySettings
from cluster.placement import PlacementSettings
from cluster.simulated_handle import SimulatedHandle
from cluster.simulated_replica import Machine, Request, SimulatedReplica
from cluster.simulated_router import SimulatedRouter
from cluster.workloads import Fault, Trace, Workload, make_trace

TABLE_MS = 200.0
"""Between two tables of the router actor."""
PLAN_MS = 2000.0
"""Between two plans."""
WARM_MS = 10_000.0
"""Longest that a new replica warms its share before it takes requests, where there is a plan."""

EventKind = Literal["finish", "load", "table", "plan", "fault", "join"]


class Event(NamedTuple):
    """Something that happens at a time; `version` tells a finish that is no longer due."""

    time_ms: float
    order: int
    kind: EventKind
    replica: int = -1
    version: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Figures of one run, its warm-up left out."""

    hit_rate: float
    """Requests whose adapter was in a slot of the replica they came to."""
    max_over_mean: float
    """Requests a second of the busiest replica, over the mean of all."""
    loads_per_request: float
    evictions_per_request: float
    warmed_per_request: float
    longest_wait_ms: float
    """From arrival until the request ran; of those that did."""
    moves_per_request: float
    """Slots promised anew by plans, warm-up included."""
    num_routes: int
    """Adapters that the last plan had to tell handles about."""
    num_answered: int
    """Requests that ended, warm-up included."""
    answered_per_s: float


@dataclass
class _Life:
    """A replica's time in routing past the warm-up."""

    replica: SimulatedReplica
    joined_ms: float | None
    left_ms: float | None = None
    version: int = 0
    join_by_ms: float = 0.0


class Simulator:
    """One run of one policy on one trace.

    Args:
        workload: The fleet, and its faults.
        trace: Its requests.
        policy: Who decides.
        seed: Of what chance there is beside the trace.
        num_handles: Processes that send requests, each with its own view.
        warm_up: Part of the requests that is not counted.
        settings: Of `cluster.placement`.
        copy_settings: Of `cluster.copies`.
        machine: How fast a replica is.
    """

    def __init__(
        self,
        workload: Workload,
        trace: Trace,
        policy: Policy,
        seed: int,
        *,
        num_handles: int = 4,
        warm_up: float = 0.25,
        settings: PlacementSettings = PlacementSettings(),  # noqa: B008
        copy_settings: CopySettings = CopySettings(),  # noqa: B008
        machine: Machine = Machine(),  # noqa: B008
    ) -> None:
        self._workload, self._trace, self._policy, self._machine = workload, trace, policy, machine
        self._random = random.Random(seed)
        self._mib = dict(zip(trace.names, trace.mib, strict=True))
        self._first_counted = int(warm_up * len(trace.times_ms))
        self._counting_since = 0.0
        self._lives: list[_Life] = []
        self._by_id: dict[str, _Life] = {}
        self._router = SimulatedRouter(copy_settings)
        self._handles = [SimulatedHandle(settings, policy.reads_slots) for _ in range(num_handles)]
        self._events: list[Event] = []
        self._num_events = self._num_answered = 0
        for _ in range(workload.num_replicas):
            self._add_replica(joined_ms=0.0)
        self._tell_handles()

    def run(self, *, to_the_end: bool = False) -> Outcome:
        """Let all requests arrive, and, where asked for, end."""
        trace, faults = self._trace, sorted(self._workload.faults, key=lambda fault: fault.at)
        due = [int(fault.at * len(trace.times_ms)) for fault in faults]
        if self._policy.reads_slots:
            self._push(TABLE_MS, "table")
        if self._policy.has_plan:
            self._push(PLAN_MS, "plan")
        for number, time_ms in enumerate(trace.times_ms):
            self._run_until(time_ms)
            if number == self._first_counted:
                self._begin_counting(time_ms)
            while due and due[0] <= number:
                due.pop(0)
                self._fail(faults.pop(0), time_ms)
            name = trace.names[trace.adapters[number]]
            handle, counts = self._random.randrange(len(self._handles)), number >= self._first_counted
            self._route(Request(name, self._mib[name], trace.tokens[number], time_ms, handle, counts), time_ms)
        ended_ms = trace.times_ms[-1]
        while to_the_end and any(life.replica.num_in_flight for life in self._by_id.values()):
            ended_ms = self._next_event()
        return self._outcome(trace.times_ms[-1], ended_ms)

    # Events

    def _run_until(self, time_ms: float) -> None:
        while self._events and self._events[0].time_ms <= time_ms:
            self._next_event()

    def _next_event(self) -> float:
        event = heapq.heappop(self._events)
        now = event.time_ms
        if event.kind == "table":
            self._publish(now)
            self._push(now + TABLE_MS, "table")
        elif event.kind == "plan":
            self._plan(now)
            self._push(now + PLAN_MS, "plan")
        elif event.kind == "join":
            self._join(event.replica, now)
        else:
            life = self._lives[event.replica]
            if event.kind == "load":
                life.replica.end_load(now)
                self._after(event.replica, now)
            elif event.version == life.version:
                request = life.replica.finish(now)
                self._num_answered += 1
                self._handles[request.handle].replied(life.replica.replica_id, request.adapter, now)
                self._after(event.replica, now)
        return now

    def _push(self, time_ms: float, kind: EventKind, replica: int = -1, version: int = 0) -> None:
        self._num_events += 1
        heapq.heappush(self._events, Event(time_ms, self._num_events, kind, replica, version))

    def _route(self, request: Request, now: float) -> None:
        handle = self._handles[request.handle]
        replica_id = self._policy.choose(handle.board, request.adapter, request.mib, self._random)
        life = self._by_id[replica_id]
        if self._policy.reads_slots and not handle.board.holds(request.adapter, replica_id):
            self._router.note_load(replica_id, request.adapter, now)
        life.replica.accept(request, now)
        handle.sent(replica_id, request.adapter, life.replica.num_in_flight, now)
        self._after(self._position(life), now)

    def _position(self, life: _Life) -> int:
        return int(life.replica.replica_id.rpartition("-")[2])

    def _after(self, index: int, now: float) -> None:
        """Tell whose replies have begun, and schedule what the replica does next."""
        life = self._lives[index]
        replica = life.replica
        load_ms = replica.next_load(now)
        if load_ms is not None:
            self._push(load_ms, "load", index)
        for request in replica.started if self._policy.reads_slots else ():
            self._handles[request.handle].hear(replica.replica_id, replica.state(), replica.num_busy)
        if self._policy.has_plan:
            self._router.note((request.adapter, request.tokens) for request in replica.started)
        replica.started.clear()
        life.version += 1
        finish_ms = replica.next_finish()
        if finish_ms is not None:
            self._push(finish_ms, "finish", index, life.version)

    # The router actor

    def _publish(self, now: float) -> None:
        states = self._router.rows({name: life.replica.state() for name, life in self._by_id.items()}, now)
        routes = self._router.plan.routes() if self._policy.has_plan else {}
        for handle in self._handles:
            handle.take(states, routes, now)

    def _plan(self, now: float) -> None:
        live = [life for life in self._lives if life.left_ms is None]
        self._router.make_plan([life.replica for life in live], now)
        for life in live:
            self._after(self._position(life), now)

    # The fleet

    def _add_replica(self, joined_ms: float | None) -> int:
        replica_id = f"replica-{len(self._lives)}"
        replica = SimulatedReplica(
            replica_id, self._workload.num_slots, self._machine, self._mib, has_all=self._policy.has_all
        )
        self._lives.append(_Life(replica, joined_ms))
        if joined_ms is not None:
            self._by_id[replica_id] = self._lives[-1]
        return len(self._lives) - 1

    def _tell_handles(self) -> None:
        for handle in self._handles:
            handle.set_replicas(self._by_id)

    def _fail(self, fault: Fault, now: float) -> None:
        if fault.kind == "add":
            index = self._add_replica(joined_ms=None)
            life = self._lives[index]
            life.replica.is_counting = self._lives[0].replica.is_counting
            if self._policy.has_plan:
                self._plan(now)
                life.join_by_ms = now + WARM_MS
            self._join(index, now)
            return
        life = self._by_id.pop(next(iter(self._by_id)))
        life.left_ms = now
        life.version += 1
        self._tell_handles()
        for request in life.replica.drop_all():
            self._route(request, now)

    def _join(self, index: int, now: float) -> None:
        """Let a new replica take requests once its share is in its slots, or when that has taken too long."""
        life = self._lives[index]
        if life.replica.num_wished and now < life.join_by_ms:
            self._push(now + WARM_MS / 10, "join", index)
            return
        life.joined_ms = now
        self._by_id[life.replica.replica_id] = life
        self._tell_handles()
        self._publish(now)

    # Figures

    def _begin_counting(self, now: float) -> None:
        self._counting_since = now
        for life in self._lives:
            life.replica.is_counting = True

    def _outcome(self, last_ms: float, ended_ms: float) -> Outcome:
        counts = [life.replica.counts for life in self._lives]
        num = sum(count.num_routed for count in counts)
        rates = []
        for life in self._lives:
            joined_ms = last_ms if life.joined_ms is None else max(life.joined_ms, self._counting_since)
            passed_ms = (last_ms if life.left_ms is None else life.left_ms) - joined_ms
            if passed_ms > 0:
                rates.append((life.replica.counts.num_routed / passed_ms, passed_ms))
        mean = sum(rate * passed for rate, passed in rates) / sum(passed for _, passed in rates)
        return Outcome(
            hit_rate=sum(count.num_hits for count in counts) / num,
            max_over_mean=max(rate for rate, _ in rates) / mean,
            loads_per_request=sum(count.num_loads for count in counts) / num,
            evictions_per_request=sum(count.num_evictions for count in counts) / num,
            warmed_per_request=sum(count.num_warmed for count in counts) / num,
            longest_wait_ms=max(count.longest_wait_ms for count in counts),
            moves_per_request=self._router.num_moves / len(self._trace.times_ms),
            num_routes=len(self._router.plan.routes()),
            num_answered=self._num_answered,
            answered_per_s=1e3 * self._num_answered / ended_ms,
        )


@functools.cache
def saturation_per_ms(machine: Machine = Machine()) -> float:  # noqa: B008
    """Requests that one replica with all adapters in slots answers in a millisecond when they are never too few."""
    workload = Workload(name="saturation", num_replicas=1, num_slots=1, catalogue=1.0)
    trace = make_trace(workload, 2000, 1e6, seed=0)
    policy = Policy("all resident", least_loaded, has_all=True)
    return (
        Simulator(workload, trace, policy, 0, num_handles=1, machine=machine).run(to_the_end=True).answered_per_s / 1e3
    )


def simulate(
    workload: Workload,
    policy: Policy,
    seed: int,
    num_requests: int,
    settings: PlacementSettings = PlacementSettings(),  # noqa: B008
    copy_settings: CopySettings = CopySettings(),  # noqa: B008
) -> Outcome:
    """Run a policy on a workload, at its part of the measured saturation."""
    rate = workload.load * workload.num_replicas * saturation_per_ms()
    trace = make_trace(workload, num_requests, rate, seed)
    return Simulator(workload, trace, policy, seed, settings=settings, copy_settings=copy_settings).run()
