"""The way of an adapter into a slot: read again if it left host memory, then written between steps."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from lora_core.adapter_record import AdapterRecord
from lora_core.adapters import AdapterTable
from lora_core.errors import AdapterLost, InvalidAdapter, InvalidAdapterPath, describe
from lora_core.load_times import LoadTimes
from lora_core.places import PATIENCE_S, Places
from lora_core.readiness import Readiness
from lora_core.slots import NoFreeSlot
from lora_core.types import AdapterRef
from lora_core.workers import Workers

M = TypeVar("M")

logger = logging.getLogger(__name__)

NUM_READERS = 2
"""Adapters read again at a time, those not counted that take long."""

WARM_UP_SHARE = 0.2
"""Of a step's time for writing slots, what it spends on one that nobody waits for: a tenth of a usual step."""


class SlotWrite(Protocol):
    """A slot's content on its way there."""

    def advance(self, budget_s: float | None) -> bool:
        """Write on for about so long, None: to the end. Whether the slot is now complete."""
        ...


@dataclass
class _Write:
    """A slot being written."""

    content: SlotWrite
    begun_s: float


class Staging(Generic[M]):
    """Moves adapters from their folders to host memory, and from there into slots.

    `prepare`, `advance`, `activate` and `rewrite` belong to one thread, the step thread; files are read by others.
    """

    def __init__(
        self,
        table: AdapterTable[M],
        read: Callable[[str, Path], tuple[AdapterRecord, M]],
        begin_write: Callable[[int, M], SlotWrite],
        *,
        read_timeout_s: float,
        times: LoadTimes | None = None,
        before_write: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Stage the adapters of `table`.

        Args:
            table: Where they are.
            read: Reads and checks the adapter of a name in a folder; raises InvalidAdapterPath or InvalidAdapter.
            begin_write: Begins to make a slot hold exactly these tensors, instead of what was begun before.
            read_timeout_s: How long requests wait for one adapter to be read.
            times: Where loads are noted.
            before_write: Called when an adapter has lost its slot to another, before the slot changes.
            clock: Seconds, never falling: measures how long reads and writes take.
        """
        self.num_slot_writes = 0
        """Slots that were assigned, and written, since the start."""
        self._table = table
        self._read = read
        self._begin_write = begin_write
        self._times = times or LoadTimes()
        self._before_write = before_write
        self._writes: dict[AdapterRef, _Write] = {}
        # When the step thread has to stop writing in this step, and in one that nobody waits for; None is never.
        self._deadline: float | None = None
        self._warm_up_deadline: float | None = None
        self._read_timeout_s = read_timeout_s
        self._clock = clock
        self._patience_s = min(PATIENCE_S, read_timeout_s)
        self._readers = Workers(
            "lora-reader",
            Places(NUM_READERS, self._patience_s, clock),
            self._next_read,
            self._read_for_requests,
        )
        # Of each read for requests: when it began.
        self._reads: dict[AdapterRef, float] = {}
        self._read_ended = threading.Condition()
        self._num_ended = 0
        self._num_seen = 0

    def prepare(self, ref: AdapterRef, *, take_slot: bool = True) -> Readiness:
        """Bring an adapter nearer to a slot for a request that waits for it, without waiting for anything.

        A slot that it gets is written at once as far as the step's time allows. One slot is written at a time.

        Raises:
            KeyError: the generation is not loaded.
            AdapterLost: its tensors were needed, and its files are gone, changed, or take too long to read; or its slot
                cannot be written. Told once, then tried anew.
        """
        found = self._table.prepare(ref, take_slot=take_slot and not self._unfinished())
        if found.is_new:
            self._readers.start()
        if found.slot is None or found.tensors is None:
            return found.readiness
        self._begin(ref, found.slot, found.tensors)
        return Readiness.READY if self._write_in_time(ref) else Readiness.WRITING

    def advance(self, budget_s: float | None) -> None:
        """Begin a step: write on, and bring adapters that are pinned or to be warmed up nearer to their slots.

        Args:
            budget_s: Seconds this step may spend on writing, `prepare` included; None: as long as it takes.
        """
        now_s = time.perf_counter()
        self._deadline = None if budget_s is None else now_s + budget_s
        self._warm_up_deadline = None if budget_s is None else now_s + WARM_UP_SHARE * budget_s
        for ref in self._unfinished():
            try:
                self._write_in_time(ref)
            except AdapterLost as error:
                self._table.lose(ref, error)
        self._give_up_reads()
        for ref in self._table.wanted.pinned_without_slot():
            try:
                self.prepare(ref)
            except KeyError:  # unloaded by another thread
                continue
            except AdapterLost as error:
                logger.warning("pinned: %s", error)
        self._warm_up()
        self._readers.start()

    def activate(self, name_or_ref: str | AdapterRef) -> int:
        """Give an adapter a slot now, reading and writing all that takes, or refresh the recency of the one it has.

        Raises:
            KeyError: no such adapter is loaded.
            NoFreeSlot: all slots are in use.
            AdapterLost: its tensors were needed, and its files are gone or changed.
        """
        ref = self._table.resolve(name_or_ref)
        if not self._table.is_writing(ref) and self._table.slot_of(ref) is None:
            if not self._table.can_activate(ref):
                raise NoFreeSlot(
                    f"LoRA adapter {ref.name!r} gets no slot: all are in use by running requests or pinned; "
                    "wait for a request to end, or raise max_num_loras"
                )
            tensors = self.fetch(ref)
            self._begin(ref, self._table.assign(ref), tensors)
        if ref in self._writes:
            self._write_on(ref, None)
        slot = self._table.use_slot(ref)
        if slot is None:
            raise KeyError(f"LoRA adapter {ref} was unloaded while it was being activated")
        return slot

    def fetch(self, ref: AdapterRef) -> M:
        """The adapter's tensors, read in this thread if they are nowhere in memory.

        Raises:
            KeyError: the generation is not loaded.
            AdapterLost: its files are gone or changed.
        """
        while (tensors := self._table.tensors_of(ref)) is None:
            record = self._table.reads.begin(ref)
            if record is not None:
                return self._read_again(ref, record)
            with self._read_ended:
                self._read_ended.wait_for(lambda: not self._table.reads.is_under_way(ref))
        return tensors

    def rewrite(self, bind: Callable[[list[tuple[int, M]]], None]) -> None:
        """Write every taken slot anew, all at once: `bind` is given the slots and what they hold.

        Raises:
            AdapterLost: the files of an adapter in a slot were needed, and are gone or changed.
        """
        residents = self._table.whereabouts.residents()
        bind([(slot, self.fetch(ref)) for slot, (ref, _) in residents.items()])
        self._writes.clear()
        for ref, _ in residents.values():
            self._table.finish_write(ref)

    @property
    def is_busy(self) -> bool:
        """Whether a slot is being written, or an adapter that is pinned or to be warmed up is on its way to one."""
        wanted = self._table.wanted
        return bool(self._unfinished()) or wanted.is_warming or bool(wanted.pinned_without_slot())

    @property
    def is_writing(self) -> bool:
        """Whether a slot is being written."""
        return bool(self._unfinished())

    def wait(self, timeout_s: float) -> None:
        """Return when a read has ended since the last call, or after the timeout."""
        with self._read_ended:
            self._read_ended.wait_for(lambda: self._num_ended != self._num_seen, timeout_s)
            self._num_seen = self._num_ended

    def check(self) -> None:
        """Assert, in the step thread, that every slot that is to be written has its write in progress."""
        self._table.check()
        unwritten = self._table.unwritten()
        assert unwritten <= self._writes.keys(), f"nobody writes the slots of {unwritten - self._writes.keys()}"

    # Slots

    def _unfinished(self) -> list[AdapterRef]:
        """Adapters whose slots are being written; those that were unloaded meanwhile are forgotten."""
        if self._writes:
            self._writes = {ref: write for ref, write in self._writes.items() if self._table.is_writing(ref)}
        return list(self._writes)

    def _warm_up(self) -> None:
        if self._unfinished() or (found := self._table.wanted.assign_warm_up()) is None:
            return
        try:
            self._begin(*found)
            self._write_in_time(found[0])
        except AdapterLost as error:
            logger.warning("warming up: %s", error)

    def _begin(self, ref: AdapterRef, slot: int, tensors: M) -> None:
        self._before_write()
        try:
            self._writes[ref] = _Write(self._begin_write(slot, tensors), self._clock())
        except Exception as error:
            raise self._fail_write(ref, error) from error
        self.num_slot_writes += 1

    def _write_in_time(self, ref: AdapterRef) -> bool:
        """Write until the slot is complete or the step's time is over."""
        deadline = self._deadline
        if deadline is None:
            return self._write_on(ref, None)
        if self._warm_up_deadline is not None and self._table.wanted.can_wait(ref):
            deadline = self._warm_up_deadline
        left_s = deadline - time.perf_counter()
        return left_s > 0 and self._write_on(ref, left_s)

    def _write_on(self, ref: AdapterRef, budget_s: float | None) -> bool:
        try:
            if not self._writes[ref].content.advance(budget_s):
                return False
        except Exception as error:
            del self._writes[ref]
            raise self._fail_write(ref, error) from error
        write = self._writes.pop(ref)
        self._note_write(ref, self._clock() - write.begun_s)
        self._table.finish_write(ref)
        return True

    def _note_write(self, ref: AdapterRef, seconds: float) -> None:
        record = self._table.record_of(ref)
        if record is not None:
            self._times.wrote(record.num_bytes, seconds, self._table.reads.take_seconds(ref))

    def _fail_write(self, ref: AdapterRef, error: Exception) -> AdapterLost:
        """Take back the slot that could not be written; returns what those who wait for it are to be told."""
        logger.error("writing LoRA adapter %r into a slot failed", ref.name, exc_info=error)
        lost = AdapterLost(
            f"LoRA adapter {ref.name!r} could not be written into a slot: {describe(error)}; "
            "unload it, or load it again once that is mended"
        )
        self._table.abandon_write(ref)
        return lost

    # Files

    def _next_read(self) -> tuple[AdapterRef, AdapterRecord] | None:
        with self._read_ended:
            job = self._table.reads.next()
            if job is not None:
                self._reads[job[0]] = self._clock()
            return job

    def _read_for_requests(self, job: tuple[AdapterRef, AdapterRecord]) -> None:
        # Told to those who wait, by the table.
        try:
            self._read_again(*job)
        except AdapterLost as error:
            logger.warning("%s", error)

    def _give_up_reads(self) -> None:
        """Hold up nobody for long with files that may never come, as from a dead mount.

        Other adapters wait for a read for seconds; its own requests do for `read_timeout_s`.
        """
        if not self._reads:
            return
        with self._read_ended:
            now_s = self._clock()
            for ref, begun_s in list(self._reads.items()):
                if now_s - begun_s <= self._read_timeout_s:
                    if now_s - begun_s > self._patience_s:
                        self._table.reads.step_aside(ref)
                    continue
                del self._reads[ref]
                reason = (
                    f"LoRA adapter {ref.name!r} is not in memory, and reading its files again has taken longer than "
                    f"{self._read_timeout_s:g} s and goes on; see what keeps them, or raise lora_config.read_timeout_s"
                )
                logger.warning("%s", reason)
                self._table.reads.give_up(ref, reason)

    def _read_again(self, ref: AdapterRef, record: AdapterRecord) -> M:
        """Read an adapter that `table` says is being read, and tell the table how it went."""
        begun_s = self._clock()
        try:
            tensors = self._read_same(ref, record)
        except BaseException as error:
            lost = error if isinstance(error, AdapterLost) else _lost(ref, record, describe(error))
            with self._end_read(ref):
                self._table.reads.fail(ref, lost)
            raise
        read_s = self._clock() - begun_s
        self._times.read(record.num_bytes, read_s)
        with self._end_read(ref):
            self._table.reads.end(ref, tensors, read_s)
        return tensors

    @contextmanager
    def _end_read(self, ref: AdapterRef) -> Iterator[None]:
        """Have the table told within the block, while nobody can begin to read it anew or give the read up."""
        with self._read_ended:
            self._reads.pop(ref, None)
            yield
            self._num_ended += 1
            self._read_ended.notify_all()

    def _read_same(self, ref: AdapterRef, record: AdapterRecord) -> M:
        try:
            found, tensors = self._read(ref.name, record.path)
        except (InvalidAdapterPath, InvalidAdapter) as error:
            raise _lost(ref, record, str(error)) from error
        except Exception as error:
            logger.exception("reading LoRA adapter %r again from %s failed", ref.name, record.path)
            raise _lost(ref, record, describe(error)) from error
        if found.content_hash != record.content_hash:
            hashes = f"content hash {found.content_hash[:12]}..., loaded were {record.content_hash[:12]}..."
            raise _lost(ref, record, f"other files are there now ({hashes})")
        return tensors


def _lost(ref: AdapterRef, record: AdapterRecord, found: str) -> AdapterLost:
    source = "" if str(record.path) in found else f" from {record.path}"
    return AdapterLost(
        f"LoRA adapter {ref.name!r} is not in memory, and could not be read again{source}: {found}; "
        "put its files back or load it again, in place (load_inplace) if they are meant to be other ones"
    )
