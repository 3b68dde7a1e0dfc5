"""`RouterClient`: typed calls to the router actor, wherever it lives now."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from cluster.changes import Change
from cluster.entry import AdapterEntry
from cluster.fleet import (
    ROUTER_ACTOR,
    AdapterInFleet,
    Alias,
    AliasInFleet,
    FleetTable,
    LoadOutcome,
    Outcome,
    Registration,
    SlotWishes,
)
from cluster.picture import FleetPicture
from cluster.status import AdapterReport, FleetReport, Page
from cluster.table_changes import TableDelta, applied
from deployments.ray_internals import SERVE_NAMESPACE
from lora_core.errors import AdapterNotFound, EngineDead, LoRAFleetError, RequestTimeout, RouterReplaced
from lora_core.messages import Residency
from lora_core.types import LoRAStatus
from lora_core.workload import Workload

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""How long a call looks for a router actor that is gone: longer than Serve takes to replace one."""
POLL_S = 10.0
"""Length of one long poll for the table."""


class RouterClient:
    """Calls the router actor, finding it again after it died, or where another version's has taken its place.

    While a new version of the application rolls out, each has a router actor, and that of the old one lives for as long
    as its last stream. It is left when it has no replica any more that takes requests, or refuses to change anything.

    Every method raises RequestTimeout when the router actor cannot be reached within `patience_s`, and EngineDead when
    this process has left Ray.

    Args:
        locate: Gives the actor's Ray name (namespace "serve"), e.g. `handle.router_name.remote`; asked again each
            time the actor has to be found. Unset: the calling process is a replica of the actor's own deployment.
        patience_s: How long to look for an actor that is gone.
    """

    def __init__(self, locate: Callable[[], Awaitable[str]] | None = None, patience_s: float = PATIENCE_S) -> None:
        self._locate = locate
        self._patience_s = patience_s
        self._actor: Any = None

    # For replicas: all but `register` raise ReplicaUnknown when the replica has to register again

    async def register(
        self, replica_id: str, holding: Mapping[str, int] | None = None, pinned: Collection[str] = ()
    ) -> Registration:
        """Join the fleet, or join it again.

        The changes returned must be applied, those of one name in their order, and acknowledged.

        Args:
            replica_id: Serve's unique id of the replica.
            holding: name -> generation of the adapters it has loaded already, and told a router actor what it found.
            pinned: Names of those it has pinned.
        """
        registration: Registration = await self._call("register", replica_id, dict(holding or {}), list(pinned))
        return registration

    async def wait_changes(self, replica_id: str, since_epoch: int, timeout_s: float) -> list[Change]:
        """Changes after since_epoch, in order; [] when none came within timeout_s. Every call renews the lease."""
        changes: list[Change] = await self._call("wait_changes", replica_id, since_epoch, timeout_s)
        return changes

    async def acknowledge(self, replica_id: str, outcomes: list[Outcome]) -> list[Change]:
        """Say how changes ended, in any order across names; returns what this replica must unload."""
        unloads: list[Change] = await self._call("acknowledge", replica_id, outcomes)
        return unloads

    async def report_residency(self, replica_id: str, residency: Residency, num_slots: int) -> None:
        """Say what the replica holds."""
        await self._call("report_residency", replica_id, residency, num_slots)

    async def report_work(self, replica_id: str, work: Workload) -> SlotWishes:
        """Say what the replica has done since it last said so; returns what its slots should hold."""
        wishes: SlotWishes = await self._call("report_work", replica_id, work)
        return wishes

    async def wait_wishes(self, replica_id: str, version: int, timeout_s: float) -> SlotWishes:
        """What the replica's slots should hold, once it differs from `version`, or after timeout_s."""
        wishes: SlotWishes = await self._call("wait_wishes", replica_id, version, timeout_s)
        return wishes

    # For everyone

    async def load(self, name: str, path: str, load_inplace: bool = False, path_is_final: bool = False) -> LoadOutcome:
        """Serve an adapter on every replica, see `AdapterRouter.load`. Survives the router actor's death."""
        outcome: LoadOutcome = await self._call("load", name, path, load_inplace, path_is_final)
        return outcome

    async def pin(self, name: str) -> LoadOutcome:
        """Keep an adapter in a slot of every replica, see `AdapterRouter.pin`. Survives the router actor's death."""
        outcome: LoadOutcome = await self._call("pin", name)
        return outcome

    async def unpin(self, name: str) -> LoadOutcome:
        """Let an adapter's slot be taken again. Survives the router actor's death."""
        outcome: LoadOutcome = await self._call("unpin", name)
        return outcome

    async def describe(self, name: str) -> AdapterInFleet | None:
        """One adapter in detail; None where none of this name can be asked for."""
        status: AdapterInFleet | None = await self._call("describe", name)
        return status

    async def unload(self, name: str) -> LoadOutcome:
        """Stop serving an adapter, see `AdapterRouter.unload`. Survives the router actor's death."""
        deaths: list[BaseException] = []
        outcome: LoadOutcome = await self._call("unload", name, deaths=deaths)
        # The router that died may have done it: then its successor no longer knows the name.
        if deaths and outcome.status is LoRAStatus.UNLOAD_NAME_NONEXISTENT:
            return LoadOutcome(status=LoRAStatus.SUCCESS, message=f"adapter {name!r} is unloaded")
        return outcome

    async def set_min_copies(self, name: str, min_copies: int) -> AdapterEntry:
        """Have an adapter in a slot of so many replicas, see `AdapterRouter.set_min_copies`."""
        entry: AdapterEntry = await self._call("set_min_copies", name, min_copies)
        return entry

    async def set_alias(self, name: str, targets: Mapping[str, float]) -> Alias:
        """Have a name stand for weighted adapters, see `AdapterRouter.set_alias`."""
        alias: Alias = await self._call("set_alias", name, dict(targets))
        return alias

    async def roll_back_alias(self, name: str) -> Alias:
        """Have an alias stand for what it stood for before, see `AdapterRouter.roll_back_alias`.

        Not repeated where the router actor dies meanwhile: that might go back two moves.
        """
        alias: Alias = await self._call("roll_back_alias", name, again=False)
        return alias

    async def remove_alias(self, name: str) -> int:
        """Forget an alias; returns the epoch, or 0 where the router actor died when it had done it."""
        deaths: list[BaseException] = []
        try:
            epoch: int = await self._call("remove_alias", name, deaths=deaths)
        except AdapterNotFound:
            if deaths:
                return 0
            raise
        return epoch

    async def aliases(self) -> list[AliasInFleet]:
        """All aliases."""
        aliases: list[AliasInFleet] = await self._call("aliases")
        return aliases

    async def fleet_status(self) -> FleetReport:
        """The replicas, and the last changes that failed."""
        report: FleetReport = await self._call("fleet_status")
        return report

    async def fleet_picture(self) -> FleetPicture:
        """What the live page shows."""
        picture: FleetPicture = await self._call("fleet_picture")
        return picture

    async def adapters_status(self, after: str, limit: int) -> Page:
        """The first `limit` desired adapters whose names come after `after`."""
        found: Page = await self._call("adapters_status", after, limit)
        return found

    async def adapter_status(self, name: str) -> AdapterReport | None:
        """One desired adapter; None where there is none of this name."""
        found: AdapterReport | None = await self._call("adapter_status", name)
        return found

    async def note_loads(self, loads: Mapping[str, list[str]]) -> None:
        """Say that requests are on their way which bring adapters into slots, see `AdapterRouter.note_loads`."""
        await self._call("note_loads", dict(loads))

    async def table(self) -> FleetTable:
        """The fleet as it is now."""
        table: FleetTable = await self._call("table")
        return table

    async def watch(self, last: FleetTable | None, timeout_s: float) -> FleetTable:
        """The table once it differs from the last one seen, or after timeout_s; only what differs is sent."""
        version, router_id = (0, "") if last is None else (last.version, last.router_id)
        news: FleetTable | list[TableDelta] = await self._call("watch", version, timeout_s, router_id)
        if isinstance(news, FleetTable):
            table = news
        else:
            assert last is not None, "deltas lead on from a table"
            table = applied(last, news)
        if not table.num_joined:
            self._actor = None
        return table

    async def follow_table(self, callback: Callable[[FleetTable], None]) -> None:
        """Call back with the table now, at each change, and each time the router says that there was none for a while.

        Ends when it is cancelled, or when this process leaves Ray. Waits for as long as there is no router. What a
        change leaves as it was is the same object in both tables.
        """
        last: FleetTable | None = None
        while ray.is_initialized():
            try:
                last = await self.watch(last, POLL_S)
            except LoRAFleetError as error:
                logger.warning("%s", error)
                continue
            callback(last)

    # Inside

    async def _call(
        self, method: str, *args: Any, deaths: list[BaseException] | None = None, again: bool = True
    ) -> Any:
        """Call the actor, looking for it for up to patience_s each time it is gone.

        Args:
            method: Of the actor.
            args: Its arguments.
            deaths: Takes how the actor died during calls.
            again: Whether to call once more after that.
        """
        looking_since, pause_s = time.monotonic(), 0.05
        while True:
            # Ray would start a cluster for a process that has none, or no longer has one.
            if not ray.is_initialized():
                raise EngineDead("this process is not connected to Ray, so the router actor cannot be reached")
            fault: Exception
            try:
                actor = await _within(self._patience_s, self._find())
            except Exception as error:
                fault = error
            else:
                asked = time.monotonic()
                try:
                    return await getattr(actor, method).remote(*args)
                except RayTaskError as error:
                    cause = _cause(error)
                    if not isinstance(cause, RouterReplaced):
                        raise cause from None
                    fault, self._actor = cause, None
                except TaskCancelledError:
                    raise
                except RayError as error:
                    # Ray has many words for a dead actor.
                    fault, self._actor = error, None
                    if deaths is not None:
                        deaths.append(error)
                    if not again:
                        raise EngineDead(
                            f"the router actor died during {method}; look whether it was done, and ask again if not"
                        ) from None
                # The time it took to answer, as a load may, was not spent looking.
                looking_since += time.monotonic() - asked
            if time.monotonic() - looking_since > self._patience_s:
                raise RequestTimeout(
                    f"the router actor could not be reached within {self._patience_s:g} s "
                    f"({type(fault).__name__}: {str(fault).partition(chr(10))[0]})"
                ) from fault
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    async def _find(self) -> Any:
        if self._actor is None:
            # Ray asks its control store and waits for the answer: not on the event loop.
            if self._locate is None:
                self._actor = await asyncio.to_thread(serve.get_deployment_actor, ROUTER_ACTOR)
            else:
                name = await self._locate()
                self._actor = await asyncio.to_thread(ray.get_actor, name, SERVE_NAMESPACE)
        return self._actor


async def _within(timeout_s: float, work: Coroutine[Any, Any, Any]) -> Any:
    """Like `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes together with the result."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            raise TimeoutError(f"it was not found within {timeout_s:g} s")
        return task.result()
    finally:
        task.cancel()


def _cause(error: RayTaskError) -> BaseException:
    """The project's own exception inside Ray's, where there is one."""
    cause = error.cause
    return cause if isinstance(cause, LoRAFleetError) else error
