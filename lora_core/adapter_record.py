"""What identifies and describes a loaded adapter, whether or not its tensors are in memory."""

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_core.types import ADAPTER_CONFIG_FILE, LoadReport

_WEIGHTS = (".safetensors", ".safetensors.index.json")

_SETTLED_NS = 2_000_000_000
"""A file changed less than this before it was looked at may change again within one tick of its file system's clock."""


@dataclass(frozen=True)
class FolderStamp:
    """The files of an adapter's folder at one moment, as the file system tells them apart without reading them.

    Attributes:
        files: Of each file a load reads, links followed: name, device and inode, size, times of change in ns.
        is_settled: Whether every file was old enough for a later change to show in its times.
    """

    files: tuple[tuple[str, int, int, int, int, int], ...]
    is_settled: bool

    @classmethod
    def of(cls, folder: Path) -> "FolderStamp":
        """The folder as it is now; taken before its files are read, it can only be too old. Of no folder: no files."""
        now_ns = time.time_ns()
        files = []
        try:
            for name in sorted(os.listdir(folder)):
                if name != ADAPTER_CONFIG_FILE and not name.endswith(_WEIGHTS):
                    continue
                found = os.stat(folder / name)
                files.append((name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
        except OSError:
            return cls((), False)
        is_settled = all(max(file[-2:]) < now_ns - _SETTLED_NS for file in files)
        return cls(tuple(files), is_settled)

    def proves_unchanged(self, now: "FolderStamp") -> bool:
        """Whether the folder, as it is now, surely holds the bytes it held when this stamp was taken."""
        return self.is_settled and bool(self.files) and self.files == now.files

    def has_news_since(self, time_ns: int) -> bool:
        """Whether a file came, or changed, at or after this time."""
        return any(max(file[-2:]) >= time_ns for file in self.files)


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """One load's outcome; the tensors themselves can be read from the folder again.

    Attributes:
        path: The folder.
        stamp: The folder's files just before they were read.
        content_hash: Hash, in hex, of the config and the weights.
        num_bytes: Host memory the tensors take.
        rank: Largest true rank.
        ranks: True rank by module.
        noop_modules: Modules that leave the base's output as it is.
        phases_s: Seconds of the load by phase.
    """

    path: Path
    stamp: FolderStamp
    content_hash: str
    num_bytes: int
    rank: int
    ranks: Mapping[str, int]
    noop_modules: tuple[str, ...] = ()
    phases_s: Mapping[str, float]

    def report(self, generation: int) -> LoadReport:
        """What the load found and did, as clients are told."""
        return LoadReport(
            generation=generation,
            content_hash=self.content_hash,
            num_modules=len(self.ranks),
            ranks=dict(sorted(Counter(self.ranks.values()).items())),
            num_bytes=self.num_bytes,
            noop_modules=list(self.noop_modules),
            phases_s=dict(self.phases_s),
        )
