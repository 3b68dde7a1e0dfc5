"""`FleetSlots`: which adapters should be in which replica's slots, from the work that replicas report."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from cluster.copies import Host, Plan, plan
from cluster.fleet import SlotWishes
from cluster.member import Member, names_served
from cluster.members import Members
from cluster.popularity import Popularity
from cluster.registry import AdapterRegistry
from deployments.bell import Bell
from lora_core.workload import Workload

logger = logging.getLogger(__name__)

HINT_S = 2.0
"""A load that a handle says it has caused is believed for so long, unless the replica reports it done."""

FIRST_PLAN_S = 2.0
"""Longest time a replica that has just registered waits to be planned for."""

REPORTS_PER_S = 200
"""Reports of work that the router actor should hear in a second; with more replicas each reports less often."""

REST = 10.0
"""Where planning takes long, the next plan is made after this many times what the last one took."""

FORGET = 0.98
"""What the size of typical requests lately keeps of its past with each report."""


class FleetSlots:
    """Plans copies on a period, and tells each replica which adapters it should have in slots and keep there.

    Args:
        registry: The desired adapters.
        members: The live replicas.
        publish: Called when what handles are told of slots may have changed.
        period_s: The setting `router.plan_period_s`.
        num_slots: Adapter slots of each replica; None: as the replicas report.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        members: Members,
        publish: Callable[[], None],
        period_s: float,
        num_slots: int | None,
    ) -> None:
        self.copies: Mapping[str, tuple[str, ...]] = {}
        """Name -> replicas whose slots it has been granted, best first, where those are not just its first choice."""
        self.shares: Mapping[str, float] = {}
        """Name -> share of the fleet's work lately, as of the last plan."""
        self._registry = registry
        self._members = members
        self._publish = publish
        self._period_s = period_s
        self._num_slots = num_slots
        self._popularity = Popularity()
        self._num_tokens, self._num_started = 1.0, 1.0
        self._plan: Plan | None = None
        self._planning: asyncio.Task[None] | None = None
        self._is_wanted = False
        self._wanted, self._planned = Bell(), Bell()
        self._wishes: dict[str, SlotWishes] = {}
        self._bells: dict[str, Bell] = {}
        self._told: Mapping[str, tuple[str, ...]] = {}
        self._hint_timer: asyncio.TimerHandle | None = None

    @property
    def report_period_s(self) -> float:
        """How long a replica should wait between two reports of its work."""
        return max(1.0, len(self._members.live) / REPORTS_PER_S)

    def start(self) -> None:
        """Begin to plan, in the running event loop, or plan anew at once."""
        if self._planning is None:
            self._planning = asyncio.get_running_loop().create_task(self._plan_forever(), name="plan-copies")
        self._want()

    def note_work(self, member: Member, work: Workload) -> None:
        """Take what a replica says it has done."""
        tokens = {one.name: float(one.num_tokens) for one in work.adapters if one.name is not None and one.num_tokens}
        total = float(sum(one.num_tokens for one in work.adapters))
        self._num_tokens = FORGET * self._num_tokens + total
        self._num_started = FORGET * self._num_started + sum(one.num_started for one in work.adapters)
        grain = max(1.0, self._num_tokens / self._num_started)
        self._popularity.add(tokens, total=total, now=time.monotonic(), grain=grain)
        was_leaving = member.is_leaving
        if self._members.note_work(member, work):
            self._publish()
        if member.is_leaving and not was_leaving:
            # Those who stay are to have its adapters in slots before its last request has ended.
            self._want()

    def note_loads(self, loads: Mapping[str, list[str]]) -> None:
        """Take what handles say of requests on their way: replica id -> adapters that these bring into its slots."""
        until, is_news = time.monotonic() + HINT_S, False
        for replica_id, names in loads.items():
            if self._members.hint(replica_id, names, until):
                is_news = True
                self._ring(replica_id)
        if is_news:
            self._publish()
            self._watch_hints()

    async def wishes(self, replica_id: str) -> SlotWishes:
        """What a replica's slots should hold, as of the first plan that knows it. Raises ReplicaUnknown."""
        deadline = time.monotonic() + FIRST_PLAN_S
        while self._is_unplanned(self._members.get(replica_id)):
            self._want()
            if not await self._planned.wait(deadline - time.monotonic()):
                break
        return self._renewed(self._members.get(replica_id))

    async def wait_wishes(self, replica_id: str, version: int, timeout_s: float) -> SlotWishes:
        """What a replica's slots should hold once it differs from `version`, or after timeout_s. Raises
        ReplicaUnknown."""
        deadline = time.monotonic() + timeout_s
        while True:
            wishes = await self.wishes(replica_id)
            bell = self._bells.setdefault(replica_id, Bell())
            if wishes.version != version or not await bell.wait(deadline - time.monotonic()):
                return wishes

    def forget(self, names: list[str]) -> None:
        """These adapters are no longer served."""
        for name in names:
            self._popularity.forget(name)

    def take_changed_copies(self) -> dict[str, tuple[str, ...] | None]:
        """What handles have not been told of `copies` yet; None for what is no longer granted."""
        told, self._told = self._told, self.copies
        if told is self.copies:
            return {}
        gone: dict[str, tuple[str, ...] | None] = dict.fromkeys(told.keys() - self.copies.keys())
        return {**gone, **{name: ids for name, ids in self.copies.items() if told.get(name) != ids}}

    def drop(self, replica_ids: list[str]) -> None:
        """These replicas are gone."""
        for replica_id in replica_ids:
            self._wishes.pop(replica_id, None)
            self._ring(replica_id)
            self._bells.pop(replica_id, None)
        self._want()

    def close(self) -> None:
        """Plan no more."""
        if self._planning is not None:
            self._planning.cancel()
        if self._hint_timer is not None:
            self._hint_timer.cancel()

    # Inside

    def _want(self) -> None:
        """Have a plan made at once, or once more where one is being made."""
        self._is_wanted = True
        self._wanted.ring()

    async def _plan_forever(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                self._is_wanted = False
                await self._plan_once()
            except Exception:
                logger.exception("planning copies failed; the last plan stands")
            took_s = time.monotonic() - began_s
            # Also where many replicas come at once and each wants a plan, half of the time is for everything else.
            await asyncio.sleep(took_s)
            if not self._is_wanted:
                await self._wanted.wait(max(self._period_s, REST * took_s))

    async def _plan_once(self) -> None:
        hosts = [self._host(member) for member in self._members.live if self._is_host(member)]
        served = list(self._registry.served.values())
        shares = {name: share for name, share in self._popularity.shares().items() if name in self._registry.served}
        made = await asyncio.to_thread(
            plan,
            shares,
            hosts,
            previous=self._plan,
            min_copies={entry.name: entry.min_copies for entry in served if entry.min_copies > 1},
            pinned={entry.name for entry in served if entry.pinned},
        )
        before, self._plan, self.shares = self._plan, made, shares
        routes = made.routes()
        if routes != self.copies:
            self.copies = routes
            self._publish()
        for host in hosts:
            if before is None or before.warm(host.replica_id) != made.warm(host.replica_id):
                self._ring(host.replica_id)
        self._planned.ring()

    def _host(self, member: Member) -> Host:
        resident = names_served(member.resident, self._registry.served)
        refused = {topic.name for topic in member.refusals if not topic.is_pin}
        return Host(member.replica_id, self._slots_of(member), resident=resident, refused=refused)

    def _is_host(self, member: Member) -> bool:
        is_stalled = member.work is not None and member.work.fault != ""
        return self._slots_of(member) > 0 and not is_stalled and not member.is_leaving

    def _is_unplanned(self, member: Member) -> bool:
        known = () if self._plan is None else self._plan.replica_ids
        return self._is_host(member) and member.replica_id not in known

    def _slots_of(self, member: Member) -> int:
        return member.num_slots or self._num_slots or 0

    def _renewed(self, member: Member) -> SlotWishes:
        planned, served = self._plan or Plan(), self._registry.served
        wanted = dict.fromkeys((*planned.warm(member.replica_id), *member.hints))
        warm = [name for name in wanted if name in served]
        protected = [name for name in planned.keep(member.replica_id) if name in served and name not in wanted]
        last = self._wishes.get(member.replica_id)
        if last is None or (last.warm, last.protected) != (warm, protected):
            version = 1 if last is None else last.version + 1
            last = self._wishes[member.replica_id] = SlotWishes(warm=warm, protected=protected, version=version)
        return last

    def _ring(self, replica_id: str) -> None:
        bell = self._bells.get(replica_id)
        if bell is not None:
            bell.ring()

    def _watch_hints(self) -> None:
        if self._hint_timer is None and self._members.any_hints:
            self._hint_timer = asyncio.get_running_loop().call_later(HINT_S / 2, self._drop_hints)

    def _drop_hints(self) -> None:
        self._hint_timer = None
        if self._members.drop_hints(time.monotonic()):
            self._publish()
        self._watch_hints()
