"""`FleetOperations`: loads, replacements, unloads and pins, each carried out on every replica or on none."""

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.changes import Change, Topic, topic_of
from cluster.fingerprint import folder_fingerprint
from cluster.fleet import LoadOutcome
from cluster.members import Members
from cluster.registry import AdapterRegistry
from cluster.schema import RouterSettings
from cluster.verdict import (
    Answers,
    judge_load,
    judge_pin,
    judge_swap,
    judge_unload,
    slowest,
    text_of,
    words,
)
from deployments.bell import Bell
from lora_core.errors import AdapterError, AdapterNameTaken, AdapterNotFound, InvalidAdapter, LoRAFleetError
from lora_core.types import LoadReport, LoRAResponse, LoRAStatus

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

Statuses = Mapping[type[LoRAFleetError], LoRAStatus]

STATUSES: Statuses = {
    AdapterNameTaken: LoRAStatus.LOAD_NAME_EXISTS,
    AdapterNotFound: LoRAStatus.UNLOAD_NAME_NONEXISTENT,
    InvalidAdapter: LoRAStatus.LOAD_INVALID_ADAPTER,
}
"""What a refusal of a load or unload before any replica hears of it is answered as."""

PIN_STATUSES: Statuses = {
    AdapterNotFound: LoRAStatus.PIN_NAME_NONEXISTENT,
    AdapterError: LoRAStatus.PIN_ERROR,
}
"""What a refusal of a pin or unpin before any replica hears of it is answered as."""


@dataclass
class Loading:
    """A load under way or waiting for its turn, which like ones join."""

    path: str
    in_place: bool
    begun: bool = False
    """Its turn has come: files that change from here on may not be those it loads."""
    task: "asyncio.Task[LoadOutcome]" = field(init=False)

    def includes(self, path: str, in_place: bool) -> bool:
        """Whether this load does what a later one asks for."""
        return (self.path, self.in_place) == (path, in_place) and not (in_place and self.begun)


