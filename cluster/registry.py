"""Which adapters should be served, and the journal that remembers it.

Every change is one epoch; an adapter's generation is the epoch of its load, so a generation is never reused. A change
is committed to the journal before the method that makes it returns; `abandon_load` alone does without.
"""

import bisect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from cluster.fingerprint import folder_fingerprint, is_changed
from cluster.journal import AdapterRow, Journal
from lora_core.errors import AdapterNameTaken, AdapterNotFound
from lora_core.types import LoRAOperation, LoRARequest

logger = logging.getLogger(__name__)

MAX_CHANGES_KEPT = 10_000
"""Changes kept for replicas that are behind; one further behind registers again."""

EntryState = Literal["loading", "ready", "unloading"]


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One desired adapter."""

    name: str
    path: str
    generation: int
    """Epoch of its load."""
    state: EntryState
    static: bool = False
    """Named by the configuration (`lora_paths`) rather than loaded at run time."""
    epoch: int = 0
    """Epoch of its last change."""
    fingerprint: str | None = None
    """`folder_fingerprint` of `path` when its load began; None where unknown."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the desired state, as replicas apply it."""

    epoch: int
    request: LoRARequest
    """Carries the generation: a load gives it to the adapter, an unload names the one to drop."""
    static: bool = False
    """A static adapter that cannot be loaded is a fault of the configuration: a starting replica should not start."""


