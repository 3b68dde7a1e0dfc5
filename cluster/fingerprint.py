"""Whether the files of an adapter's folder are those that were loaded, told without reading them.

A fingerprint is text, for the journal: what the files look like, and, where a later change is sure to show, a hyphen
and which files they are (`FolderStamp`). The first part alone says that files changed: copying them to another disk,
or giving them other permissions, does not. Both say that they did not: new files may look like old ones, as what is
unpacked from two archives does. Between the two, only reading tells.
"""

import hashlib
from pathlib import Path

from lora_core.adapter_record import FolderStamp

_LOOK_DIGITS = 32


def folder_fingerprint(path: str) -> str | None:
    """Fingerprint of the files in a folder that a load reads.

    A link counts as what it leads to. None where `path` is no folder on this machine, has no such files, or cannot be
    read. Blocks for as long as the file system takes.
    """
    try:
        stamp = FolderStamp.of(Path(path))
    except ValueError:  # a NUL in the path
        return None
    if not stamp.files:
        return None
    look = _hash([(name, num_bytes, modified_ns) for name, _, _, num_bytes, modified_ns, _ in stamp.files])
    return f"{look}-{_hash(stamp.files)}" if stamp.is_settled else look


def is_changed(kept: str | None, found: str | None) -> bool:
    """Whether two fingerprints of one folder say that its files changed; an unknown one says nothing."""
    return kept is not None and found is not None and kept[:_LOOK_DIGITS] != found[:_LOOK_DIGITS]


def is_unchanged(kept: str | None, found: str | None) -> bool:
    """Whether two fingerprints of one folder prove that its files are the same; an unknown one proves nothing."""
    return kept is not None and kept[_LOOK_DIGITS:] != "" and kept == found


def _hash(files: object) -> str:
    return hashlib.blake2b(repr(files).encode(errors="surrogateescape"), digest_size=_LOOK_DIGITS // 2).hexdigest()
