"""`AdapterFollower`: keeps one replica's adapters what the router actor wants, and tells it what the engine holds."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection

from cluster.changes import Change, topic_of
from cluster.fleet import Outcome, Registration, SlotWishes
from cluster.verdict import text_of
from deployments.adapter_lanes import AdapterLanes, Step
from deployments.bell import Bell
from deployments.held_adapters import HeldAdapters
from deployments.replica_reports import ReplicaReports
from deployments.router_calls import Router
from deployments.slot_keeper import SlotKeeper
from deployments.untold_loads import UntoldLoads
from lora_core.errors import ConfigError, EngineDead, ReplicaUnknown, RequestTimeout
from lora_core.messages import Residency
from lora_core.types import LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus
from lora_core.workload import Workload

logger = logging.getLogger(__name__)

POLL_S = 5.0
"""Longest wait for changes in one call to the router actor; a third of the lease where that is shorter."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses between attempts to reach a router actor that does not answer."""

JOIN_ATTEMPTS = 4
"""How often in a row a replica that starts tries a call that fails; each has its own patience besides."""

OTHER_CONTENT = "its content is not that of the other replicas"

NO_WISHES = -1
"""No version of what a router actor wishes."""


class AdapterFollower:
    """One replica's membership of the fleet.

    Changes of one adapter are applied in the order of their epochs, each once. Those of different adapters do not wait
    for one another, and each is acknowledged as soon as its own outcome is known. A router actor that does not answer
    is asked again and again, with growing pauses; one that does not know this replica is joined anew.

    Args:
        router: The router actor.
        apply: Loads, unloads, pins, unpins or warms an adapter in the engine, see `HeldAdapters`.
        replica_id: Serve's unique id of this replica.
        num_slots: Adapter slots of its engine.
        protect: Tells the engine which adapters are to lose their slots last.
    """

    def __init__(
        self,
        router: Router,
        apply: Callable[[LoRARequest], Awaitable[LoRAResponse]],
        replica_id: str,
        num_slots: int,
        protect: Callable[[list[str]], None] = lambda names: None,
    ) -> None:
        self.router_name = ""
        """The router actor's Ray name, as of the last registration."""
        self.epoch = 0
        """Last change heard of."""
        self._router = router
        self._held = HeldAdapters(apply)
        self._replica_id = replica_id
        self._lease_s, self._work_period_s = POLL_S, 1.0
        self._reports = ReplicaReports(router, replica_id, num_slots)
        self._keeper = SlotKeeper(self._warm, protect)
        self._wishes_version = NO_WISHES
        self._is_registered = False
        self._progress = Bell()
        self._lanes = AdapterLanes(self._take, self._progress)
        # Held by who registers or acknowledges: what was told before a registration must not count after it.
        self._speaking = asyncio.Lock()
        self._unsaid: list[tuple[Step, LoRAResponse]] = []
        self._unsaid_changed = asyncio.Event()
        self._untold = UntoldLoads()
        # While this replica joins: what it waits for, and the outcomes of its configuration, told all or none.
        self._joining: asyncio.Future[None] | None = None
        self._awaited: set[Step] = set()
        self._configured: dict[Step, LoRAResponse | None] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        """Join the fleet: returns when this replica serves what its fellows served when it registered.

        From its registration on it follows further changes, in the background, until `close`; once it has joined it
        reports residency, too. It must be closed, whether or not this succeeds.

        An adapter that this replica cannot load, or of which it finds other content than its fellows serve, is
        reported to the router actor, and is not fatal: its requests go to the others.
        Nor is a router actor that dies or forgets this replica meanwhile: it is joined again.

        Raises:
            ConfigError: an adapter of the configuration (`lora_paths`) that no replica has served yet cannot be
                loaded; it is named.
            EngineDead: the engine ended.
            Exception: what the last of `JOIN_ATTEMPTS` failed with.
        """
        self._joining = asyncio.get_running_loop().create_future()
        self._spawn(self._follow, "follow-adapters")
        self._spawn(self._acknowledge, "acknowledge-adapters")
        try:
            await self._joining
        finally:
            self._joining = None
        self._spawn(self._reports.tell_residency, "report-residency")
        self._spawn(self._report_work, "report-work")
        self._spawn(self._follow_wishes, "follow-wishes")
        self._spawn(self._keeper.keep, "keep-slots")

    async def warm_share(self, timeout_s: float) -> None:
        """Bring the adapters into slots that the router actor wishes to have here: this replica's share.

        Returns when they are there, as far as slots are to spare, or after `timeout_s`. Called once, after `join`.
        """
        deadline = time.monotonic() + timeout_s
        try:
            asking = self._router.wait_wishes(self._replica_id, NO_WISHES, timeout_s)
            self._take_wishes(await asyncio.wait_for(asking, timeout_s))
        except Exception as error:
            logger.warning("this replica starts with empty slots: %s: %s", type(error).__name__, error)
            return
        missing = await self._keeper.wait(deadline - time.monotonic())
        if missing:
            logger.warning("not in slots after %g s, when requests begin: %s", timeout_s, ", ".join(missing))

    def report(self, residency: Residency) -> None:
        """Tell the router actor what the engine holds; only the newest matters."""
        residency = self._held.as_fleet(residency)
        self._reports.set_residency(residency)
        self._keeper.see(residency)

    def report_work(self, work: Workload) -> None:
        """Tell the router actor, at a low rate, what the engine has done and has to do; nothing is left out."""
        self._reports.add_work(work)

    def set_stalled(self, stalled: dict[str, str], fault: str) -> None:
        """Tell the router actor what makes no progress here, and when it does again: see `Workload.stalled`."""
        self._reports.set_stalled(stalled, fault)

    def set_leaving(self) -> None:
        """Tell the router actor that this replica gets no more requests: what it holds is to be had elsewhere."""
        self._reports.set_leaving()

    async def warm(self, name: str) -> LoRAResponse:
        """Have the engine bring an adapter into a slot, if one is to spare, before a request comes for it."""
        return await self._held.warm(name)

    @property
    def pinned(self) -> frozenset[str]:
        """Names of the adapters that are pinned here."""
        return self._held.pinned

    def refusal(self, name: str) -> str | None:
        """Why an adapter that the fleet serves is not served by this replica; None where it is, or there is none."""
        return self._held.refusal(name)

    async def wait_for(self, name: str, epoch: int, timeout_s: float) -> None:
        """Return once the changes of an adapter up to `epoch` are applied.

        Raises:
            RequestTimeout: they were not within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not (self.epoch >= epoch and self._lanes.is_through(name, epoch)):
            if not await self._progress.wait(deadline - time.monotonic()):
                raise RequestTimeout(
                    f"the request needs adapter {name!r} as it is from epoch {epoch} on; this replica has not got it "
                    f"there within {timeout_s:g} s; send it again"
                )

    async def close(self) -> None:
        """Stop following and reporting."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._lanes.close()
        await self._keeper.close()

    # Changes

    async def _follow(self) -> None:
        if not self._is_registered:
            await self._register()
        try:
            # Often enough to keep the lease.
            changes = await self._router.wait_changes(self._replica_id, self.epoch, min(POLL_S, self._lease_s / 3))
        except ReplicaUnknown:
            logger.info("the router actor does not know this replica; registering again")
            self._is_registered = False
            return
        for change in changes:
            if change.epoch > self.epoch:
                self.epoch = change.epoch
                self._lanes.put(Step(change, change.epoch))
        self._progress.ring()

    async def _register(self) -> None:
        async with self._speaking:
            # What is being changed is neither held nor not: the router says what is to come of it, or else it goes.
            # Nor is what nobody has compared with what the other replicas found.
            changing = self._lanes.names | self._untold.names
            holding = {name: generation for name, generation in self._held.generations.items() if name not in changing}
            registration = await self._router.register(self._replica_id, holding, sorted(self._held.pinned - changing))
            # Not before: while there is no router actor, what it once asked for is done all the same.
            self._lanes.disown()
            self._unsaid.clear()
            uncertain = self._lanes.names
            may_hold = changing & (uncertain | self._held.generations.keys())
            may_pin = may_hold & (uncertain | self._held.pinned)
        self.router_name, self._lease_s = registration.router_name, registration.lease_s
        self._work_period_s, self._wishes_version = registration.work_period_s, NO_WISHES
        # May go back: a router actor that lost its journal counts anew.
        self.epoch = registration.epoch
        changes = registration.changes + _corrections(may_hold, may_pin, registration)
        steps = [Step(change, registration.epoch) for change in changes]
        if self._joining is not None:
            self._awaited = set(steps)
            # One with a hash is right somewhere: files that changed since must not keep a replica from starting.
            static = [step for step in steps if step.change.static and step.change.request.content_hash is None]
            self._configured = dict.fromkeys(static)
        for step in steps:
            self._lanes.put(step)
        self._is_registered = True
        self._reports.begin()
        self._progress.ring()
        self._through()

    async def _take(self, step: Step) -> None:
        """Carry out one step of a lane."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                response = await self._apply(step)
                break
            except EngineDead as error:
                self._fail_joining(error)
                # This replica is about to be replaced; where it is not, the engine's word is still needed.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._untold.note(step, response)
        if step in self._configured:
            self._configured[step] = response
            self._judge_configuration()
        elif response is not None:
            self._say(step, response)
        else:
            self._through(step)

    async def _apply(self, step: Step) -> LoRAResponse | None:
        if step.reason is None:
            return await self._held.apply(step.change)
        await self._held.give_up(step.change, step.reason)
        return None

    # Joining

    def _judge_configuration(self) -> None:
        """Tell the outcomes of the configuration once all are known, or fail for what cannot be served."""
        answers = {step.change.request.lora_name: response for step, response in self._configured.items()}
        if not all(answers.values()):
            return
        faults = [f"{name!r} ({text_of(a)})" for name, a in answers.items() if a and a.status is not LoRAStatus.SUCCESS]
        if faults:
            self._fail_joining(ConfigError(f"lora_paths: cannot be served: {'; '.join(faults)}"))
            return
        for step, response in self._configured.items():
            if response is not None:
                self._say(step, response)
        self._configured = {}

    def _through(self, *steps: Step) -> None:
        """Nothing is left to do, nor to tell, for these steps."""
        self._awaited.difference_update(steps)
        if self._joining is not None and not self._joining.done() and not self._awaited:
            self._joining.set_result(None)

    def _fail_joining(self, error: Exception) -> bool:
        """Whether `join` ends with this error."""
        if self._joining is None:
            return False
        if not self._joining.done():
            self._joining.set_exception(error)
        return True

    # Acknowledging and reporting

    def _say(self, step: Step, response: LoRAResponse) -> None:
        if step.epoch is not None:
            self._unsaid.append((step, response))
            self._unsaid_changed.set()

    async def _acknowledge(self) -> None:
        """Tell what has been applied; what could not be told is kept for the next time."""
        await self._unsaid_changed.wait()
        async with self._speaking:
            self._unsaid_changed.clear()
            said = list(self._unsaid)
            outcomes = [_outcome(step, response) for step, response in said]
            if not outcomes:
                return
            try:
                unloads = await self._router.acknowledge(self._replica_id, outcomes)
            except ReplicaUnknown:
                # Its next registration tells what this replica holds, and repeats what was refused.
                self._unsaid.clear()
                return
            except BaseException:
                self._unsaid_changed.set()
                raise
            del self._unsaid[: len(said)]
            self._untold.told(step for step, _ in said)
        given_up = [Step(unload, None, OTHER_CONTENT) for unload in unloads]
        self._awaited.update(given_up)
        for step in given_up:
            self._lanes.put(step)
        self._through(*(step for step, _ in said))

    async def _report_work(self) -> None:
        wishes = await self._reports.tell_work(self._work_period_s)
        if wishes is not None:
            self._take_wishes(wishes)

    # Slots

    async def _follow_wishes(self) -> None:
        try:
            timeout_s = min(POLL_S, self._lease_s / 3)
            self._take_wishes(await self._router.wait_wishes(self._replica_id, self._wishes_version, timeout_s))
        except ReplicaUnknown:
            # Asked again once this replica has registered again.
            await asyncio.sleep(FIRST_PAUSE_S)

    def _take_wishes(self, wishes: SlotWishes) -> None:
        self._wishes_version = wishes.version
        self._keeper.wish(wishes)

    async def _warm(self, name: str) -> LoRAStatus:
        return (await self.warm(name)).status

    def _spawn(self, attempt: Callable[[], Awaitable[None]], name: str) -> None:
        self._tasks.append(asyncio.create_task(self._persist(attempt), name=name))

    async def _persist(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Call `attempt` for ever; after a failure with a pause, longer each time."""
        pause_s, num_failures = FIRST_PAUSE_S, 0
        while True:
            error = await _failure_of(attempt)
            if error is None:
                pause_s, num_failures = FIRST_PAUSE_S, 0
                continue
            num_failures += 1
            if num_failures >= JOIN_ATTEMPTS and self._fail_joining(error):
                return
            logger.warning("router actor: %s: %s; trying again in %.1f s", type(error).__name__, error, pause_s)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _outcome(step: Step, response: LoRAResponse) -> Outcome:
    assert step.epoch is not None, "nobody waits for this step"
    return Outcome(topic=topic_of(step.change.request), epoch=step.epoch, response=response)


def _corrections(may_hold: Collection[str], may_pin: Collection[str], registration: Registration) -> list[Change]:
    """What undoes changes of which a registration did not tell, where the fleet does not want what they lead to.

    Args:
        may_hold: Adapters that may be held, or come to be.
        may_pin: Those of them that may be pinned.
        registration: What the fleet wants of these is in it.
    """
    wanted = {(change.request.operation, change.request.lora_name) for change in registration.changes}
    unwanted = [name for name in may_hold if (LoRAOperation.LOAD, name) not in wanted]
    unpinned = [
        name for name in may_pin if (LoRAOperation.LOAD, name) in wanted and (LoRAOperation.PIN, name) not in wanted
    ]
    requests = [LoRARequest(LoRAOperation.UNLOAD, name) for name in sorted(unwanted)]
    requests += [LoRARequest(LoRAOperation.UNPIN, name) for name in sorted(unpinned)]
    return [Change(epoch=registration.epoch, request=request) for request in requests]


async def _failure_of(attempt: Callable[[], Awaitable[None]]) -> Exception | None:
    try:
        await attempt()
    except Exception as error:
        # Whatever it is (Ray has many words for a dead actor): the next attempt finds out whether it lasts.
        return error
    return None
