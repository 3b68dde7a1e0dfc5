"""`AdapterFollower`: keeps one replica's adapters what the router actor wants, and tells it what the engine holds."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol

from cluster.changes import Change
from cluster.fleet import Applied, Registration, ReplicaUnknown
from cluster.verdict import text_of
from deployments.held_adapters import HeldAdapters
from lora_core.errors import ConfigError, EngineDead, RequestTimeout
from lora_core.messages import Residency
from lora_core.types import LoRARequest, LoRAResponse, LoRAStatus

logger = logging.getLogger(__name__)

POLL_S = 5.0
"""Longest wait for changes in one call to the router actor; a third of the lease where that is shorter."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses between attempts to reach a router actor that does not answer."""

JOIN_ATTEMPTS = 4
"""How often a replica that starts tries to join the fleet. Each attempt has the patience of its calls besides."""


class Router(Protocol):
    """What a replica asks of the router actor; `deployments.router_client.RouterClient` is one.

    All but `register` raise ReplicaUnknown when the replica has to register again.
    """

    async def register(
        self, replica_id: str, holding: Mapping[str, int] | None = None, pinned: Collection[str] = ()
    ) -> Registration: ...

    async def heartbeat(self, replica_id: str) -> None: ...

    async def wait_changes(self, replica_id: str, since_epoch: int, timeout_s: float) -> list[Change]: ...

    async def acknowledge(self, replica_id: str, epoch: int, applied: Applied) -> list[Change]: ...

    async def report_residency(self, replica_id: str, residency: Residency, num_slots: int) -> None: ...