class FleetOperations:
    """Changes what the fleet serves. Operations on one name take turns, in the order in which they were asked for.

    Each is journalled, applied by every live replica, and judged by their answers. Where one cannot, nothing comes of
    it on any: a refused load leaves nothing, a refused replacement the adapter it was to replace, a refused pin no pin.
    So that this holds for a replacement, all replicas first load and check the new content beside the old; then all
    swap. None of these stops half done when its caller stops waiting.

    Args:
        registry: The desired adapters.
        members: The live replicas.
        progress: Rung whenever a replica has acknowledged something, came or went.
        announce: Wakes replicas that wait for changes, and handles that wait for the table.
        settings: Of the router.
        num_slots: Adapter slots of each replica; None: as the replicas report.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        members: Members,
        progress: Bell,
        announce: Callable[[], None],
        settings: RouterSettings,
        num_slots: int | None,
    ) -> None:
        self._registry = registry
        self._members = members
        self._progress = progress
        self._announce = announce
        self._settings = settings
        self._num_slots = num_slots
        self._started = time.monotonic()
        self._loads: dict[str, Loading] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        # Held by whoever changes a name; forgotten when nobody does.
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and nothing kept for its sake."""
        return not (self._loads or self._tasks or self._locks)

    async def load(self, name: str, path: str, *, in_place: bool = False) -> LoadOutcome:
        """Load an adapter, or replace one in place; see `AdapterRouter.load`."""
        loading = self._loads.get(name)
        if loading is None or not loading.includes(path, in_place):
            loading = self._loads[name] = Loading(path, in_place)
            loading.task = self._run(self._load(name, loading))
            loading.task.add_done_callback(lambda _: self._ended(name, loading))
        return await asyncio.shield(loading.task)

    async def unload(self, name: str) -> LoadOutcome:
        """Unload an adapter; see `AdapterRouter.unload`."""
        return await asyncio.shield(self._run(self._unload(name)))

    async def set_pin(self, name: str, pinned: bool) -> LoadOutcome:
        """Pin or unpin an adapter; see `AdapterRouter.pin`."""
        return await asyncio.shield(self._run(self._set_pin(name, pinned)))

    def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()

    # Inside

    def _run(self, operation: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Run an operation apart from its caller, so that a caller that goes away does not leave it half done."""
        task = asyncio.get_running_loop().create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _ended(self, name: str, loading: Loading) -> None:
        if self._loads.get(name) is loading:
            del self._loads[name]

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _load(self, name: str, loading: Loading) -> LoadOutcome:
        async with self._lock(name):
            loading.begun = True
            if not await self._some_member():
                return LoadOutcome(
                    status=LoRAStatus.UNAVAILABLE,
                    message=f"adapter {name!r} was not loaded: no replica is running; try again once /health is ok",
                )
            # Before any replica reads the files: a change during the load shows as one, too.
            fingerprint = await asyncio.to_thread(folder_fingerprint, loading.path)
            begin = self._registry.begin_replace if loading.in_place else self._registry.begin_load
            try:
                change = begin(name, loading.path, fingerprint)
            except LoRAFleetError as error:
                return _failed(error, STATUSES)
            if change is None:
                return await self._loaded_already(name)
            if change.request.lora_name != name:
                return await self._finish_replace(name, change)
            return await self._finish_load(name, change)

    async def _loaded_already(self, name: str) -> LoadOutcome:
        """Answer a load that changes nothing. Replicas that refused the adapter are asked once more."""
        entry = self._registry.entries[name]
        message = f"adapter {name!r} was loaded already"
        answers = self._answers(Topic(name, is_pin=False), entry.generation)
        if _refusals(answers):
            change = self._registry.repeat_load(name)
            self._registry.repeat_pin(name)
            self._announce()
            answers, late = await self._answered(change)
            refusals = {replica: text_of(answer) for replica, answer in _refusals(answers).items()}
            faults = [f"{replica} does not serve it: {text}" for replica, text in sorted(refusals.items())]
            faults += [f"{replica} has not answered" for replica in late]
            message = "; ".join([message, *faults])
        return _success(message, answers, entry.epoch, self._registry.report(name))

    async def _finish_load(self, name: str, change: Change) -> LoadOutcome:
        answers, refusal = await self._loaded(name, change)
        if refusal is None:
            try:
                return self._served(name, answers)
            except LoRAFleetError as error:
                refusal = _unrecorded(name, error)
        return self._undo_load(name, change, answers, refusal)

    def _served(self, name: str, answers: Answers) -> LoadOutcome:
        report = slowest(answers)
        entry = self._registry.commit_load(name, report)
        self._announce()
        message = f"adapter {name!r} is loaded on {len(answers)} replica(s)"
        return _success(message, answers, entry.epoch, report)

    async def _finish_replace(self, name: str, change: Change) -> LoadOutcome:
        """Swap once every replica has loaded and checked the new content beside the old, and not before."""
        answers, refusal = await self._loaded(name, change)
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
        return _success(message, answers, entry.epoch, self._registry.report(name))

    async def _swap(self, name: str, report: LoadReport | None) -> LoadOutcome:
        change = self._registry.commit_replace(name, report)
        self._announce()
        answers, late = await self._answered(change)
        staged = self._registry.finish_replace(name)
        # A replica that could not serve the generation before had nothing to pin.
        self._registry.repeat_pin(name)
        self._members.forget(staged.request.lora_name)
        self._announce()
        return _success(judge_swap(name, answers, late), answers, change.epoch, self._registry.report(name))

    async def _loaded(self, name: str, change: Change) -> tuple[Answers, LoRAResponse | None]:
        """Wait until every replica has answered a load; returns what they said, and why it failed, if it did."""
        self._announce()
        answers, late = await self._answered(change)
        answers = _of_name(name, change.request.lora_name, answers)
        return answers, judge_load(name, answers, late, self._settings.change_timeout_s)

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
        self._announce()
        if refusal.status is not LoRAStatus.SUCCESS:
            logger.warning("adapter %r was refused: %s", name, text_of(refusal))
        return LoadOutcome(status=refusal.status, message=text_of(refusal), per_replica=words(answers))

    async def _unload(self, name: str) -> LoadOutcome:
        async with self._lock(name):
            try:
                change = self._registry.begin_unload(name)
            except LoRAFleetError as error:
                return _failed(error, STATUSES)
            self._announce()
            answers, late = await self._answered(change)
            self._registry.finish_unload(name)
            self._members.forget(name)
            self._announce()
            verdict = judge_unload(name, answers, late)
            return LoadOutcome(
                status=verdict.status, message=text_of(verdict), per_replica=words(answers), epoch=change.epoch
            )

    async def _set_pin(self, name: str, pinned: bool) -> LoadOutcome:
        async with self._lock(name):
            done = "pinned" if pinned else "no longer pinned"
            try:
                change = self._registry.set_pin(name, pinned, self._most_pins())
            except LoRAFleetError as error:
                return _failed(error, PIN_STATUSES)
            if change is None:
                return LoadOutcome(status=LoRAStatus.SUCCESS, message=f"adapter {name!r} is {done} already")
            self._announce()
            answers, late = await self._answered(change)
            refusal = judge_pin(name, answers, late, self._settings.change_timeout_s)
            if refusal is None:
                message = f"adapter {name!r} is {done} on {len(answers)} replica(s)"
                return LoadOutcome(status=LoRAStatus.SUCCESS, message=message, per_replica=words(answers))
            if pinned:
                refusal = await self._take_pin_back(name, refusal)
            return LoadOutcome(status=refusal.status, message=text_of(refusal), per_replica=words(answers))

    async def _take_pin_back(self, name: str, refusal: LoRAResponse) -> LoRAResponse:
        try:
            back = self._registry.set_pin(name, False)
        except LoRAFleetError as error:
            return LoRAResponse(refusal.status, f"{text_of(refusal)}; the pin stays where it was possible: {error}")
        if back is not None:
            self._announce()
            await self._answered(back)
        return refusal

    def _most_pins(self) -> int | None:
        reported = [member.num_slots for member in self._members.live if member.num_slots]
        num_slots = self._num_slots if self._num_slots is not None else min(reported, default=None)
        return None if num_slots is None else num_slots - 1

    async def _some_member(self) -> bool:
        """Whether a replica is live; just after a start, replicas of before get the time to come back."""
        deadline = self._started + self._settings.lease_s
        while not self._members.live:
            if not await self._progress.wait(deadline - time.monotonic()):
                return False
        return True

    async def _answered(self, change: Change) -> tuple[Answers, list[str]]:
        """Wait until every live replica has answered a change; what they said, and those that did not in time."""
        deadline = time.monotonic() + self._settings.change_timeout_s
        topic = topic_of(change.request)
        while True:
            answers = self._answers(topic, change.epoch)
            late = [member.replica_id for member in self._members.live if member.replica_id not in answers]
            if not late or not await self._progress.wait(deadline - time.monotonic()):
                return answers, late

    def _answers(self, topic: Topic, epoch: int) -> Answers:
        answers = {member.replica_id: member.response(topic, epoch) for member in self._members.live}
        return {replica: answer for replica, answer in answers.items() if answer is not None}


def _refusals(answers: Answers) -> dict[str, LoRAResponse]:
    return {r: answer for r, answer in answers.items() if answer.status is not LoRAStatus.SUCCESS}


def _of_name(name: str, loaded: str, answers: Answers) -> Answers:
    """Answers to the load of what was called `loaded`, in words that call it `name`."""
    if loaded == name:
        return answers
    return {
        replica: LoRAResponse(answer.status, text_of(answer).replace(repr(loaded), repr(name)), answer.report)
        for replica, answer in answers.items()
    }


def _success(message: str, answers: Answers, epoch: int, report: LoadReport | None) -> LoadOutcome:
    return LoadOutcome(
        status=LoRAStatus.SUCCESS, message=message, per_replica=words(answers), epoch=epoch, report=report
    )


def _unrecorded(name: str, error: LoRAFleetError) -> LoRAResponse:
    """What a load ended with whose end the journal did not take."""
    return LoRAResponse(LoRAStatus.LOAD_ERROR, f"adapter {name!r} was not loaded: {error}")


def _failed(error: LoRAFleetError, statuses: Statuses) -> LoadOutcome:
    status = next(
        (status for kind, status in statuses.items() if isinstance(error, kind)), LoRAStatus.UNSPECIFIED_ERROR
    )
    return LoadOutcome(status=status, message=str(error))
