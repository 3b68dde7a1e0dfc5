"""`AdapterRouter`: keeps every replica serving the same adapters, and tells handles which replica holds what.

It is a plain class; the application runs it as a Ray actor. It is never on a token's path: where it is down, requests
go on being routed and answered, and only loads and unloads wait for it.
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve.exceptions import RayServeException

from cluster.changes import Change, topic_of
from cluster.fleet import AdapterInFleet, FleetTable, LoadOutcome, Outcome, Registration
from cluster.journal import session_journal
from cluster.members import Members
from cluster.names import check_name, static_adapters
from cluster.registry import AdapterRegistry
from cluster.schema import RouterSettings
from cluster.verdict import other_content, text_of
from deployments.bell import Bell
from deployments.fleet_operations import FleetOperations
from deployments.ray_internals import actor_name, session_folder, session_name
from lora_core.errors import AdapterError, AdapterNameTaken, ReplicaUnknown
from lora_core.messages import Residency
from lora_core.types import LoRAStatus

logger = logging.getLogger(__name__)

COALESCE_S = 0.02
"""A table is published this long after a change, so that a burst of changes travels as one."""

IN_MEMORY = ":memory:"
"""`router.journal` that keeps no file."""


class AdapterRouter:
    """The desired adapters, and the replicas that serve them. All methods run on one event loop.

    Args:
        settings: `base_name`; `lora_paths`, each `name=path` or a path that is also the name; `num_slots`, how many
            adapter slots each replica has; and the keys of `cluster.schema.RouterSettings`.

    Raises:
        ConfigError: a setting cannot work, or the journal cannot be used.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        rest = dict(settings)
        self._base_name: str = rest.pop("base_name")
        static = static_adapters(rest.pop("lora_paths", ()), self._base_name)
        static = {name: _one_spelling(path) for name, path in static.items()}
        num_slots: int | None = rest.pop("num_slots", None)
        self._settings = RouterSettings.model_validate(rest)
        self._name = actor_name()
        self._registry = AdapterRegistry(
            _journal_file(self._settings.journal),
            static=static,
            run=f"{session_name()}/{self._name}" if self._name else "",
        )
        self._members = Members(self._settings.lease_s)
        self._changed, self._progress, self._published = Bell(), Bell(), Bell()
        self._operations = FleetOperations(
            self._registry, self._members, self._progress, self._announce, self._settings, num_slots
        )
        self._sweep: asyncio.TimerHandle | None = None
        self._router_id = uuid.uuid4().hex
        self._version = 1
        self._table: FleetTable | None = None

    # For replicas

    async def register(
        self, replica_id: str, holding: Mapping[str, int] | None = None, pinned: Collection[str] = ()
    ) -> Registration:
        """Enter a replica, or enter it again.

        Args:
            replica_id: Serve's unique id of the replica.
            holding: name -> generation of the adapters it has loaded already.
            pinned: Names of those it has pinned.
        """
        changes = self._registry.catch_up(holding or {}, pinned)
        behind = {topic_of(change.request) for change in changes}
        self._members.add(replica_id, time.monotonic(), self._registry.epoch, behind)
        self._schedule_sweep()
        self._progress.ring()
        self._publish()
        logger.info("replica %s registered; %d change(s) to apply", replica_id, len(changes))
        return Registration(
            epoch=self._registry.epoch, changes=changes, router_name=self._name, lease_s=self._settings.lease_s
        )

    async def wait_changes(self, replica_id: str, since_epoch: int, timeout_s: float) -> list[Change]:
        """Changes after since_epoch, in order; [] when none came within timeout_s. Renews the lease, when called.

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

    async def acknowledge(self, replica_id: str, outcomes: list[Outcome]) -> list[Change]:
        """Note how changes ended on a replica, each by itself: it may be long in applying another one yet.

        Returns:
            Unloads for this replica alone: of adapters that it found other content of than its fellows serve.

        Raises:
            ReplicaUnknown: register again.
        """
        member = self._members.renew(replica_id, time.monotonic())
        compared = [self._compared(outcome) for outcome in outcomes]
        unloads = [
            Change(epoch=outcome.epoch, request=self._registry.entries[outcome.topic.name].unload_request())
            for outcome, told in zip(compared, outcomes, strict=True)
            if outcome is not told
        ]
        self._members.acknowledge(member, compared, self._registry.entries)
        self._warn_of_refusals(replica_id, compared)
        self._progress.ring()
        self._publish()
        return unloads

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

    async def describe(self, name: str) -> AdapterInFleet | None:
        """One adapter in detail; None where none of this name can be asked for."""
        entry = self._registry.ready().get(name)
        if entry is None:
            return None
        return AdapterInFleet(
            entry=entry, report=self._registry.report(name), replicas=self._members.status(name, entry)
        )

    # For whoever loads and unloads: each goes on when the caller stops waiting

    async def load(self, name: str, path: str, load_inplace: bool = False, path_is_final: bool = False) -> LoadOutcome:
        """Serve the adapter at `path` under `name` on every live replica.

        Answers once every live replica has it, or after it was undone everywhere because one refused it, because two
        found other content there, or because the journal cannot be written. A load identical to one under way joins it.

        In place, it takes the place of the adapter that has the name, if one has: as a new generation, while requests
        in flight finish on the one before. No replica swaps before all have loaded and checked the new content; where
        one cannot, all go on serving the one before. Content that is served already is a success that changes nothing.

        Args:
            name: What requests will call it.
            path: A folder, in whatever spelling, or a Hub id.
            load_inplace: Replace what has the name.
            path_is_final: No link is followed any more: whoever allowed this path has followed them all, and one that
                stands there now has been put there since.
        """
        path = path if path_is_final else _one_spelling(path)
        try:
            check_name(name, self._base_name)
        except AdapterError as error:
            taken = isinstance(error, AdapterNameTaken)
            status = LoRAStatus.LOAD_NAME_EXISTS if taken else LoRAStatus.LOAD_INVALID_ADAPTER
            return LoadOutcome(status=status, message=str(error))
        return await self._operations.load(name, path, in_place=load_inplace)

    async def unload(self, name: str) -> LoadOutcome:
        """Stop serving an adapter: new requests no longer find it at once, accepted ones finish."""
        return await self._operations.unload(name)

    async def pin(self, name: str) -> LoadOutcome:
        """Keep an adapter in a slot of every replica, those that start later included, until `unpin` or `unload`.

        One slot always stays free for the others: at most slots - 1 adapters can be pinned.
        """
        return await self._operations.set_pin(name, True)

    async def unpin(self, name: str) -> LoadOutcome:
        """Let an adapter's slot be taken again when others need it."""
        return await self._operations.set_pin(name, False)

    async def close(self) -> None:
        """Stop the clock and close the journal."""
        if self._sweep is not None:
            self._sweep.cancel()
        self._operations.close()
        self._registry.close()

    # Inside

    def _compared(self, outcome: Outcome) -> Outcome:
        """The outcome, or a refusal in its place where a replica loaded other content than its fellows serve."""
        name, report = outcome.topic.name, outcome.response.report
        entry = self._registry.entries.get(name)
        if entry is None or entry.state != "ready" or report is None or report.generation != entry.generation:
            return outcome
        if entry.content_hash is None:
            self._registry.note_content(name, report)
        elif entry.content_hash != report.content_hash:
            refusal = other_content(name, entry.content_hash, report.content_hash)
            return msgspec.structs.replace(outcome, response=refusal)
        return outcome

    def _warn_of_refusals(self, replica_id: str, outcomes: list[Outcome]) -> None:
        """Say which adapters that others serve a replica does not."""
        served = self._registry.ready()
        for outcome in outcomes:
            (name, is_pin), response = outcome.topic, outcome.response
            if not is_pin and name in served and response.status is not LoRAStatus.SUCCESS:
                logger.warning("replica %s does not serve adapter %r: %s", replica_id, name, text_of(response))

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
        # A loop that was held up has calls of replicas waiting: they are heard before anyone is dropped.
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
