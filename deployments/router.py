"""`AdapterRouter`: keeps every replica serving the same adapters, and tells handles which replica holds what.

It is a plain class; the application runs it as a Ray actor. It is never on a token's path: where it is down, requests
go on being routed and answered, and only loads and unloads wait for it.
"""

import asyncio
import logging
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from cluster.changes import Change, topic_of
from cluster.entry import AdapterEntry
from cluster.fleet import (
    AdapterInFleet,
    Alias,
    AliasInFleet,
    FleetTable,
    LoadOutcome,
    Outcome,
    Registration,
    SlotWishes,
)
from cluster.members import Members
from cluster.names import check_name, static_adapters
from cluster.picture import FleetPicture
from cluster.registry import AdapterRegistry
from cluster.schema import RouterSettings
from cluster.status import AdapterReport, FleetReport, Page
from cluster.table_changes import TableDelta
from cluster.verdict import other_content
from deployments.bell import Bell
from deployments.broadcast import Broadcast
from deployments.fleet_operations import FleetOperations
from deployments.fleet_slots import FleetSlots
from deployments.journal_place import is_text, journal_file, one_spelling
from deployments.lease_sweep import LeaseSweep
from deployments.operator_view import OperatorView
from deployments.ray_internals import actor_name, session_name
from deployments.refusals import Refusals
from deployments.slot_claims import SlotClaims
from deployments.succession import Succession, num_joined
from deployments.table_feed import TableFeed
from deployments.turns import Turns
from lora_core.errors import AdapterError, AdapterNameTaken, InvalidAdapter, InvalidRequest, ReplicaUnknown
from lora_core.messages import Residency
from lora_core.types import LoRAStatus
from lora_core.workload import Workload

