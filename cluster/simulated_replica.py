"""`SimulatedReplica`: one engine as the simulator has it: seats, slots, a loader, and steps that a batch slows down."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.fleet import ReplicaState
from cluster.workloads import MEAN_TOKENS


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How fast a replica is."""

    num_seats: int = 32
    """Requests that run at once."""
    step_ms: float = 20.0
    """A step, which gives each running request a token."""
    seat_ms: float = 0.5
    """What each running request adds to a step."""
    load_ms_per_mib: float = 0.5
    """A MiB of adapter from host memory to a slot."""
    disk_ms_per_mib: float = 2.0
    """The same from its folder."""
    host_adapters: int = 4
    """Adapters in host memory, for each slot."""
    slot_wait_ms: float = 2000.0
    """How long an adapter waits for a slot before one is set aside for it."""


@dataclass(slots=True)
class Request:
    """One request on its way through a replica."""

    adapter: str
    mib: float
    tokens: float
    arrived_ms: float
    handle: int
    counts: bool
    """Whether it is past the run's warm-up."""
    is_hit: bool = False


@dataclass
class Counts:
    """What a replica has done since the warm-up ended."""

    num_routed: int = 0
    num_hits: int = 0
    num_loads: int = 0
    num_evictions: int = 0
    num_warmed: int = 0
    """Loads for no request, as the plan wished."""
    longest_wait_ms: float = 0.0
    """From a request's arrival until it runs."""


