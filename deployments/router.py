"""`AdapterRouter`: keeps every replica serving the same adapters, and tells handles which replica holds what.

It is a plain class; the application runs it as a Ray actor. It is never on a token's path: where it is down, requests
go on being routed and answered, and only loads and unloads wait for it.
"""

import asyncio
import logging
import os
import time
import uuid
import weakref
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ray import serve
from ray.serve.exceptions import RayServeException

from cluster.fingerprint import folder_fingerprint, is_changed
from cluster.fleet import FleetTable, LoadOutcome, Registration, ReplicaUnknown
from cluster.journal import session_journal
from cluster.members import Members
from cluster.names import check_name, static_adapters
from cluster.registry import AdapterEntry, AdapterRegistry, Change
from cluster.schema import RouterSettings
from cluster.verdict import judge_load, judge_unload, text_of, words
from deployments.bell import Bell
from deployments.ray_internals import actor_name, session_folder, session_name
from lora_core.errors import AdapterError, AdapterNameTaken, AdapterNotFound, InvalidAdapter, LoRAFleetError
from lora_core.messages import Residency
from lora_core.types import LoRAResponse, LoRAStatus

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

COALESCE_S = 0.02
"""A table is published this long after a change, so that a burst of changes travels as one."""

IN_MEMORY = ":memory:"
"""`router.journal` that keeps no file."""

STATUSES: dict[type[LoRAFleetError], LoRAStatus] = {
    AdapterNameTaken: LoRAStatus.LOAD_NAME_EXISTS,
    AdapterNotFound: LoRAStatus.UNLOAD_NAME_NONEXISTENT,
    InvalidAdapter: LoRAStatus.LOAD_INVALID_ADAPTER,
}
"""What a refusal of the router's own is answered as."""


class Loading(NamedTuple):
    """A load under way, which identical loads join."""

    path: str
    task: "asyncio.Task[LoadOutcome]"


