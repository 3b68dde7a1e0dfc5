"""The way of an adapter into a slot: read again if it left host memory, then written between steps."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from lora_core.adapter_record import AdapterRecord
from lora_core.adapters import AdapterTable, Readiness
from lora_core.errors import AdapterLost, InvalidAdapter, InvalidAdapterPath
from lora_core.slots import NoFreeSlot
from lora_core.types import AdapterRef

M = TypeVar("M")

logger = logging.getLogger(__name__)

NUM_READERS = 2
"""Threads that read adapters again, at most; each ends when there is nothing left to read."""


class SlotWrite(Protocol):
    """A slot's content on its way there."""

    def advance(self, budget_s: float | None) -> bool:
        """Write on for about so long, None: to the end. Whether the slot is now complete."""
        ...


class Staging(Generic[M]):
    """Moves adapters from their folders to host memory, and from there into slots.

    `prepare`, `advance`, `activate` and `rewrite` belong to one thread, the step thread; files are read by others.
    """

    def __init__(
        self,
        table: AdapterTable[M],
        read: Callable[[str, Path], tuple[AdapterRecord, M]],
        begin_write: Callable[[int, M], SlotWrite],
    ) -> None:
        """Stage the adapters of `table`.

        Args:
            table: Where they are.
            read: Reads and checks the adapter of a name in a folder; raises InvalidAdapterPath or InvalidAdapter.
            begin_write: Begins to make a slot hold exactly these tensors, instead of what was begun before.
        """
        self.num_slot_writes = 0
        """Slots that were assigned, and written, since the start."""
        self._table = table
        self._read = read
        self._begin_write = begin_write
        self._writes: dict[AdapterRef, SlotWrite] = {}
        # When the step thread has to stop writing in this step; None is never.
        self._deadline: float | None = None
        self._read_ended = threading.Condition()
        self._num_readers = 0
        self._num_ended = 0
        self._num_seen = 0

    def prepare(self, ref: AdapterRef, *, take_slot: bool = True) -> Readiness:
        """Bring an adapter nearer to a slot for a request that waits for it, without waiting for anything.

        A slot that it gets is written at once as far as the step's time allows. One slot is written at a time.

        Raises:
            KeyError: the generation is not loaded.
            AdapterLost: its tensors were needed, and its files are gone or changed; told once, then tried anew.
        """
        found = self._table.prepare(ref, take_slot=take_slot and not self._unfinished())
        if found.readiness is Readiness.READING:
            self._start_readers()
        if found.slot is None or found.tensors is None:
            return found.readiness
        self._begin(ref, found.slot, found.tensors)
        return Readiness.READY if self._write_in_time(ref) else Readiness.WRITING

    def advance(self, budget_s: float | None) -> None:
        """Begin a step: write on, and bring pinned adapters nearer to their slots.

        Args:
            budget_s: Seconds this step may spend on writing, `prepare` included; None: as long as it takes.
        """
        self._deadline = None if budget_s is None else time.perf_counter() + budget_s
        for ref in self._unfinished():
            self._write_in_time(ref)
        for ref in self._table.pinned_without_slot():
            try:
                self.prepare(ref)
            except KeyError:  # unloaded by another thread
                continue
            except AdapterLost as error:
                logger.warning("pinned: %s", error)
        self._start_readers()

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
            record = self._table.begin_read(ref)
            if record is not None:
                return self._read_again(ref, record)
            with self._read_ended:
                self._read_ended.wait_for(lambda: not self._table.is_reading(ref))
        return tensors

    def rewrite(self, bind: Callable[[list[tuple[int, M]]], None]) -> None:
        """Write every taken slot anew, all at once: `bind` is given the slots and what they hold.

        Raises:
            AdapterLost: the files of an adapter in a slot were needed, and are gone or changed.
        """
        residents = self._table.residents()
        bind([(slot, self.fetch(ref)) for slot, (ref, _) in residents.items()])
        self._writes.clear()
        for ref, _ in residents.values():
            self._table.finish_write(ref)

    @property
    def is_busy(self) -> bool:
        """Whether a slot is being written, or a pinned adapter is on its way to one."""
        return bool(self._unfinished()) or bool(self._table.pinned_without_slot())

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

    def _begin(self, ref: AdapterRef, slot: int, tensors: M) -> None:
        try:
            self._writes[ref] = self._begin_write(slot, tensors)
        except BaseException:
            self._table.abandon_write(ref)
            raise
        self.num_slot_writes += 1

    def _write_in_time(self, ref: AdapterRef) -> bool:
        """Write until the slot is complete or the step's time is over."""
        if self._deadline is None:
            return self._write_on(ref, None)
        left_s = self._deadline - time.perf_counter()
        return left_s > 0 and self._write_on(ref, left_s)

    def _write_on(self, ref: AdapterRef, budget_s: float | None) -> bool:
        try:
            if not self._writes[ref].advance(budget_s):
                return False
        except BaseException:
            del self._writes[ref]
            self._table.abandon_write(ref)
            raise
        del self._writes[ref]
        self._table.finish_write(ref)
        return True

    # Files

    def _start_readers(self) -> None:
        with self._read_ended:
            if self._num_readers >= NUM_READERS or not self._table.can_read():
                return
            self._num_readers += 1
        threading.Thread(target=self._read_all, name="lora-reader", daemon=True).start()

    def _read_all(self) -> None:
        try:
            while (job := self._table.next_read()) is not None:
                # Told to those who wait, by the table.
                try:
                    self._read_again(*job)
                except AdapterLost as error:
                    logger.warning("%s", error)
        finally:
            with self._read_ended:
                self._num_readers -= 1

    def _read_again(self, ref: AdapterRef, record: AdapterRecord) -> M:
        """Read an adapter that `table` says is being read, and tell the table how it went."""
        try:
            tensors = self._read_same(ref, record)
        except AdapterLost as error:
            self._table.fail_read(ref, error)
            raise
        except BaseException as error:
            self._table.fail_read(ref, _lost(ref, record, f"reading it failed: {type(error).__name__}"))
            raise
        else:
            self._table.end_read(ref, tensors)
            return tensors
        finally:
            with self._read_ended:
                self._num_ended += 1
                self._read_ended.notify_all()

    def _read_same(self, ref: AdapterRef, record: AdapterRecord) -> M:
        try:
            found, tensors = self._read(ref.name, record.path)
        except (InvalidAdapterPath, InvalidAdapter) as error:
            raise _lost(ref, record, str(error)) from error
        except Exception as error:
            logger.exception("reading LoRA adapter %r again from %s failed", ref.name, record.path)
            raise _lost(ref, record, f"{type(error).__name__}: {error}") from error
        if found.content_hash != record.content_hash:
            hashes = f"content hash {found.content_hash[:12]}..., loaded were {record.content_hash[:12]}..."
            raise _lost(ref, record, f"other files are there now ({hashes})")
        return tensors


def _lost(ref: AdapterRef, record: AdapterRecord, found: str) -> AdapterLost:
    source = "" if str(record.path) in found else f" from {record.path}"
    return AdapterLost(
        f"LoRA adapter {ref.name!r} is not in memory, and could not be read again{source}: {found}; "
        "put its files back or load it again, with replace if they are meant to be other ones"
    )