logger = logging.getLogger(__name__)


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
        static = {name: one_spelling(path) for name, path in static.items()}
        num_slots: int | None = rest.pop("num_slots", None)
        self._settings = RouterSettings.model_validate(rest)
        self._name = actor_name()
        self._registry = AdapterRegistry(
            journal_file(self._settings.journal),
            static=static,
            run=f"{session_name()}/{self._name}" if self._name else "",
        )
        self._members = Members(self._settings.lease_s, self._registry.served)
        self._registry.on_change = self._members.expect
        self._changed, self._progress = Bell(), Bell()
        self._feed = TableFeed(self._registry, self._members)
        self._turns = Turns()
        broadcast = Broadcast(
            self._members,
            self._progress,
            self._announce,
            self._settings.change_timeout_s,
            is_resumed=self._registry.is_resumed,
        )
        self._operations = FleetOperations(self._registry, self._members, broadcast, self._turns)
        self._claims = SlotClaims(self._registry, self._members, broadcast, self._turns, num_slots)
        self._refusals = Refusals(self._registry, broadcast, self._turns)
        self._slots = FleetSlots(
            self._registry, self._members, self._feed.stir, self._settings.plan_period_s, num_slots
        )
        self._sweep = LeaseSweep(self._members, self._forget_replicas)
        self._succession = Succession(self._members, num_joined, _end_process)
        self._registry.on_replaced = self._succession.look_at
        self._view = OperatorView(self._registry, self._members, self._slots, self._operations)

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
        self._refusals.drop([replica_id])
        self._sweep.schedule()
        self._slots.start()
        self._view.start(self._feed.router_id)
        self._progress.ring()
        self._feed.stir()
        logger.info("replica %s registered; %d change(s) to apply", replica_id, len(changes))
        return Registration(
            epoch=self._registry.epoch,
            changes=changes,
            router_name=self._name,
            lease_s=self._settings.lease_s,
            work_period_s=self._slots.report_period_s,
        )

    async def wait_changes(self, replica_id: str, since_epoch: int, timeout_s: float) -> list[Change]:
        """Changes after since_epoch, in order; [] when none came within timeout_s. Renews the lease, when called.

        Raises:
            ReplicaUnknown: not registered, or too far behind for the changes still known; register again.
        """
        self._members.renew(replica_id, time.monotonic())
        deadline = time.monotonic() + timeout_s
        while True:
            known = self._registry.changes_since(since_epoch)
            if known is None:
                raise ReplicaUnknown(f"replica {replica_id!r} is at epoch {since_epoch}, too far behind; register it")
            changes = [change for change in known if change.is_for(replica_id)]
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
        news = self._members.acknowledge(member, compared, self._registry.entries)
        self._refusals.note(replica_id, news)
        for outcome in news:
            self._operations.note_progress(outcome.topic.name)
        self._progress.ring()
        self._feed.stir()
        return unloads

    async def report_residency(self, replica_id: str, residency: Residency, num_slots: int) -> None:
        """Note what a replica holds; a report older than the last one is ignored.

        Raises:
            ReplicaUnknown: register again.
        """
        member = self._members.renew(replica_id, time.monotonic())
        if self._members.report(member, residency, num_slots):
            self._view.note_slots(member)
            self._feed.stir()

    async def report_work(self, replica_id: str, work: Workload) -> SlotWishes:
        """Note what a replica has done since it last said so; returns what its slots should hold.

        Raises:
            ReplicaUnknown: register again.
        """
        self._slots.note_work(self._members.renew(replica_id, time.monotonic()), work)
        return await self._slots.wishes(replica_id)

    async def wait_wishes(self, replica_id: str, version: int, timeout_s: float) -> SlotWishes:
        """What a replica's slots should hold, once it differs from `version`, or after timeout_s. Renews the lease,
        when called.

        Raises:
            ReplicaUnknown: register again.
        """
        self._members.renew(replica_id, time.monotonic())
        return await self._slots.wait_wishes(replica_id, version, timeout_s)

    async def num_joined(self) -> int:
        """Replicas that take requests."""
        return self._members.num_joined

    # For handles

    async def note_loads(self, loads: Mapping[str, list[str]]) -> None:
        """Note that requests are on their way which bring adapters into slots: replica id -> names.

        These count as loading for `HINT_S`, and the replica is told of them at once. Unknown ones are ignored.
        """
        self._slots.note_loads(loads)

    async def table(self) -> FleetTable:
        """The fleet as it is now."""
        return self._feed.table(self._slots)

    async def watch(self, version: int, timeout_s: float, router_id: str = "") -> FleetTable | list[TableDelta]:
        """The table once it differs from `version`, or after timeout_s.

        Returns:
            The deltas that lead there from `version`, for who has that of `router_id`; else the whole table.
        """
        return await self._feed.watch(self._slots, version, timeout_s, router_id)

    async def describe(self, name: str) -> AdapterInFleet | None:
        """One adapter in detail; None where none of this name can be asked for."""
        entry = self._registry.served.get(name)
        if entry is None:
            return None
        return AdapterInFleet(
            entry=entry,
            report=self._registry.report(name),
            replicas=self._members.status(entry),
            retries=self._refusals.of(name),
        )

    # For operators

    async def fleet_status(self) -> FleetReport:
        """The replicas, the epochs they are at, and the last changes that failed."""
        return self._view.fleet(self._feed.router_id)

    async def fleet_picture(self) -> FleetPicture:
        """What the live page shows."""
        return self._view.picture(self._feed.router_id)

    async def adapters_status(self, after: str, limit: int) -> Page:
        """The first `limit` desired adapters, whatever their state, whose names come after `after`."""
        return self._view.adapters(after, limit)

    async def adapter_status(self, name: str) -> AdapterReport | None:
        """One desired adapter, whatever its state; None where there is none of this name."""
        return self._view.adapter(name)

    # For whoever loads and unloads: each goes on when the caller stops waiting

    async def load(self, name: str, path: str, load_inplace: bool = False, path_is_final: bool = False) -> LoadOutcome:
        """Serve the adapter at `path` under `name` on every live replica.

        Answers once every live replica has it: SUCCESS; or once some have it and the others cannot for reasons of their
        own: PARTIAL, and those are asked again in the background. Or after it was undone everywhere because none has
        it, because one found fault with it, because two found other content there, or because the journal cannot be
        written. A load identical to one under way joins it.

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
        if not is_text(path):
            message = f"the adapter's path {path!r} is not text in UTF-8; name the folder otherwise"
            return LoadOutcome(status=LoRAStatus.LOAD_INVALID_PATH, message=message)
        try:
            check_name(name, self._base_name)
        except AdapterError as error:
            taken = isinstance(error, AdapterNameTaken)
            status = LoRAStatus.LOAD_NAME_EXISTS if taken else LoRAStatus.LOAD_INVALID_ADAPTER
            return LoadOutcome(status=status, message=str(error))
        return await self._operations.load(name, path, in_place=load_inplace, path_is_final=path_is_final)

    async def unload(self, name: str) -> LoadOutcome:
        """Stop serving an adapter: new requests no longer find it at once, accepted ones finish."""
        return await self._operations.unload(name)

    async def pin(self, name: str) -> LoadOutcome:
        """Keep an adapter in a slot of every replica, those that start later included, until `unpin` or `unload`.

        One slot always stays free for the others: at most slots - 1 adapters can be pinned.
        """
        return await self._set_pin(name, True)

    async def unpin(self, name: str) -> LoadOutcome:
        """Let an adapter's slot be taken again when others need it."""
        return await self._set_pin(name, False)

    async def set_min_copies(self, name: str, min_copies: int) -> AdapterEntry:
        """Have an adapter in a slot of at least so many replicas. Raises as `SlotClaims.set_min_copies` does."""
        entry = await asyncio.shield(self._turns.run(self._claims.set_min_copies(name, min_copies)))
        self._slots.start()
        self._announce()
        return entry

    # Aliases

    async def set_alias(self, name: str, targets: Mapping[str, float]) -> Alias:
        """Have a name stand for weighted adapters, in one step; it may have stood for others before.

        Args:
            name: The alias. It may carry a version, as `tuned@latest`.
            targets: Adapter -> weight, on any scale.

        Raises:
            InvalidRequest: a name, a weight or a target cannot be.
            AdapterNameTaken: an adapter, or the base model, has the name.
        """
        try:
            check_name(name, self._base_name, "alias")
        except InvalidAdapter as error:
            raise InvalidRequest(str(error)) from None
        return self._moved(self._registry.set_alias(name, targets))

    async def roll_back_alias(self, name: str) -> Alias:
        """Have an alias stand for what it stood for before its last move. Raises AdapterNotFound, InvalidRequest."""
        return self._moved(self._registry.roll_back_alias(name))

    async def remove_alias(self, name: str) -> int:
        """Forget an alias; returns the epoch. Raises AdapterNotFound."""
        epoch = self._registry.remove_alias(name)
        self._feed.stir()
        return epoch

    async def aliases(self) -> list[AliasInFleet]:
        """All aliases, in the order of their names."""
        return self._registry.aliases.all()

    async def close(self) -> None:
        """Stop the clock and close the journal."""
        self._sweep.close()
        self._succession.close()
        self._turns.close()
        self._refusals.close()
        self._slots.close()
        self._view.close()
        self._registry.close()

    # Inside

    async def _set_pin(self, name: str, pinned: bool) -> LoadOutcome:
        outcome = await asyncio.shield(self._turns.run(self._claims.set_pin(name, pinned)))
        return self._operations.note(name, outcome)

    def _moved(self, alias: Alias) -> Alias:
        self._feed.stir()
        return alias

    def _compared(self, outcome: Outcome) -> Outcome:
        """The outcome, or a refusal in its place where a replica loaded other content than its fellows serve."""
        name, report = outcome.topic.name, outcome.response.report
        entry = self._registry.served.get(name)
        if entry is None or report is None or report.generation != entry.generation:
            return outcome
        if entry.content_hash is None:
            self._registry.note_content(name, report)
        elif entry.content_hash != report.content_hash:
            refusal = other_content(name, entry.content_hash, report.content_hash)
            return msgspec.structs.replace(outcome, response=refusal)
        return outcome

    def _announce(self) -> None:
        """Wake replicas that wait for changes, and handles that wait for the table."""
        self._changed.ring()
        self._feed.stir()

    def _forget_replicas(self, gone: list[str]) -> None:
        self._refusals.drop(gone)
        self._slots.drop(gone)
        self._view.drop(gone)
        self._progress.ring()
        self._announce()


def _end_process() -> None:
    # Not an orderly exit, which a worker of Ray's may put off.
    os._exit(1)