class AdapterRouter:
    """The desired adapters, and the replicas that serve them. All methods run on one event loop.

    Args:
        settings: `base_name`; `lora_paths`, each `name=path` or a path that is also the name; and the keys of
            `cluster.schema.RouterSettings`.

    Raises:
        ConfigError: a setting cannot work, or the journal cannot be used.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        rest = dict(settings)
        self._base_name: str = rest.pop("base_name")
        static = static_adapters(rest.pop("lora_paths", ()), self._base_name)
        static = {name: _one_spelling(path) for name, path in static.items()}
        self._settings = RouterSettings.model_validate(rest)
        self._name = actor_name()
        self._registry = AdapterRegistry(
            _journal_file(self._settings.journal),
            static=static,
            run=f"{session_name()}/{self._name}" if self._name else "",
        )
        self._members = Members(self._settings.lease_s)
        self._loads: dict[str, Loading] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        # Generations whose files were found changed.
        self._outdated: set[int] = set()
        # Held by whoever changes a name; forgotten when nobody does.
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._changed, self._progress, self._published = Bell(), Bell(), Bell()
        self._sweep: asyncio.TimerHandle | None = None
        self._started = time.monotonic()
        self._router_id = uuid.uuid4().hex
        self._version = 1
        self._table: FleetTable | None = None

    # For replicas

    async def register(self, replica_id: str, holding: Mapping[str, int] | None = None) -> Registration:
        """Enter a replica, or enter it again.

        Args:
            replica_id: Serve's unique id of the replica.
            holding: name -> generation of the adapters it has loaded already.
        """
        holding = holding or {}
        changes = self._registry.catch_up(holding)
        wanted = {
            name: generation
            for name, generation in holding.items()
            if (entry := self._registry.entries.get(name)) is not None and entry.generation == generation
        }
        acknowledged = 0 if changes else self._registry.epoch
        self._members.add(replica_id, time.monotonic(), acknowledged, wanted)
        self._schedule_sweep()
        self._progress.ring()
        self._publish()
        if coming := [entry for name, entry in self._registry.ready().items() if name not in wanted]:
            self._run(self._warn_of_changed_files(coming))
        logger.info("replica %s registered; %d change(s) to apply", replica_id, len(changes))
        return Registration(
            epoch=self._registry.epoch, changes=changes, router_name=self._name, lease_s=self._settings.lease_s
        )

    async def heartbeat(self, replica_id: str) -> None:
        """Renew a replica's lease. Raises ReplicaUnknown."""
        self._members.renew(replica_id, time.monotonic())

    async def wait_changes(self, replica_id: str, since_epoch: int, timeout_s: float) -> list[Change]:
        """Changes after since_epoch, in order; [] when none came within timeout_s. Renews the lease.

        Raises:
            ReplicaUnknown: not registered, or too far behind for the changes still known; register again.
        """
        self._members.renew(replica_id, time.monotonic())
        deadline = time.monotonic() + timeout_s
        while True:
            changes = self._registry.changes_since(since_epoch)
            if changes is None:
                raise ReplicaUnknown(f"replica {replica_id!r} is at epoch {since_epoch}, too far behind; register it")
            if changes or not await self._changed.wait(deadline - time.monotonic()):
                return changes
            self._members.get(replica_id)

    async def acknowledge(self, replica_id: str, epoch: int, results: Mapping[str, LoRAResponse]) -> None:
        """Note that a replica has applied every change up to `epoch`, with its answer for each adapter in them.

        Raises:
            ReplicaUnknown: register again.
        """
        member = self._members.renew(replica_id, time.monotonic())
        self._members.acknowledge(member, epoch, results, self._registry.entries)
        self._progress.ring()
        self._publish()

    async def report_residency(self, replica_id: str, residency: Residency, num_slots: int) -> None:
        """Note what a replica holds; a report older than the last one is ignored.

        Raises:
            ReplicaUnknown: register again.
        """
        member = self._members.renew(replica_id, time.monotonic())
        if self._members.report(member, residency, num_slots):
            self._publish()

    # For handles

    async def table(self) -> FleetTable:
        """The fleet as it is now."""
        if self._table is None:
            ready = self._registry.ready()
            self._table = FleetTable(
                version=self._version,
                epoch=self._registry.epoch,
                adapters=ready,
                replicas=self._members.states(ready),
                router_id=self._router_id,
            )
        return self._table

    async def watch(self, version: int, timeout_s: float, router_id: str = "") -> FleetTable:
        """The table once it differs from `version` (of `router_id`, where given), or after timeout_s."""
        known = version == self._version and router_id in ("", self._router_id)
        if known and await self._published.wait(timeout_s):
            await asyncio.sleep(COALESCE_S)
        return await self.table()

    # For whoever loads and unloads

    async def load(self, name: str, path: str) -> LoadOutcome:
        """Serve the adapter at `path` under `name` on every live replica.

        Answers once every live replica has it, or after it was undone everywhere because one refused it or because the
        journal cannot be written. Goes on when the caller stops waiting. A load identical to one under way joins it.

        Args:
            name: What requests will call it.
            path: A folder, in whatever spelling, or a Hub id.
        """
        path = _one_spelling(path)
        try:
            check_name(name, self._base_name)
        except AdapterError as error:
            return _failed(error)
        loading = self._loads.get(name)
        if loading is not None and loading.path != path:
            return LoadOutcome(
                status=LoRAStatus.LOAD_NAME_EXISTS,
                message=f"adapter {name!r} is being loaded from {loading.path!r}, asked for {path!r}; use another name",
            )
        if loading is None:
            loading = Loading(path, self._run(self._load(name, path)))
            self._loads[name] = loading
            loading.task.add_done_callback(lambda _: self._loads.pop(name))
        return await asyncio.shield(loading.task)

    async def unload(self, name: str) -> LoadOutcome:
        """Stop serving an adapter: new requests no longer find it at once, accepted ones finish.

        Goes on when the caller stops waiting.
        """
        return await asyncio.shield(self._run(self._unload(name)))

    async def close(self) -> None:
        """Stop the clock and close the journal."""
        if self._sweep is not None:
            self._sweep.cancel()
        for task in self._tasks:
            task.cancel()
        self._registry.close()

    # Inside

    def _run(self, operation: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Run an operation apart from its caller, so that a caller that goes away does not leave it half done."""
        task = asyncio.get_running_loop().create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _load(self, name: str, path: str) -> LoadOutcome:
        async with self._lock(name):
            if not await self._some_member():
                return LoadOutcome(
                    status=LoRAStatus.LOAD_ERROR,
                    message=f"adapter {name!r} was not loaded: no replica is running; try again once /health is ok",
                )
            # Before any replica reads the files: a change during the load shows as one, too.
            fingerprint = await asyncio.to_thread(folder_fingerprint, path)
            try:
                change = self._registry.begin_load(name, path, fingerprint)
            except LoRAFleetError as error:
                return _failed(error)
            if change is None:
                epoch = self._registry.entries[name].epoch
                return LoadOutcome(
                    status=LoRAStatus.SUCCESS, message=f"adapter {name!r} was loaded already", epoch=epoch
                )
            return await self._finish_load(name, change)

    async def _warn_of_changed_files(self, entries: list[AdapterEntry]) -> None:
        """Say, once for each, which adapters a new replica loads from other files than its fellows did."""
        for entry in entries:
            found = await asyncio.to_thread(folder_fingerprint, entry.path)
            if is_changed(entry.fingerprint, found) and entry.generation not in self._outdated:
                self._outdated.add(entry.generation)
                logger.warning(
                    "adapter %r: the files in %r have changed since it was loaded, and replicas that start from now on "
                    "serve the new ones beside those that serve the old; unload it, and load it again",
                    entry.name,
                    entry.path,
                )

    async def _finish_load(self, name: str, change: Change) -> LoadOutcome:
        self._announce()
        late = await self._acknowledged(change.epoch)
        answers = self._answers(name, change.epoch)
        refusal = judge_load(name, answers, late, self._settings.change_timeout_s)
        per_replica = words(answers)
        try:
            if refusal is None:
                entry = self._registry.commit_load(name)
                self._publish()
                message = f"adapter {name!r} is loaded on {len(answers)} replica(s)"
                return LoadOutcome(
                    status=LoRAStatus.SUCCESS, message=message, per_replica=per_replica, epoch=entry.epoch
                )
            self._registry.rollback_load(name)
        except LoRAFleetError as error:
            # Left as it is, the name could neither be loaded nor unloaded.
            self._registry.abandon_load(name)
            refusal = _unrecorded(name, refusal, error)
        self._members.forget(name)
        self._announce()
        logger.warning("adapter %r was refused: %s", name, refusal.message)
        return LoadOutcome(status=refusal.status, message=text_of(refusal), per_replica=per_replica)

    async def _unload(self, name: str) -> LoadOutcome:
        async with self._lock(name):
            try:
                change = self._registry.begin_unload(name)
            except LoRAFleetError as error:
                return _failed(error)
            self._announce()
            late = await self._acknowledged(change.epoch)
            answers = self._answers(name, change.epoch)
            self._registry.finish_unload(name)
            self._members.forget(name)
            self._publish()
            verdict = judge_unload(name, answers, late)
            return LoadOutcome(
                status=verdict.status, message=text_of(verdict), per_replica=words(answers), epoch=change.epoch
            )

    async def _some_member(self) -> bool:
        """Whether a replica is live; just after a start, replicas of before get the time to come back."""
        deadline = self._started + self._settings.lease_s
        while not self._members.live:
            if not await self._progress.wait(deadline - time.monotonic()):
                return False
        return True

    async def _acknowledged(self, epoch: int) -> list[str]:
        """Wait until every live replica has applied `epoch`; returns those that did not in time."""
        deadline = time.monotonic() + self._settings.change_timeout_s
        while True:
            waiting = [member.replica_id for member in self._members.live if member.epoch < epoch]
            if not waiting or not await self._progress.wait(deadline - time.monotonic()):
                return waiting

    def _answers(self, name: str, epoch: int) -> dict[str, LoRAResponse | None]:
        return {
            member.replica_id: member.response(name, epoch) for member in self._members.live if member.epoch >= epoch
        }

    def _announce(self) -> None:
        """Wake replicas that wait for changes, and handles that wait for the table."""
        self._changed.ring()
        self._publish()

    def _publish(self) -> None:
        self._version += 1
        self._table = None
        self._published.ring()

    def _schedule_sweep(self) -> None:
        due = self._members.next_expiry
        if self._sweep is None and due is not None:
            delay_s = max(0.0, due - time.monotonic())
            self._sweep = asyncio.get_running_loop().call_later(delay_s, self._expire, due)

    def _expire(self, due: float) -> None:
        self._sweep = None
        now = time.monotonic()
        # A loop that was held up has heartbeats waiting: they are heard before anyone is dropped.
        if now - due > self._settings.lease_s / 2:
            pause_s = self._settings.lease_s / 2
            self._sweep = asyncio.get_running_loop().call_later(pause_s, self._expire, now + pause_s)
            return
        gone = self._members.expire(now)
        if gone:
            logger.warning("no sign of life within %.1f s: dropped %s", self._settings.lease_s, ", ".join(gone))
            self._changed.ring()
            self._progress.ring()
            self._publish()
        self._schedule_sweep()


def _journal_file(setting: str | None) -> Path | None:
    """The file of `router.journal`; None keeps everything in memory, as an unset one does outside Ray Serve."""
    if setting is not None:
        return None if setting == IN_MEMORY else Path(setting).expanduser()
    folder = session_folder()
    try:
        actor = serve.get_deployment_actor_context()
    except RayServeException:
        return None
    return session_journal(folder, actor.app_name, actor.deployment) if folder is not None else None


def _one_spelling(path: str) -> str:
    """The absolute path of a folder on this machine; anything else may be a Hub id, or exist where replicas run."""
    folder = os.path.expanduser(path)
    return os.path.realpath(folder) if os.path.isdir(folder) else path


def _unrecorded(name: str, refusal: LoRAResponse | None, error: LoRAFleetError) -> LoRAResponse:
    """What a load ended with whose end the journal did not take."""
    if refusal is None:
        return LoRAResponse(LoRAStatus.LOAD_ERROR, f"adapter {name!r} was not loaded: {error}")
    return LoRAResponse(refusal.status, f"{text_of(refusal)}; {error}")


def _failed(error: LoRAFleetError) -> LoadOutcome:
    status = next(
        (status for kind, status in STATUSES.items() if isinstance(error, kind)), LoRAStatus.UNSPECIFIED_ERROR
    )
    return LoadOutcome(status=status, message=str(error))