class AdapterRegistry:
    """The desired adapters.

    At start the journal is read back. An adapter found loading there was never acknowledged to anyone: it is dropped,
    its name is free, and replicas that hold it are told to unload it when they register. One found unloading is gone.
    Then the configuration is merged: a static adapter with the journalled path keeps its generation, another path
    replaces it, and one the configuration no longer names is dropped. A static adapter unloaded at run time stays
    unloaded when the router restarts within the same run, and returns with the next one.

    Fingerprints are kept over a restart within the same run, whose replicas hold the files of then. The replicas of a
    new run load the files of now: an adapter whose files changed in between gets a new generation there.

    Args:
        journal: SQLite file; unset keeps everything in memory.
        static: name -> path of the configuration's adapters.
        run: Names the deployment this router belongs to; a restarted router has the same one.

    Raises:
        ConfigError: the journal cannot be used.
    """

    def __init__(self, journal: Path | None = None, *, static: Mapping[str, str] | None = None, run: str = "") -> None:
        self._journal = Journal(journal)
        self._entries: dict[str, AdapterEntry] = {}
        self._changes: list[Change] = []
        self._restore()
        self._merge_static(static or {}, run)
        self._horizon = self._epoch = self._journal.epoch

    @property
    def epoch(self) -> int:
        """Epoch of the last change."""
        return self._epoch

    @property
    def entries(self) -> Mapping[str, AdapterEntry]:
        """All entries by name, whatever their state."""
        return self._entries

    def ready(self) -> dict[str, AdapterEntry]:
        """The adapters that can be asked for."""
        return {name: entry for name, entry in self._entries.items() if entry.state == "ready"}

    def begin_load(self, name: str, path: str, fingerprint: str | None = None) -> Change | None:
        """Start loading an adapter; None where it is ready from this path already.

        Args:
            name: What requests will call it.
            path: Where replicas find it.
            fingerprint: `folder_fingerprint` of `path` as it is now; None where unknown.

        Raises:
            AdapterNameTaken: the name belongs to an adapter from another path, from other files that were at this
                path, or one that is being changed.
        """
        entry = self._entries.get(name)
        if entry is not None and (entry.path, entry.state) == (path, "ready"):
            if is_changed(entry.fingerprint, fingerprint):
                raise AdapterNameTaken(
                    f"adapter {name!r} is loaded from {path!r}, whose files have changed since; "
                    "unload it first to serve the new ones"
                )
            return None
        if entry is not None:
            state = f"is {entry.state}" if entry.state != "ready" else "is loaded"
            raise AdapterNameTaken(
                f"adapter {name!r} {state} from {entry.path!r}, asked for {path!r}; "
                "unload it first, or use another name"
            )
        with self._journal.transaction() as write:
            epoch = write.next_epoch(self._epoch)
            entry = AdapterEntry(
                name=name, path=path, generation=epoch, state="loading", epoch=epoch, fingerprint=fingerprint
            )
            write.put(_row(entry))
        self._entries[name] = entry
        return self._record(epoch, _load(entry))

    def commit_load(self, name: str) -> AdapterEntry:
        """Make a loading adapter ready."""
        entry = self._entries[name]
        assert entry.state == "loading", f"{name!r} is {entry.state}"
        entry = msgspec.structs.replace(entry, state="ready")
        with self._journal.transaction() as write:
            write.put(_row(entry))
        self._entries[name] = entry
        return entry

    def rollback_load(self, name: str) -> Change:
        """Undo a load: replicas are told to unload, and the name is free."""
        change = self._withdraw(name)
        del self._entries[name]
        return change

    def abandon_load(self, name: str) -> Change:
        """Undo a load as `rollback_load` does, where the journal cannot be written.

        The journal is left with an adapter that is loading, which the name's next load replaces and a restart drops.
        """
        entry = self._entries.pop(name)
        assert entry.state == "loading", f"{name!r} is {entry.state}"
        # The journal's next epoch comes after this one. A restart before that gives it out again, and not as the
        # generation of anything a replica still holds: it is an unload's.
        return self._record(self._epoch + 1, _unload(entry))

    def begin_unload(self, name: str) -> Change:
        """Stop serving an adapter. Its name is free after `finish_unload`.

        Raises:
            AdapterNotFound: no such adapter, or it is unloading already.
        """
        entry = self._entries.get(name)
        if entry is None or entry.state == "unloading":
            raise AdapterNotFound(f"no adapter named {name!r} is loaded; loaded: {', '.join(sorted(self.ready()))}")
        change = self._withdraw(name)
        self._entries[name] = msgspec.structs.replace(entry, state="unloading", epoch=change.epoch)
        return change

    def finish_unload(self, name: str) -> None:
        """Forget an unloading adapter."""
        assert self._entries[name].state == "unloading", f"{name!r} is {self._entries[name].state}"
        del self._entries[name]

    def changes_since(self, epoch: int) -> list[Change] | None:
        """Changes later than `epoch`, oldest first; None where they are no longer known."""
        if not self._horizon <= epoch <= self._epoch:
            return None
        return self._changes[bisect.bisect_right(self._changes, epoch, key=lambda change: change.epoch) :]

    def catch_up(self, holding: Mapping[str, int]) -> list[Change]:
        """What turns a replica that holds these generations (by name) into one that has applied every change.

        Unloads come first. Adapters still loading are included, those unloading are not.
        """
        wanted = {name: entry for name, entry in self._entries.items() if entry.state != "unloading"}
        missing = sorted(
            (entry for name, entry in wanted.items() if holding.get(name) != entry.generation),
            key=lambda entry: entry.epoch,
        )
        # When these adapters were unloaded may be forgotten; what counts is that epochs rise along the list.
        before = missing[0].epoch - 1 if missing else self._epoch
        drop = {name: held for name, held in holding.items() if name not in wanted or wanted[name].generation != held}
        unloads = [
            Change(epoch=before, request=LoRARequest(LoRAOperation.UNLOAD, name, generation=generation))
            for name, generation in drop.items()
        ]
        return unloads + [Change(epoch=entry.epoch, request=_load(entry), static=entry.static) for entry in missing]

    def close(self) -> None:
        """Close the journal; the registry is unusable afterwards."""
        self._journal.close()

    def _withdraw(self, name: str) -> Change:
        """Take an adapter out of the journal: from here on a restart does not bring it back."""
        entry = self._entries[name]
        with self._journal.transaction() as write:
            epoch = write.next_epoch(self._epoch)
            write.remove(name)
            if entry.static:
                write.withdraw(name)
        return self._record(epoch, _unload(entry))

    def _record(self, epoch: int, request: LoRARequest) -> Change:
        change = Change(epoch=epoch, request=request)
        self._epoch = epoch
        self._changes.append(change)
        # Cut by halves, so that the cost of a cut is spread over many changes.
        if len(self._changes) > MAX_CHANGES_KEPT:
            dropped = len(self._changes) // 2
            self._horizon = self._changes[dropped - 1].epoch
            del self._changes[:dropped]
        return change

    def _restore(self) -> None:
        for row in self._journal.adapters():
            if row.state == "ready":
                self._entries[row.name] = AdapterEntry(
                    name=row.name,
                    path=row.path,
                    generation=row.generation,
                    state="ready",
                    static=row.static,
                    epoch=row.generation,
                    fingerprint=row.fingerprint,
                )
                continue
            logger.warning("adapter %r was still loading when the router stopped: dropped, load it again", row.name)
            with self._journal.transaction() as write:
                write.remove(row.name)

    def _renew_fingerprints(self) -> None:
        """Note what a new run's replicas will load; files that changed make a new generation."""
        for entry in list(self._entries.values()):
            found = folder_fingerprint(entry.path)
            if found is None or found == entry.fingerprint:
                continue
            renewed = msgspec.structs.replace(entry, fingerprint=found)
            with self._journal.transaction() as write:
                if is_changed(entry.fingerprint, found):
                    logger.warning(
                        "adapter %r: the files in %r have changed since it was loaded; this run serves the new ones",
                        entry.name,
                        entry.path,
                    )
                    epoch = write.next_epoch()
                    renewed = msgspec.structs.replace(renewed, generation=epoch, epoch=epoch)
                write.put(_row(renewed))
            self._entries[entry.name] = renewed

    def _merge_static(self, static: Mapping[str, str], run: str) -> None:
        new_run = run != self._journal.run
        withdrawn = set() if new_run else self._journal.withdrawn()
        for name in [name for name, entry in self._entries.items() if entry.static and name not in static]:
            logger.warning("adapter %r is no longer in lora_paths: dropped", name)
            with self._journal.transaction() as write:
                write.remove(name)
            del self._entries[name]
        for name, path in static.items():
            if name not in withdrawn:
                self._set_static(name, path)
        if new_run:
            self._renew_fingerprints()
            # Last, so that a start that is cut short is still a new run when it is tried again.
            with self._journal.transaction() as write:
                write.begin_run(run)

    def _set_static(self, name: str, path: str) -> None:
        entry = self._entries.get(name)
        if entry is not None and entry.path != path:
            logger.warning("adapter %r: lora_paths says %r, which replaces %r from the journal", name, path, entry.path)
            entry = None
        fingerprint = folder_fingerprint(path) if entry is None else entry.fingerprint
        with self._journal.transaction() as write:
            generation = write.next_epoch() if entry is None else entry.generation
            entry = AdapterEntry(
                name=name,
                path=path,
                generation=generation,
                state="ready",
                static=True,
                epoch=generation,
                fingerprint=fingerprint,
            )
            write.put(_row(entry))
        self._entries[name] = entry


def _row(entry: AdapterEntry) -> AdapterRow:
    return AdapterRow(entry.name, entry.path, entry.generation, entry.state, entry.static, entry.fingerprint)


def _load(entry: AdapterEntry) -> LoRARequest:
    return LoRARequest(LoRAOperation.LOAD, entry.name, entry.path, entry.generation)


def _unload(entry: AdapterEntry) -> LoRARequest:
    return LoRARequest(LoRAOperation.UNLOAD, entry.name, generation=entry.generation)
