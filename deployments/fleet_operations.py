"""`FleetOperations`: loads, replacements and unloads over the whole fleet."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.changes import Change, Topic
from cluster.fleet import LastError, LoadOutcome
from cluster.members import Members
from cluster.names import is_name
from cluster.registry import AdapterRegistry
from cluster.verdict import (
    Answers,
    behind_swap,
    failures,
    judge_load,
    judge_staging,
    judge_unload,
    refused,
    slowest,
    text_of,
    told,
    words,
)
from deployments.broadcast import Broadcast
from deployments.folder_looks import FolderLooks
from deployments.turns import Turns
from lora_core.errors import AdapterNameTaken, AdapterNotFound, InvalidAdapter, LoRAFleetError, RequestTimeout
from lora_core.types import LoadReport, LoRAResponse, LoRAStatus

logger = logging.getLogger(__name__)

MAX_ERRORS_KEPT = 256
"""Names whose last failed operation is remembered."""

STATUSES: Mapping[type[LoRAFleetError], LoRAStatus] = {
    AdapterNameTaken: LoRAStatus.LOAD_NAME_EXISTS,
    AdapterNotFound: LoRAStatus.UNLOAD_NAME_NONEXISTENT,
    InvalidAdapter: LoRAStatus.LOAD_INVALID_ADAPTER,
    RequestTimeout: LoRAStatus.UNAVAILABLE,
}
"""What a refusal of a load or unload before any replica hears of it is answered as."""


@dataclass
class Loading:
    """A load under way or waiting for its turn, which like ones join."""

    path: str
    in_place: bool
    path_is_final: bool
    begun: bool = False
    """Its turn has come: files that change from here on may not be those it loads."""
    task: "asyncio.Task[LoadOutcome]" = field(init=False)

    def includes(self, later: "Loading") -> bool:
        """Whether this load does what a later one asks for."""
        asked = (later.path, later.in_place, later.path_is_final)
        return (self.path, self.in_place, self.path_is_final) == asked and not (self.in_place and self.begun)


class FleetOperations:
    """Changes what the fleet serves. Operations on one name take turns, in the order in which they were asked for.

    Each is journalled, applied by every live replica, and judged by their answers. An adapter that a replica finds
    wrong, or that none can load, is undone everywhere. One that some replicas have, and others cannot get for reasons
    of their own, is served by those that have it; the others are asked again (`deployments.refusals`), and until they
    have it the outcome is PARTIAL, never SUCCESS.

    A replacement is all or none: all replicas first load and check the new content beside the old; then all swap. None
    of these stops half done when its caller stops waiting.

    Args:
        registry: The desired adapters.
        members: The live replicas.
        broadcast: Brings changes to them.
        turns: Of the operations on each name.
    """

    def __init__(self, registry: AdapterRegistry, members: Members, broadcast: Broadcast, turns: Turns) -> None:
        self._registry = registry
        self._members = members
        self._broadcast = broadcast
        self._turns = turns
        self._looks = FolderLooks()
        self._loads: dict[str, Loading] = {}
        self._errors: OrderedDict[str, LastError] = OrderedDict()
        # Names whose error is that some replicas have yet to follow.
        self._partial: set[str] = set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and nothing kept for its sake."""
        return not self._loads and self._turns.are_idle

    @property
    def last_errors(self) -> Mapping[str, LastError]:
        """Name -> how the last operation on it failed, for the names whose last one did; the latest ones."""
        return self._errors

    async def load(self, name: str, path: str, *, in_place: bool = False, path_is_final: bool = False) -> LoadOutcome:
        """Load an adapter, or replace one in place; see `AdapterRouter.load`."""
        asked, loading = Loading(path, in_place, path_is_final), self._loads.get(name)
        if loading is None or not loading.includes(asked):
            loading = self._loads[name] = asked
            loading.task = self._turns.run(self._load(name, loading))
            loading.task.add_done_callback(lambda _: self._ended(name, loading))
        return await asyncio.shield(loading.task)

    async def unload(self, name: str) -> LoadOutcome:
        """Unload an adapter; see `AdapterRouter.unload`."""
        return await asyncio.shield(self._turns.run(self._unload(name)))

    def note(self, name: str, outcome: LoadOutcome) -> LoadOutcome:
        """Remember how an operation on a name failed, or that it did not; returns the outcome.

        What no adapter can be called is not remembered: it may be of any length, or no text at all.
        """
        self._forget_error(name)
        if outcome.status is not LoRAStatus.SUCCESS and is_name(name):
            self._errors[name] = LastError(unix_s=time.time(), text=outcome.message)
            if outcome.status is LoRAStatus.PARTIAL:
                self._partial.add(name)
            while len(self._errors) > MAX_ERRORS_KEPT:
                self._forget_error(next(iter(self._errors)))
        return outcome

    def note_progress(self, name: str) -> None:
        """A replica has done something about an adapter; where it was the last that had yet to follow, all is well."""
        entry = self._registry.served.get(name)
        if name not in self._partial or entry is None:
            return
        answers = self._broadcast.answers(Topic(name, is_pin=False), entry.generation)
        if len(answers) == len(self._members.live) and not failures(answers):
            self._forget_error(name)

    # Inside

    def _forget_error(self, name: str) -> None:
        self._errors.pop(name, None)
        self._partial.discard(name)

    def _ended(self, name: str, loading: Loading) -> None:
        if self._loads.get(name) is loading:
            del self._loads[name]

    async def _load(self, name: str, loading: Loading) -> LoadOutcome:
        async with self._turns.turn(name):
            loading.begun = True
            return self.note(name, await self._load_now(name, loading))

    async def _load_now(self, name: str, loading: Loading) -> LoadOutcome:
        if not await self._broadcast.members_are_back():
            return LoadOutcome(
                status=LoRAStatus.UNAVAILABLE,
                message=f"adapter {name!r} was not loaded: no replica is running; try again once /v1/fleet shows one",
            )
        begin = self._registry.begin_replace if loading.in_place else self._registry.begin_load
        try:
            path = loading.path if loading.path_is_final else await self._looks.spelling(loading.path)
            # Before any replica reads the files: a change during the load shows as one, too.
            change = begin(name, path, await self._looks.fingerprint(path))
        except LoRAFleetError as error:
            return refused(error, STATUSES)
        if change is None:
            return await self._loaded_already(name)
        if change.request.lora_name != name:
            return await self._finish_replace(name, change)
        return await self._finish_load(name, change)

    async def _loaded_already(self, name: str) -> LoadOutcome:
        """Answer a load that changes nothing. Replicas that refused the adapter are asked once more."""
        entry = self._registry.entries[name]
        answers = self._broadcast.answers(Topic(name, is_pin=False), entry.generation)
        refusals = list(failures(answers))
        late = [
            member.replica_id
            for member in self._members.live
            # One that has reported what it holds has joined: it is not merely starting.
            if member.replica_id not in answers and member.residency is not None
        ]
        if refusals:
            change = self._registry.repeat_load(name, refusals)
            again, silent = await self._broadcast.answered(change)
            answers, late = {**answers, **again}, late + silent
        behind = {replica: text_of(answer) for replica, answer in failures(answers).items()}
        behind.update(dict.fromkeys(late, "it has not answered"))
        message = f"adapter {name!r} was loaded already"
        message += "".join(f"; {replica} does not serve it: {reason}" for replica, reason in behind.items())
        return _served(message, answers, entry.epoch, self._registry.report(name), behind)

    async def _finish_load(self, name: str, change: Change) -> LoadOutcome:
        answers, late = await self._broadcast.answered(change)
        refusal, behind = judge_load(name, answers, late, self._broadcast.timeout_s)
        if refusal is None:
            try:
                report = slowest(answers)
                entry = self._registry.commit_load(name, report)
            except LoRAFleetError as error:
                refusal = _unrecorded(name, error)
            else:
                self._broadcast.announce()
                message = told(name, "loaded", len(answers) - len(failures(answers)), behind)
                return _served(message, answers, entry.epoch, report, behind)
        return self._undo_load(name, change, answers, refusal)

    async def _finish_replace(self, name: str, change: Change) -> LoadOutcome:
        """Swap once every replica has loaded and checked the new content beside the old, and not before."""
        found, late = await self._broadcast.answered(change)
        answers = _of_name(name, change.request.lora_name, found)
        refusal = judge_staging(name, answers, late, self._broadcast.timeout_s)
        if refusal is None:
            try:
                entry, report = self._registry.entries[name], slowest(answers)
                if report is not None and report.content_hash == entry.content_hash:
                    return self._kept(name, change, answers)
                return await self._swap(name, report)
            except LoRAFleetError as error:
                refusal = _unrecorded(name, error)
        return self._undo_load(name, change, answers, refusal)

    def _kept(self, name: str, change: Change, answers: Answers) -> LoadOutcome:
        entry = self._registry.keep_content(name)
        message = f"adapter {name!r} has this content already"
        self._undo_load(name, change, answers, LoRAResponse(LoRAStatus.SUCCESS, message))
        return _served(message, answers, entry.epoch, self._registry.report(name), {})

    async def _swap(self, name: str, report: LoadReport | None) -> LoadOutcome:
        change = self._registry.commit_replace(name, report)
        answers, late = await self._broadcast.answered(change)
        staged = self._registry.finish_replace(name)
        self._members.end_swap(name)
        if self._registry.entries[name].pinned:
            # A replica that could not serve the generation before had nothing to pin.
            self._registry.repeat_pin(name)
        self._members.forget(staged.request.lora_name)
        self._broadcast.announce()
        behind = behind_swap(answers, late)
        message = told(name, "replaced", len(answers) - len(failures(answers)), behind)
        return _served(message, answers, change.epoch, self._registry.report(name), behind)

    def _undo_load(self, name: str, change: Change, answers: Answers, refusal: LoRAResponse) -> LoadOutcome:
        loaded = change.request.lora_name
        try:
            self._registry.rollback_load(loaded)
        except LoRAFleetError as error:
            # Left as it is, the name could neither be loaded nor unloaded.
            self._registry.abandon_load(loaded)
            if str(error) not in text_of(refusal):
                refusal = LoRAResponse(refusal.status, f"{text_of(refusal)}; {error}")
        self._members.forget(loaded)
        self._broadcast.announce()
        if refusal.status is not LoRAStatus.SUCCESS:
            logger.warning("adapter %r was refused: %s", name, text_of(refusal))
        return LoadOutcome(status=refusal.status, message=text_of(refusal), per_replica=words(answers))

    async def _unload(self, name: str) -> LoadOutcome:
        async with self._turns.turn(name):
            try:
                change = self._registry.begin_unload(name)
            except LoRAFleetError as error:
                return self.note(name, refused(error, STATUSES))
            answers, late = await self._broadcast.answered(change)
            self._registry.finish_unload(name)
            self._members.forget(name)
            self._broadcast.announce()
            verdict = judge_unload(name, answers, late)
            outcome = LoadOutcome(
                status=verdict.status, message=text_of(verdict), per_replica=words(answers), epoch=change.epoch
            )
            return self.note(name, outcome)


def _of_name(name: str, loaded: str, answers: Answers) -> Answers:
    """Answers to the load of what was called `loaded`, in words that call it `name`."""
    return {
        replica: LoRAResponse(answer.status, text_of(answer).replace(repr(loaded), repr(name)), answer.report)
        for replica, answer in answers.items()
    }


def _served(
    message: str, answers: Answers, epoch: int, report: LoadReport | None, behind: Mapping[str, str]
) -> LoadOutcome:
    """What is said of an adapter that is served, if not yet by all."""
    return LoadOutcome(
        status=LoRAStatus.PARTIAL if behind else LoRAStatus.SUCCESS,
        message=message,
        per_replica={**words(answers), **{r: f"unavailable: {behind[r]}" for r in behind if r not in answers}},
        epoch=epoch,
        report=report,
        behind=sorted(behind),
    )


def _unrecorded(name: str, error: LoRAFleetError) -> LoRAResponse:
    """What a load ended with whose end the journal did not take."""
    return LoRAResponse(LoRAStatus.LOAD_ERROR, f"adapter {name!r} was not loaded: {error}")
