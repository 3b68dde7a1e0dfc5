"""Which adapters should be served, and the journal that remembers it.

Every change is one epoch; an adapter's generation is the epoch of its load, so a generation is never reused. A change
is committed to the journal before the method that makes it returns; only what undoes or repeats one does without.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from cluster.adapter_book import AdapterBook
from cluster.aliases import AliasBook
from cluster.catch_up import catch_up
from cluster.changes import Change, ChangeLog
from cluster.entry import AdapterEntry
from cluster.fingerprint import is_changed, is_unchanged
from cluster.fleet import Alias
from cluster.journal import Journal
from cluster.names import nearest, staged_name
from cluster.restored import restore
from lora_core.errors import AdapterError, AdapterNameTaken, AdapterNotFound, LoRAFleetError
from lora_core.types import LoadReport, LoRARequest

logger = logging.getLogger(__name__)


class AdapterRegistry:
    """The desired adapters, and the aliases that stand for them.

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
        restored = restore(self._journal, static or {}, run)
        self.is_resumed = restored.is_resumed
        """Whether a router of this run has used the journal before: its replicas may be there."""
        self._book = AdapterBook(self._journal, restored)
        self.aliases = AliasBook(self._journal, self._book.served)
        self._log = ChangeLog(self._journal.epoch)
        self.on_change: Callable[[Change], None] = lambda change: None
        """Called with each change of adapters, before the method that makes it returns."""
        self.on_replaced: Callable[[str], None] = lambda run: None
        """Called when a change is refused because a router of this run has opened the journal since."""
        self._journal.on_replaced = lambda run: self.on_replaced(run)

    @property
    def epoch(self) -> int:
        """Epoch of the last change."""
        return self._log.epoch

    @property
    def entries(self) -> Mapping[str, AdapterEntry]:
        """All entries by name, whatever their state."""
        return self._book.entries

    @property
    def served(self) -> Mapping[str, AdapterEntry]:
        """The adapters that can be asked for: a live view."""
        return self._book.served

    @property
    def changed(self) -> set[str]:
        """Names of adapters that are served otherwise than before; emptied by whoever reads it."""
        return self._book.changed

    def ready(self) -> dict[str, AdapterEntry]:
        """The adapters that can be asked for, as they are now."""
        return dict(self._book.served)

    def report(self, name: str) -> LoadReport | None:
        """What the load of an adapter's generation found; None where it is not known."""
        return self._book.report(name)

    # Loading

    def begin_load(self, name: str, path: str, fingerprint: str | None = None) -> Change | None:
        """Start loading an adapter; None where it is ready from this path already.

        Args:
            name: What requests will call it.
            path: Where replicas find it.
            fingerprint: `folder_fingerprint` of `path` as it is now; None where unknown.

        Raises:
            AdapterNameTaken: the name belongs to an adapter from another path, from other files that were at this
                path, or one that is being changed; or to an alias.
        """
        entry = self.entries.get(name)
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
        if self.aliases.get(name) is not None:
            raise AdapterNameTaken(f"{name!r} is an alias; remove it first, or use another name for the adapter")
        with self._journal.transaction() as write:
            epoch = write.next_epoch(self.epoch)
            entry = AdapterEntry(
                name=name,
                path=path,
                generation=epoch,
                state="loading",
                epoch=epoch,
                fingerprint=fingerprint,
                created=int(time.time()),
            )
            write.put(entry.row())
        self._book.set(entry)
        return self._record(epoch, entry.load_request())

    def commit_load(self, name: str, report: LoadReport | None = None) -> AdapterEntry:
        """Make a loading adapter ready, as the content that `report` names."""
        entry = self.entries[name]
        assert entry.state == "loading", f"{name!r} is {entry.state}"
        entry = msgspec.structs.replace(entry.as_loaded(report), state="ready")
        self._book.keep(entry, report)
        return entry

    def rollback_load(self, name: str) -> Change:
        """Undo a load: replicas are told to unload, and the name is free."""
        entry = self.entries[name]
        epoch = self._book.withdraw(name, self.epoch)
        self._book.forget(name)
        return self._record(epoch, entry.unload_request())

    def abandon_load(self, name: str) -> Change:
        """Undo a load as `rollback_load` does, where the journal cannot be written.

        The journal is left with an adapter that is loading, which the name's next load replaces and a restart drops.
        """
        entry = self.entries[name]
        assert entry.state == "loading", f"{name!r} is {entry.state}"
        self._book.forget(name)
        return self._record(self._next_unwritten(), entry.unload_request())

    def repeat_load(self, name: str, only: Collection[str]) -> Change:
        """Ask these replicas for a ready adapter once more, and to pin it where it is pinned; returns the load."""
        change = self._record(self._next_unwritten(), self.entries[name].load_request(), only)
        if self.entries[name].pinned:
            self.repeat_pin(name, only)
        return change

    def note_content(self, name: str, report: LoadReport) -> None:
        """Note what a ready adapter is, as its first replica found it. Later ones must find the same."""
        entry = self.entries[name]
        assert entry.content_hash is None, f"{name!r} is known as {entry.content_hash}"
        entry = entry.as_loaded(report)
        try:
            self._book.keep(entry, report)
        except LoRAFleetError as error:
            # It holds for this router all the same; the next one asks for it again.
            logger.warning("adapter %r: its content hash was not journalled: %s", name, error)
            self._book.set_loaded(entry, report)

    # Replacing

    def begin_replace(self, name: str, path: str, fingerprint: str | None = None) -> Change | None:
        """Start loading what is to take the place of an adapter, beside it, as `staged_name(name)`.

        `commit_load` never follows, but `commit_replace`, `keep_content`, or what undoes a load. None where the files
        at `path` are known to be those that are served. Where nothing has the name, this is `begin_load`, whose
        arguments it takes.

        Raises:
            AdapterNameTaken: the adapter is being changed, or the name is an alias.
        """
        entry = self.entries.get(name)
        if entry is None or entry.state != "ready":
            return self.begin_load(name, path, fingerprint)
        if entry.path == path and is_unchanged(entry.fingerprint, fingerprint):
            return None
        return self.begin_load(staged_name(name), path, fingerprint)

    def commit_replace(self, name: str, report: LoadReport | None) -> Change:
        """Serve what is staged, as a new generation; replicas have it, and are told to swap.

        Requests need not wait for that before `finish_replace`: a replica may have slow loads of others to do first.
        """
        entry, staged = self.entries[name], self.entries[staged_name(name)]
        with self._journal.transaction() as write:
            epoch = write.next_epoch(self.epoch)
            new = msgspec.structs.replace(
                entry.as_loaded(report),
                path=staged.path,
                generation=epoch,
                fingerprint=staged.fingerprint,
                static=entry.static and entry.path == staged.path,
                created=staged.created,
            )
            if report is not None:
                report = msgspec.structs.replace(report, generation=epoch)
            write.remove(staged.name)
            self._book.put(write, new, report)
        self._book.set(msgspec.structs.replace(staged, state="unloading"))
        self._book.set_loaded(new, report)
        return self._record(epoch, new.load_request(replace=True))

    def finish_replace(self, name: str) -> Change:
        """Have replicas drop what was staged, and requests see what has replaced it."""
        entry, staged = self.entries[name], self.entries[staged_name(name)]
        self._book.set(msgspec.structs.replace(entry, epoch=entry.generation))
        self._book.forget(staged.name)
        return self._record(self._next_unwritten(), staged.unload_request())

    def keep_content(self, name: str) -> AdapterEntry:
        """Note where the content that is served is found now: what was staged proved to be the same."""
        entry, staged = self.entries[name], self.entries[staged_name(name)]
        is_static = entry.static and entry.path == staged.path
        kept = msgspec.structs.replace(entry, path=staged.path, fingerprint=staged.fingerprint, static=is_static)
        self._book.keep(kept, self.report(name))
        return kept

    # Slots

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
        entry = self._ready_entry(name)
        if entry.pinned == pinned:
            return None
        count = 1 + sum(other.pinned for other in self.entries.values())
        if pinned and most is not None and count > most:
            raise AdapterError(
                f"adapter {name!r} was not pinned: with it {count} adapter(s) would be, and at most {most} can "
                f"(lora_config.max_num_loras is {most + 1}, one slot stays free for the others); "
                "unpin another one, or raise max_num_loras"
            )
        entry = msgspec.structs.replace(entry, pinned=pinned)
        return self._record(self._book.update(entry, self.epoch), entry.pin_request())

    def repeat_pin(self, name: str, only: Collection[str] = ()) -> Change:
        """Ask these replicas, or all, once more to pin an adapter, or to unpin it, as it is to be."""
        return self._record(self._next_unwritten(), self.entries[name].pin_request(), only)

    def set_min_copies(self, name: str, min_copies: int) -> AdapterEntry:
        """Change how many replicas should have an adapter in a slot at least. Raises AdapterNotFound."""
        entry = self._ready_entry(name)
        if entry.min_copies != min_copies:
            entry = msgspec.structs.replace(entry, min_copies=min_copies)
            self._log.advance(self._book.update(entry, self.epoch))
        return entry

    # Aliases

    def set_alias(self, name: str, weights: Mapping[str, float]) -> Alias:
        """Point an alias at weighted adapters, see `AliasBook.set`. Raises AdapterNameTaken, InvalidRequest."""
        if name in self.entries:
            raise AdapterNameTaken(f"{name!r} is an adapter; unload it first, or use another name for the alias")
        return self._noted(self.aliases.set(name, weights, self.epoch))

    def roll_back_alias(self, name: str) -> Alias:
        """Point an alias at what it stood for before; returns and raises as `AliasBook.roll_back` does."""
        return self._noted(self.aliases.roll_back(name, self.epoch))

    def remove_alias(self, name: str) -> int:
        """Forget an alias; returns the epoch. Raises AdapterNotFound."""
        epoch = self.aliases.remove(name, self.epoch)
        self._log.advance(epoch)
        return epoch

    # Unloading

    def begin_unload(self, name: str) -> Change:
        """Stop serving an adapter. Its name is free after `finish_unload`.

        Raises:
            AdapterNotFound: no such adapter, or it is unloading already.
            AdapterNameTaken: an alias points to it.
        """
        entry = self.entries.get(name)
        if entry is None or entry.state == "unloading":
            raise self._not_found(name)
        aliases = self.aliases.pointing_to(name)
        if aliases:
            raise AdapterNameTaken(
                f"adapter {name!r} was not unloaded: alias(es) {', '.join(map(repr, aliases))} point to it; "
                "move or remove them first"
            )
        epoch = self._book.withdraw(name, self.epoch)
        self._book.set(msgspec.structs.replace(entry, state="unloading", epoch=epoch, pinned=False))
        return self._record(epoch, entry.unload_request())

    def finish_unload(self, name: str) -> None:
        """Forget an unloading adapter."""
        assert self.entries[name].state == "unloading", f"{name!r} is {self.entries[name].state}"
        self._book.forget(name)

    # For replicas

    def changes_since(self, epoch: int) -> list[Change] | None:
        """Changes later than `epoch`, oldest first; None where they are no longer known."""
        return self._log.since(epoch)

    def catch_up(self, holding: Mapping[str, int], pinned: Collection[str] = ()) -> list[Change]:
        """What brings a replica that holds these generations, by name, to where the fleet is: `cluster.catch_up`."""
        return catch_up(self.entries, self.epoch, holding, pinned)

    def close(self) -> None:
        """Close the journal; the registry is unusable afterwards."""
        self._journal.close()

    # Inside

    def _not_found(self, name: str) -> AdapterNotFound:
        return AdapterNotFound(f"no adapter named {name!r} is loaded; {nearest(name, self.served)}")

    def _ready_entry(self, name: str) -> AdapterEntry:
        if name not in self.served:
            raise self._not_found(name)
        return self.served[name]

    def _next_unwritten(self) -> int:
        """An epoch that the journal does not know of: its own next one comes after it.

        A restart before that gives it out again, and not as the generation of anything a replica still holds.
        """
        return self.epoch + 1

    def _noted(self, alias: Alias) -> Alias:
        if alias.epoch > self.epoch:
            self._log.advance(alias.epoch)
        return alias

    def _record(self, epoch: int, request: LoRARequest, only: Collection[str] = ()) -> Change:
        self.on_change(change := self._log.record(Change(epoch=epoch, request=request, only=tuple(only))))
        return change
