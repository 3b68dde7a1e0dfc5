"""The desired adapters as a router finds them when it starts: its journal's, merged with its configuration's."""

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from cluster.entry import AdapterEntry
from cluster.fingerprint import folder_fingerprint, is_changed, is_unchanged
from cluster.journal import Journal
from lora_core.types import LoadReport

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What a registry starts with."""

    entries: dict[str, AdapterEntry]
    """The ready adapters by name."""
    reports: dict[str, bytes]
    """JSON of their loads' reports, where known."""
    is_resumed: bool = False
    """Whether a router of this run has used the journal before."""


def restore(journal: Journal, static: Mapping[str, str], run: str) -> Restored:
    """Read the journal back, and merge the configuration into it; what changes is journalled.

    See `cluster.registry.AdapterRegistry` for what becomes of which adapter.

    Args:
        journal: Of the router that starts.
        static: name -> path of the configuration's adapters.
        run: Names the deployment that the router belongs to.
    """
    found = _read(journal)
    new_run = run != journal.run
    withdrawn = set() if new_run else journal.withdrawn()
    for name in [name for name, entry in found.entries.items() if entry.static and name not in static]:
        logger.warning("adapter %r is no longer in lora_paths: dropped", name)
        with journal.transaction() as write:
            write.remove(name)
        _forget(found, name)
    for name, path in static.items():
        if name not in withdrawn:
            _set_static(journal, found, name, path)
    if new_run:
        _renew_content(journal, found)
        # Last, so that a start that is cut short is still a new run when it is tried again.
        with journal.transaction() as write:
            write.begin_run(run)
    return found._replace(is_resumed=run != "" and not new_run)


def decode_report(report: bytes | None) -> LoadReport | None:
    """A load's report as the journal keeps it; None where there is none, or a version that reports other things wrote
    it."""
    try:
        return None if report is None else msgspec.json.decode(report, type=LoadReport)
    except msgspec.MsgspecError:
        return None


def _read(journal: Journal) -> Restored:
    found = Restored({}, {})
    for row in journal.adapters():
        if row.state == "ready":
            found.entries[row.name] = AdapterEntry.restored(row, decode_report(row.report))
            if row.report is not None:
                found.reports[row.name] = row.report
            continue
        logger.warning("adapter %r was still loading when the router stopped: dropped, load it again", row.name)
        with journal.transaction() as write:
            write.remove(row.name)
    return found


def _forget(found: Restored, name: str) -> None:
    del found.entries[name]
    found.reports.pop(name, None)


def _set_static(journal: Journal, found: Restored, name: str, path: str) -> None:
    entry = found.entries.get(name)
    if entry is not None and entry.path != path:
        logger.warning("adapter %r: lora_paths says %r, which replaces %r from the journal", name, path, entry.path)
        _forget(found, name)
        entry = None
    with journal.transaction() as write:
        if entry is None:
            epoch = write.next_epoch()
            fingerprint = folder_fingerprint(path)
            entry = AdapterEntry(
                name=name,
                path=path,
                generation=epoch,
                state="ready",
                epoch=epoch,
                fingerprint=fingerprint,
                created=int(time.time()),
            )
        entry = msgspec.structs.replace(entry, static=True)
        write.put(entry.row(found.reports.get(name)))
    found.entries[name] = entry


def _renew_content(journal: Journal, found: Restored) -> None:
    """Note what a new run's replicas will load; files that changed make a new generation."""
    for entry in list(found.entries.values()):
        fingerprint = folder_fingerprint(entry.path)
        if is_unchanged(entry.fingerprint, fingerprint):
            continue
        # Whether the files are those of then is not known, or known not to be so.
        renewed = msgspec.structs.replace(
            entry.as_loaded(None), fingerprint=fingerprint or entry.fingerprint, slot_bytes=entry.slot_bytes
        )
        with journal.transaction() as write:
            if is_changed(entry.fingerprint, fingerprint):
                logger.warning(
                    "adapter %r: the files in %r have changed since it was loaded; this run serves the new ones",
                    entry.name,
                    entry.path,
                )
                epoch = write.next_epoch()
                renewed = msgspec.structs.replace(renewed, generation=epoch, epoch=epoch)
            write.put(renewed.row())
        found.entries[entry.name] = renewed
        found.reports.pop(entry.name, None)