class SimulatedReplica:
    """Times are milliseconds. After each call, `started` has the requests that have begun to run.

    Slots go as the engine gives them: a free one, or that of the least recently used adapter that no request needs,
    those in `kept` last. An adapter that has waited too long gets the slot of the one with the fewest running requests,
    once these have ended.

    Args:
        replica_id: Its name.
        num_slots: Adapters at once.
        machine: How fast it is.
        mib: Size of each adapter.
        has_all: Every adapter is in a slot, always.
    """

    def __init__(
        self, replica_id: str, num_slots: int, machine: Machine, mib: Mapping[str, float], has_all: bool = False
    ) -> None:
        self.replica_id = replica_id
        self.machine = machine
        self.counts = Counts()
        self.is_counting = False
        self.sequence = 0
        self.num_in_flight = 0
        self.started: list[Request] = []
        self.kept: frozenset[str] = frozenset()
        self._num_slots, self._mib, self._has_all = num_slots, mib, has_all
        self._wished: tuple[str, ...] = ()
        # Adapters in slots, least recently used first, and how many requests of each run.
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._in_memory: OrderedDict[str, None] = OrderedDict()
        self._loading: str | None = None
        self._waiting: dict[str, deque[Request]] = {}
        # Waiting adapters without a slot, and since when; and those with one.
        self._cold: OrderedDict[str, float] = OrderedDict()
        self._ready: set[str] = set()
        self._set_aside: str | None = None
        self._running: list[tuple[float, int, Request]] = []
        self._num_started = 0
        # Tokens that each running request has had since the beginning of time: they all advance together.
        self._progress = 0.0
        self._now = 0.0
        self._state: ReplicaState | None = None

    # What happens to it

    def accept(self, request: Request, now: float) -> None:
        """Take a request."""
        self._advance(now)
        self.num_in_flight += 1
        name = request.adapter
        request.is_hit = self._has_all or name in self._slots
        if request.counts:
            self.counts.num_routed += 1
            self.counts.num_hits += request.is_hit
        self._waiting.setdefault(name, deque()).append(request)
        if request.is_hit:
            self._ready.add(name)
            self._touch(name)
        elif name != self._loading:
            self._cold.setdefault(name, now)
        self._start(now)

    def finish(self, now: float) -> Request:
        """End the request that is due now."""
        self._advance(now)
        _, _, request = heapq.heappop(self._running)
        self.num_in_flight -= 1
        if not self._has_all:
            self._slots[request.adapter] -= 1
        self._start(now)
        return request

    def end_load(self, now: float) -> None:
        """Have what was loading in its slot."""
        self._advance(now)
        name, self._loading = self._loading, None
        assert name is not None, "nothing is loading"
        self._changed()
        self._slots[name] = 0
        self._remember(name)
        if name in self._waiting:
            self._ready.add(name)
        self._start(now)

    def next_load(self, now: float) -> float | None:
        """Begin the next load, if one is wanted and there is a slot for it; returns when it ends.

        Requests may start that a slot set aside has held up: `started` has them, too.
        """
        if self._loading is not None or self._has_all:
            return None
        if self._cold:
            name, since = next(iter(self._cold.items()))
            return self._begin(name, now, self._victim(now - since))
        wished = next((name for name in self._wished if name not in self._slots), None)
        if wished is None:
            return None
        return self._begin(wished, now, self._idle(self.kept), is_warming=True)

    def next_finish(self) -> float | None:
        """When the next running request ends, if nothing else happens."""
        if not self._running:
            return None
        return self._now + max(0.0, self._running[0][0] - self._progress) * self._token_ms()

    def wish(self, warm: tuple[str, ...], kept: frozenset[str]) -> None:
        """Have the adapters of `warm` in slots, the first named first; take the slots of `kept` last."""
        self._wished, self.kept = warm, kept

    def drop_all(self) -> list[Request]:
        """Forget every request, as a killed replica does; returns them in order of arrival."""
        requests = [request for _, _, request in self._running]
        requests += [request for waiting in self._waiting.values() for request in waiting]
        for held in (self._running, self._waiting, self._cold, self._ready):
            held.clear()
        self._wished, self.num_in_flight = (), 0
        return sorted(requests, key=lambda request: request.arrived_ms)

    # What it tells

    def state(self) -> ReplicaState:
        """As a replica reports itself; one object until its slots change."""
        if self._state is None:
            self._state = ReplicaState(
                resident=frozenset(self._slots),
                in_memory=frozenset(self._in_memory),
                num_slots=self._num_slots,
                num_slots_used=len(self._slots) + (self._loading is not None),
                sequence=self.sequence,
                loading=frozenset([self._loading] if self._loading is not None else []),
                load_ms_per_mib={"host": self.machine.load_ms_per_mib, "disk": self.machine.disk_ms_per_mib},
                service_ms=self.machine.seat_ms * MEAN_TOKENS,
            )
        return self._state

    @property
    def num_busy(self) -> int:
        """Adapters that it has requests for."""
        return len({name for name, num_users in self._slots.items() if num_users} | self._waiting.keys())

    @property
    def num_wished(self) -> int:
        """Wished adapters that are in no slot yet."""
        return sum(name not in self._slots for name in self._wished)

    # Inside

    def _token_ms(self) -> float:
        return self.machine.step_ms + self.machine.seat_ms * len(self._running)

    def _advance(self, now: float) -> None:
        if self._running:
            self._progress += (now - self._now) / self._token_ms()
        self._now = now
        self.started.clear()

    def _start(self, now: float) -> None:
        """Seat requests whose adapters are in slots, those first that came first."""
        while len(self._running) < self.machine.num_seats:
            ready = [name for name in self._ready if name != self._set_aside]
            if not ready:
                return
            name = min(ready, key=lambda name: (self._waiting[name][0].arrived_ms, name))
            request = self._waiting[name].popleft()
            if not self._waiting[name]:
                del self._waiting[name]
                self._ready.discard(name)
            if not self._has_all:
                self._slots[name] += 1
                self._touch(name)
            self._num_started += 1
            heapq.heappush(self._running, (self._progress + request.tokens, self._num_started, request))
            self.started.append(request)
            if request.counts:
                self.counts.longest_wait_ms = max(self.counts.longest_wait_ms, now - request.arrived_ms)

    def _touch(self, name: str) -> None:
        if not self._has_all:
            self._slots.move_to_end(name)

    def _begin(self, name: str, now: float, victim: str | None, is_warming: bool = False) -> float | None:
        if len(self._slots) >= self._num_slots:
            if victim is None:
                return None
            self._evict(victim, now)
        self._cold.pop(name, None)
        if self._set_aside is not None:
            # Whoever it was for has a slot.
            self._set_aside = None
            self._start(now)
        self._loading = name
        self._changed()
        self.counts.num_loads += self.is_counting
        self.counts.num_warmed += self.is_counting and is_warming
        rate = self.machine.load_ms_per_mib if name in self._in_memory else self.machine.disk_ms_per_mib
        return now + self._mib[name] * rate

    def _victim(self, waited_ms: float) -> str | None:
        """Whose slot an adapter with requests gets that has waited so long."""
        victim = self._idle(frozenset())
        if victim is not None or waited_ms < self.machine.slot_wait_ms:
            return victim
        if self._set_aside is None:
            self._set_aside = min(self._slots, key=lambda name: self._slots[name])
        return self._set_aside if self._slots[self._set_aside] == 0 else None

    def _idle(self, spare: frozenset[str]) -> str | None:
        """The least recently used adapter that no request needs, one of `kept` only where there is no other."""
        idle = [name for name, num_users in self._slots.items() if num_users == 0 and name not in self._ready]
        for name in idle:
            if name not in self.kept:
                return name
        return next((name for name in idle if name not in spare), None)

    def _evict(self, name: str, now: float) -> None:
        del self._slots[name]
        if name in self._ready:
            self._ready.discard(name)
            self._cold[name] = now
        self.counts.num_evictions += self.is_counting

    def _remember(self, name: str) -> None:
        self._in_memory[name] = None
        self._in_memory.move_to_end(name)
        while len(self._in_memory) > self.machine.host_adapters * self._num_slots:
            del self._in_memory[next(name for name in self._in_memory if name not in self._slots)]

    def _changed(self) -> None:
        self.sequence += 1
        self._state = None