class AdapterFollower:
    """One replica's membership of the fleet.

    Changes are applied in the order of their epochs, one at a time, each once; each is acknowledged as soon as its
    outcome is known, and the lease is kept while one takes long. A router actor that does not answer is asked again
    and again, with growing pauses; one that does not know this replica is joined anew.

    Args:
        router: The router actor.
        apply: Loads, unloads, pins or unpins an adapter in the engine, see `HeldAdapters`.
        replica_id: Serve's unique id of this replica.
        num_slots: Adapter slots of its engine.
    """

    def __init__(
        self, router: Router, apply: Callable[[LoRARequest], Awaitable[LoRAResponse]], replica_id: str, num_slots: int
    ) -> None:
        self.router_name = ""
        """The router actor's Ray name, as of the last registration."""
        self.epoch = 0
        """Last change applied."""
        self._router = router
        self._held = HeldAdapters(apply)
        self._replica_id = replica_id
        self._num_slots = num_slots
        self._lease_s = POLL_S
        self._unacknowledged: list[tuple[int, Applied]] = []
        self._applied = asyncio.Event()
        self._residency: Residency | None = None
        self._residency_changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        """Register, and apply what this replica lacks, so that it serves what its fellows serve.

        An adapter that this replica cannot load, or of which it finds other content than its fellows serve, is
        reported to the router actor, and is not fatal: its requests go to the others.
        Nor is a router actor that dies or forgets this replica meanwhile: it is joined again, `JOIN_ATTEMPTS` in all.

        Raises:
            ConfigError: an adapter of the configuration (`lora_paths`) that no replica has served yet cannot be
                loaded; it is named.
            EngineDead: the engine ended.
            Exception: what the last attempt failed with.
        """
        pause_s = FIRST_PAUSE_S
        for _ in range(JOIN_ATTEMPTS - 1):
            error = await _failure_of(self._join)
            if error is None:
                return
            if isinstance(error, ConfigError | EngineDead):
                raise error
            logger.warning("joining the fleet: %s: %s; trying again in %.1f s", type(error).__name__, error, pause_s)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(4 * pause_s, LONGEST_PAUSE_S)
        await self._join()

    def start(self) -> None:
        """Follow further changes in the background, and report residency, until `close`."""
        self._tasks = [
            asyncio.create_task(self._persist(self._follow), name="follow-adapters"),
            asyncio.create_task(self._persist(self._report), name="report-residency"),
        ]

    def report(self, residency: Residency) -> None:
        """Tell the router actor what the engine holds; only the newest matters."""
        self._residency = residency
        self._residency_changed.set()

    def refusal(self, name: str) -> str | None:
        """Why an adapter that the fleet serves is not served by this replica; None where it is, or there is none."""
        return self._held.refusal(name)

    async def wait_for(self, epoch: int, timeout_s: float) -> None:
        """Return once changes up to `epoch` are applied.

        Raises:
            RequestTimeout: they were not within `timeout_s`.
        """
        if self.epoch >= epoch:
            return
        try:
            await asyncio.wait_for(self._reach(epoch), timeout_s)
        except asyncio.TimeoutError:
            raise RequestTimeout(
                f"the request needs adapter changes up to epoch {epoch}; this replica has applied those up to "
                f"{self.epoch}, and no more within {timeout_s:g} s; send it again"
            ) from None

    async def close(self) -> None:
        """Stop following and reporting."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _join(self) -> None:
        registration = await self._register()
        applied = await self._keeping_lease(self._held.apply(registration.changes))
        faults = [
            f"{change.request.lora_name!r} ({text_of(answer)})"
            for change in registration.changes
            # One with a hash is right somewhere: files that changed since must not keep a replica from starting.
            if change.static and change.request.content_hash is None
            if (answer := applied.adapters[change.request.lora_name]).status is not LoRAStatus.SUCCESS
        ]
        if faults:
            raise ConfigError(f"lora_paths: cannot be served: {'; '.join(faults)}")
        await self._finish_joining(registration, applied)

    async def _reach(self, epoch: int) -> None:
        while self.epoch < epoch:
            await self._applied.wait()

    async def _persist(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Call `attempt` for ever; after a failure with a pause, longer each time."""
        pause_s = FIRST_PAUSE_S
        while True:
            error = await _failure_of(attempt)
            if error is None:
                pause_s = FIRST_PAUSE_S
                continue
            logger.warning("router actor: %s: %s; trying again in %.1f s", type(error).__name__, error, pause_s)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _follow(self) -> None:
        try:
            await self._acknowledge()
            changes = await self._router.wait_changes(self._replica_id, self.epoch, min(POLL_S, self._lease_s / 3))
            for change in changes:
                if change.epoch <= self.epoch:
                    continue
                applied = await self._keeping_lease(self._held.apply([change]))
                self._advance(change.epoch)
                self._unacknowledged.append((change.epoch, applied))
                await self._acknowledge()
        except ReplicaUnknown:
            logger.info("the router actor does not know this replica; registering again")
            registration = await self._register()
            applied = await self._keeping_lease(self._held.apply(registration.changes))
            await self._finish_joining(registration, applied)

    async def _report(self) -> None:
        await self._residency_changed.wait()
        self._residency_changed.clear()
        if self._residency is None:
            return
        try:
            await self._router.report_residency(self._replica_id, self._residency, self._num_slots)
        except ReplicaUnknown:
            # Reported again as soon as this replica is known again.
            return
        except BaseException:
            self._residency_changed.set()
            raise

    async def _register(self) -> Registration:
        held = self._held
        registration = await self._router.register(self._replica_id, dict(held.generations), sorted(held.pinned))
        self.router_name = registration.router_name
        self._lease_s = registration.lease_s
        return registration

    async def _finish_joining(self, registration: Registration, applied: Applied) -> None:
        # May go back: a router actor that lost its journal counts anew.
        self._advance(registration.epoch)
        self._unacknowledged = [(registration.epoch, applied)]
        self._residency_changed.set()
        await self._acknowledge()

    async def _acknowledge(self) -> None:
        """Tell what has been applied; what could not be told is kept for the next time."""
        while self._unacknowledged:
            epoch, applied = self._unacknowledged[0]
            unloads = await self._router.acknowledge(self._replica_id, epoch, applied)
            self._unacknowledged.pop(0)
            await self._held.give_up(unloads, "its content is not that of the other replicas")

    def _advance(self, epoch: int) -> None:
        self.epoch = epoch
        self._applied.set()
        self._applied = asyncio.Event()

    async def _keeping_lease(self, work: Awaitable[Applied]) -> Applied:
        """Do the work; while it takes long, tell the router actor that this replica lives."""
        heartbeats = asyncio.create_task(self._heartbeats(), name="heartbeats")
        try:
            return await work
        finally:
            heartbeats.cancel()
            await asyncio.gather(heartbeats, return_exceptions=True)

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            # A router actor that is gone, or that has forgotten this replica, is dealt with when the work is done.
            with contextlib.suppress(Exception):
                await self._router.heartbeat(self._replica_id)


async def _failure_of(attempt: Callable[[], Awaitable[None]]) -> Exception | None:
    try:
        await attempt()
    except Exception as error:
        # Whatever it is (Ray has many words for a dead actor): the next attempt finds out whether it lasts.
        return error
    return None
