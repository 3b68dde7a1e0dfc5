"""`AdapterBook`: the desired adapters as they stand, and the journal that remembers them."""

import msgspec

from cluster.entry import AdapterEntry
from cluster.journal import Journal, JournalWriter
from cluster.restored import Restored, decode_report
from lora_core.types import LoadReport


class AdapterBook:
    """Adapters by name, whatever their state, and what their loads found.

    What is written and what is set are two steps, so that nothing is set that the journal has refused.

    Args:
        journal: Of the registry, which lends it out.
        restored: What a start finds.
    """

    def __init__(self, journal: Journal, restored: Restored) -> None:
        self._journal = journal
        self.entries = restored.entries
        """All of them."""
        self.served = dict(self.entries)
        """Those that can be asked for: a live view."""
        self.changed = set(self.entries)
        """Names of adapters that are served otherwise than before; emptied by whoever reads it."""
        self._reports = restored.reports

    def report(self, name: str) -> LoadReport | None:
        """What the load of an adapter's generation found; None where it is not known."""
        return decode_report(self._reports.get(name))

    def set(self, entry: AdapterEntry) -> None:
        """Have an entry in its state; in the journal it is so already, or need not be."""
        name = entry.name
        self.entries[name] = entry
        if entry.state == "ready":
            self.served[name] = entry
            self.changed.add(name)
        elif self.served.pop(name, None) is not None:
            self.changed.add(name)

    def set_loaded(self, entry: AdapterEntry, report: LoadReport | None) -> None:
        """Have an entry, and what its load found."""
        self.set(entry)
        self._reports.pop(entry.name, None)
        if report is not None:
            self._reports[entry.name] = msgspec.json.encode(report)

    def forget(self, name: str) -> None:
        """Have an adapter no longer."""
        del self.entries[name]
        self._reports.pop(name, None)
        if self.served.pop(name, None) is not None:
            self.changed.add(name)

    def put(self, write: JournalWriter, entry: AdapterEntry, report: LoadReport | None) -> None:
        """Write an adapter, and what its load found, in a transaction."""
        write.put(entry.row(None if report is None else msgspec.json.encode(report)))
        before = self.entries.get(entry.name)
        if before is not None and before.static and not entry.static:
            write.withdraw(entry.name)

    def keep(self, entry: AdapterEntry, report: LoadReport | None) -> None:
        """Write an adapter and what its load found, and have them so."""
        with self._journal.transaction() as write:
            self.put(write, entry, report)
        self.set_loaded(entry, report)

    def update(self, entry: AdapterEntry, after: int) -> int:
        """Write a ready adapter that is loaded as before, and have it so; returns the epoch, which is above `after`."""
        with self._journal.transaction() as write:
            epoch = write.next_epoch(after)
            self.put(write, entry, self.report(entry.name))
        self.set(entry)
        return epoch

    def withdraw(self, name: str, after: int) -> int:
        """Take an adapter out of the journal: from here on a restart does not bring it back.

        Returns:
            The epoch, which is above `after`.
        """
        with self._journal.transaction() as write:
            epoch = write.next_epoch(after)
            write.remove(name)
            if self.entries[name].static:
                write.withdraw(name)
        return epoch
