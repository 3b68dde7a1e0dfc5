"""One desired adapter, and what replicas are asked for its sake."""

from typing import Literal

import msgspec

from cluster.journal import AdapterRow
from lora_core.portable import portable
from lora_core.types import LoadReport, LoRAOperation, LoRARequest

EntryState = Literal["loading", "ready", "unloading"]


@portable
class AdapterFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What was asked for of one adapter, and what it is: all that operators see, too."""

    name: str
    path: str
    state: EntryState
    """Asked for, served, or no longer served."""
    generation: int
    """Epoch of its load."""
    epoch: int = 0
    """Epoch of its load or unload, which a request for it needs."""
    content_hash: str | None = None
    """What this generation is, on every replica; None until the first one has told, and in the fleet's table."""
    static: bool = False
    """Named by the configuration (`lora_paths`) rather than loaded at run time."""
    pinned: bool = False
    """Kept in a slot of every replica."""
    min_copies: int = 1
    """Least replicas that should have it in a slot."""


class AdapterEntry(AdapterFacts, frozen=True, kw_only=True, gc=False):
    """One desired adapter."""

    fingerprint: str | None = None
    """`folder_fingerprint` of `path` when its load began; None where unknown, and in the fleet's table."""
    slot_bytes: int = 0
    """What is moved to bring it into a slot: its size in host memory; 0 while not known."""
    created: int = 0
    """Unix time at which the load of this generation began; 0 where unknown."""

    @classmethod
    def restored(cls, row: AdapterRow, report: LoadReport | None) -> "AdapterEntry":
        """The ready adapter that the journal kept, with its load's report where that can be read."""
        return cls(
            name=row.name,
            path=row.path,
            generation=row.generation,
            state="ready",
            static=row.static,
            epoch=row.generation,
            fingerprint=row.fingerprint,
            content_hash=row.content_hash,
            pinned=row.pinned,
            min_copies=row.min_copies,
            slot_bytes=0 if report is None else report.num_bytes,
            created=row.created,
        )

    def row(self, report: bytes | None = None) -> AdapterRow:
        """The adapter as the journal keeps it, with the JSON of its load's report."""
        return AdapterRow(
            name=self.name,
            path=self.path,
            generation=self.generation,
            state=self.state,
            static=self.static,
            fingerprint=self.fingerprint,
            content_hash=self.content_hash,
            pinned=self.pinned,
            report=report,
            min_copies=self.min_copies,
            created=self.created,
        )

    def as_loaded(self, report: LoadReport | None) -> "AdapterEntry":
        """The adapter with what its load found."""
        content_hash, slot_bytes = (None, 0) if report is None else (report.content_hash, report.num_bytes)
        return msgspec.structs.replace(self, content_hash=content_hash, slot_bytes=slot_bytes)

    def in_table(self) -> "AdapterEntry":
        """The adapter as handles know it, without what only the router actor compares."""
        if self.fingerprint is None and self.content_hash is None:
            return self
        return msgspec.structs.replace(self, fingerprint=None, content_hash=None)

    def load_request(self, *, replace: bool = False) -> LoRARequest:
        """Load this generation, of the content it has where that is known."""
        return LoRARequest(
            LoRAOperation.LOAD,
            self.name,
            self.path,
            self.generation,
            replace=replace,
            content_hash=self.content_hash,
        )

    def unload_request(self) -> LoRARequest:
        """Unload this generation."""
        return LoRARequest(LoRAOperation.UNLOAD, self.name, generation=self.generation)

    def pin_request(self) -> LoRARequest:
        """Pin or unpin, as the adapter is to be."""
        operation = LoRAOperation.PIN if self.pinned else LoRAOperation.UNPIN
        return LoRARequest(operation, self.name, generation=self.generation)
