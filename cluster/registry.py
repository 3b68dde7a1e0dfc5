"""Which adapters should be served, and the journal that remembers it.

Every change is one epoch; an adapter's generation is the epoch of its load, so a generation is never reused. A change
is committed to the journal before the method that makes it returns; only what undoes or repeats one does without.
"""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from cluster.changes import Change, ChangeLog
from cluster.entry import AdapterEntry
from cluster.fingerprint import folder_fingerprint, is_changed, is_unchanged
from cluster.journal import Journal, JournalWriter
from cluster.names import staged_name
from lora_core.errors import AdapterError, AdapterNameTaken, AdapterNotFound, LoRAFleetError
from lora_core.types import LoadReport, LoRAOperation, LoRARequest

logger = logging.getLogger(__name__)


class AdapterRegistry:
    """The desired adapters.

    At start the journal is read back. An adapter found loading there was never acknowledged to anyone: it is dropped,
    its name is free, and replicas that hold it are told to unload it when they register. One found unloading is gone.
    One that was being replaced is what it was before, or what replaced it, never between. Then the configuration is
    merged: a static adapter with the journalled path keeps its generation, another path replaces it, and one the
    configuration no longer names is dropped. A static adapter that was unloaded, or replaced from another path, at run
    time stays so when the router restarts within the same run, and is the configuration's again with the next one.

    What replicas hold outlasts a restart within the same run, and so do the fingerprints and hashes of it. The replicas
    of a new run load the files of now: an adapter whose files changed in between gets a new generation there.

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
        self._reports: dict[str, bytes] = {}
        self._restore()
        self._merge_static(static or {}, run)
        self._log = ChangeLog(self._journal.epoch)

    @property
    def epoch(self) -> int:
        """Epoch of the last change."""
        return self._log.epoch

    @property
    def entries(self) -> Mapping[str, AdapterEntry]:
        """All entries by name, whatever their state."""
        return self._entries

    def ready(self) -> dict[str, AdapterEntry]:
        """The adapters that can be asked for."""
        return {name: entry for name, entry in self._entries.items() if entry.state == "ready"}

    def report(self, name: str) -> LoadReport | None:
        """What the load of an adapter's generation found; None where it is not known."""
        found = self._reports.get(name)
        try:
            return None if found is None else msgspec.json.decode(found, type=LoadReport)
        except msgspec.MsgspecError:
            # Written by a version that reports other things.
            return None

    # Loading

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
                    "send load_inplace: true to serve the new ones, or unload it first"
                )
            return None
        if entry is not None:
            state = f"is {entry.state}" if entry.state != "ready" else "is loaded"
            raise AdapterNameTaken(
                f"adapter {name!r} {state} from {entry.path!r}, asked for {path!r}; "
                "unload it first, send load_inplace: true to replace it, or use another name"
            )
        with self._journal.transaction() as write:
            epoch = write.next_epoch(self.epoch)
            entry = AdapterEntry(
                name=name, path=path, generation=epoch, state="loading", epoch=epoch, fingerprint=fingerprint
            )
            write.put(entry.row())
        self._entries[name] = entry
        return self._record(epoch, entry.load_request())

    def commit_load(self, name: str, report: LoadReport | None = None) -> AdapterEntry:
        """Make a loading adapter ready, as the content that `report` names."""
        entry = self._entries[name]
        assert entry.state == "loading", f"{name!r} is {entry.state}"
        content_hash = None if report is None else report.content_hash
        entry = msgspec.structs.replace(entry, state="ready", content_hash=content_hash)
        with self._journal.transaction() as write:
            self._put(write, entry, report)
        self._set(entry, report)
        return entry

    def rollback_load(self, name: str) -> Change:
        """Undo a load: replicas are told to unload, and the name is free."""
        change = self._withdraw(name)
        self._forget(name)
        return change

    def abandon_load(self, name: str) -> Change:
        """Undo a load as `rollback_load` does, where the journal cannot be written.

        The journal is left with an adapter that is loading, which the name's next load replaces and a restart drops.
        """
        entry = self._entries[name]
        assert entry.state == "loading", f"{name!r} is {entry.state}"
        self._forget(name)
        return self._record(self._next_unwritten(), entry.unload_request())

    def repeat_load(self, name: str) -> Change:
        """Ask for a ready adapter once more: replicas that have it do nothing, those that refused it try again."""
        return self._record(self._next_unwritten(), self._entries[name].load_request())

    def note_content(self, name: str, report: LoadReport) -> None:
        """Note what a ready adapter is, as its first replica found it. Later ones must find the same."""
        entry = self._entries[name]
        assert entry.content_hash is None, f"{name!r} is known as {entry.content_hash}"
        entry = msgspec.structs.replace(entry, content_hash=report.content_hash)
        try:
            with self._journal.transaction() as write:
                self._put(write, entry, report)
        except LoRAFleetError as error:
            # It holds for this router all the same; the next one finds it out again.
            logger.warning("adapter %r: its content hash was not journalled: %s", name, error)
        self._set(entry, report)

    # Replacing

    def begin_replace(self, name: str, path: str, fingerprint: str | None = None) -> Change | None:
        """Start loading what is to take the place of an adapter, beside it, as `staged_name(name)`.

        `commit_load` never follows, but `commit_replace`, `keep_content`, or what undoes a load. None where the files
        at `path` are known to be those that are served. Where nothing has the name, this is `begin_load`, whose
        arguments it takes.

        Raises:
            AdapterNameTaken: the adapter is being changed.
        """
        entry = self._entries.get(name)
        if entry is None or entry.state != "ready":
            return self.begin_load(name, path, fingerprint)
        if entry.path == path and is_unchanged(entry.fingerprint, fingerprint):
            return None
        return self.begin_load(staged_name(name), path, fingerprint)

    def commit_replace(self, name: str, report: LoadReport | None) -> Change:
        """Serve what is staged, as a new generation; replicas have it, and are told to swap.

        Requests need not wait for that before `finish_replace`: a replica may have slow loads of others to do first.
        """
        entry, staged = self._entries[name], self._entries[staged_name(name)]
        with self._journal.transaction() as write:
            epoch = write.next_epoch(self.epoch)
            new = msgspec.structs.replace(
                entry,
                path=staged.path,
                generation=epoch,
                fingerprint=staged.fingerprint,
                content_hash=None if report is None else report.content_hash,
                static=entry.static and entry.path == staged.path,
            )
            if report is not None:
                report = msgspec.structs.replace(report, generation=epoch)
            write.remove(staged.name)
            self._put(write, new, report, was_static=entry.static)
        self._entries[staged.name] = msgspec.structs.replace(staged, state="unloading")
        self._set(new, report)
        return self._record(epoch, new.load_request(replace=True))

    def finish_replace(self, name: str) -> Change:
        """Have replicas drop what was staged, and requests see what has replaced it."""
        entry, staged = self._entries[name], self._entries[staged_name(name)]
        self._entries[name] = msgspec.structs.replace(entry, epoch=entry.generation)
        self._forget(staged.name)
        return self._record(self._next_unwritten(), staged.unload_request())

    def keep_content(self, name: str) -> AdapterEntry:
        """Note where the content that is served is found now: what was staged proved to be the same."""
        entry, staged = self._entries[name], self._entries[staged_name(name)]
        is_static = entry.static and entry.path == staged.path
        kept = msgspec.structs.replace(entry, path=staged.path, fingerprint=staged.fingerprint, static=is_static)
        report = self.report(name)
        with self._journal.transaction() as write:
            self._put(write, kept, report, was_static=entry.static)
        self._set(kept, report)
        return kept

    # Pinning

    def set_pin(self, name: str, pinned: bool, most: int | None = None) -> Change | None:
        """Keep an adapter in a slot of every replica, or no longer; None where it is so already.

        Args:
            name: The adapter.
            pinned: What it is to be.
            most: Most adapters that may be pinned; None where unknown.

        Raises:
            AdapterNotFound: no such adapter.
            AdapterError: `most` are pinned already; both numbers are named.
        """
        entry = self._entries.get(name)
        if entry is None or entry.state != "ready":
            raise self._not_found(name)
        if entry.pinned == pinned:
            return None
        count = 1 + sum(other.pinned for other in self._entries.values())
        if pinned and most is not None and count > most:
            raise AdapterError(
                f"adapter {name!r} was not pinned: with it {count} adapter(s) would be, and at most {most} can "
                f"(lora_config.max_num_loras is {most + 1}, one slot stays free for the others); "
                "unpin another one, or raise max_num_loras"
            )
        entry = msgspec.structs.replace(entry, pinned=pinned)
        with self._journal.transaction() as write:
            epoch = write.next_epoch(self.epoch)
            self._put(write, entry, self.report(name))
        self._entries[name] = entry
        return self._record(epoch, entry.pin_request())

    def repeat_pin(self, name: str) -> Change | None:
        """Ask for a pin once more, of replicas that could not load the adapter before; None where it is not pinned."""
        entry = self._entries[name]
        return self._record(self._next_unwritten(), entry.pin_request()) if entry.pinned else None

    # Unloading

    def begin_unload(self, name: str) -> Change:
        """Stop serving an adapter. Its name is free after `finish_unload`.

        Raises:
            AdapterNotFound: no such adapter, or it is unloading already.
        """
        entry = self._entries.get(name)
        if entry is None or entry.state == "unloading":
            raise self._not_found(name)
        change = self._withdraw(name)
        self._entries[name] = msgspec.structs.replace(entry, state="unloading", epoch=change.epoch, pinned=False)
        return change

    def finish_unload(self, name: str) -> None:
        """Forget an unloading adapter."""
        assert self._entries[name].state == "unloading", f"{name!r} is {self._entries[name].state}"
        self._forget(name)

    # For replicas

    def changes_since(self, epoch: int) -> list[Change] | None:
        """Changes later than `epoch`, oldest first; None where they are no longer known."""
        return self._log.since(epoch)

    def catch_up(self, holding: Mapping[str, int], pinned: Collection[str] = ()) -> list[Change]:
        """What turns a replica that holds these generations (by name) into one that has applied every change.

        Unloads come first, then loads, which take the place of other generations at once, then pins. Adapters still
        loading are included, those unloading are not.
        """
        wanted = {name: entry for name, entry in self._entries.items() if entry.state != "unloading"}
        missing = sorted(
            (entry for name, entry in wanted.items() if holding.get(name) != entry.generation),
            key=lambda entry: entry.generation,
        )
        # When these adapters were unloaded may be forgotten; what counts is that epochs rise along the list.
        before = missing[0].generation - 1 if missing else self.epoch
        unloads = [
            Change(epoch=before, request=LoRARequest(LoRAOperation.UNLOAD, name, generation=generation))
            for name, generation in holding.items()
            if name not in wanted
        ]
        lost = {entry.name for entry in missing if entry.name not in holding}
        pins = [
            Change(epoch=self.epoch, request=entry.pin_request())
            for name, entry in wanted.items()
            if entry.pinned != (name in pinned and name not in lost)
        ]
        loads = [
            Change(
                epoch=entry.generation,
                request=entry.load_request(replace=entry.name in holding),
                static=entry.static,
            )
            for entry in missing
        ]
        return unloads + loads + pins

    def close(self) -> None:
        """Close the journal; the registry is unusable afterwards."""
        self._journal.close()

    # Inside

    def _not_found(self, name: str) -> AdapterNotFound:
        loaded = ", ".join(sorted(self.ready())) or "none"
        return AdapterNotFound(f"no adapter named {name!r} is loaded; loaded: {loaded}")

    def _put(
        self, write: JournalWriter, entry: AdapterEntry, report: LoadReport | None, was_static: bool = False
    ) -> None:
        write.put(entry.row(None if report is None else msgspec.json.encode(report)))
        if was_static and not entry.static:
            write.withdraw(entry.name)

    def _set(self, entry: AdapterEntry, report: LoadReport | None) -> None:
        self._entries[entry.name] = entry
        self._reports.pop(entry.name, None)
        if report is not None:
            self._reports[entry.name] = msgspec.json.encode(report)

    def _forget(self, name: str) -> None:
        del self._entries[name]
        self._reports.pop(name, None)

    def _withdraw(self, name: str) -> Change:
        """Take an adapter out of the journal: from here on a restart does not bring it back."""
        entry = self._entries[name]
        with self._journal.transaction() as write:
            epoch = write.next_epoch(self.epoch)
            write.remove(name)
            if entry.static:
                write.withdraw(name)
        return self._record(epoch, entry.unload_request())

    def _next_unwritten(self) -> int:
        """An epoch that the journal does not know of: its own next one comes after it.

        A restart before that gives it out again, and not as the generation of anything a replica still holds.
        """
        return self.epoch + 1

    def _record(self, epoch: int, request: LoRARequest) -> Change:
        return self._log.record(Change(epoch=epoch, request=request))

    def _restore(self) -> None:
        for row in self._journal.adapters():
            if row.state == "ready":
                self._entries[row.name] = AdapterEntry.restored(row)
                if row.report is not None:
                    self._reports[row.name] = row.report
                continue
            logger.warning("adapter %r was still loading when the router stopped: dropped, load it again", row.name)
            with self._journal.transaction() as write:
                write.remove(row.name)

    def _renew_content(self) -> None:
        """Note what a new run's replicas will load; files that changed make a new generation."""
        for entry in list(self._entries.values()):
            found = folder_fingerprint(entry.path)
            if is_unchanged(entry.fingerprint, found):
                continue
            # Whether the files are those of then is not known, or known not to be so.
            renewed = msgspec.structs.replace(entry, fingerprint=found or entry.fingerprint, content_hash=None)
            with self._journal.transaction() as write:
                if is_changed(entry.fingerprint, found):
                    logger.warning(
                        "adapter %r: the files in %r have changed since it was loaded; this run serves the new ones",
                        entry.name,
                        entry.path,
                    )
                    epoch = write.next_epoch()
                    renewed = msgspec.structs.replace(renewed, generation=epoch, epoch=epoch)
                write.put(renewed.row())
            self._entries[entry.name] = renewed
            self._reports.pop(entry.name, None)

    def _merge_static(self, static: Mapping[str, str], run: str) -> None:
        new_run = run != self._journal.run
        withdrawn = set() if new_run else self._journal.withdrawn()
        for name in [name for name, entry in self._entries.items() if entry.static and name not in static]:
            logger.warning("adapter %r is no longer in lora_paths: dropped", name)
            with self._journal.transaction() as write:
                write.remove(name)
            self._forget(name)
        for name, path in static.items():
            if name not in withdrawn:
                self._set_static(name, path)
        if new_run:
            self._renew_content()
            # Last, so that a start that is cut short is still a new run when it is tried again.
            with self._journal.transaction() as write:
                write.begin_run(run)

    def _set_static(self, name: str, path: str) -> None:
        entry = self._entries.get(name)
        if entry is not None and entry.path != path:
            logger.warning("adapter %r: lora_paths says %r, which replaces %r from the journal", name, path, entry.path)
            self._forget(name)
            entry = None
        with self._journal.transaction() as write:
            if entry is None:
                epoch = write.next_epoch()
                entry = AdapterEntry(
                    name=name,
                    path=path,
                    generation=epoch,
                    state="ready",
                    epoch=epoch,
                    fingerprint=folder_fingerprint(path),
                )
            entry = msgspec.structs.replace(entry, static=True)
            self._put(write, entry, self.report(name))
        self._entries[name] = entry
