"""Whether the files of an adapter's folder are those that were loaded, told without reading them."""

import hashlib
import os

from lora_core.types import ADAPTER_CONFIG_FILE

_WEIGHTS = (".safetensors", ".safetensors.index.json")


def folder_fingerprint(path: str) -> str | None:
    """Hash of the name, size and time of change of each file in a folder that a load reads: 32 hex digits.

    A link counts as what it leads to. None where `path` is no folder on this machine, or cannot be listed. Blocks for
    as long as the file system takes.
    """
    try:
        names = sorted(name for name in os.listdir(path) if name == ADAPTER_CONFIG_FILE or name.endswith(_WEIGHTS))
        files = [(name, *found) for name in names if (found := _size_and_time(os.path.join(path, name))) is not None]
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
    return hashlib.blake2b(repr(files).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def is_changed(kept: str | None, found: str | None) -> bool:
    """Whether two fingerprints of one folder say that its files changed; an unknown one says nothing."""
    return kept is not None and found is not None and kept != found


def _size_and_time(path: str) -> tuple[int, int] | None:
    """Bytes, and nanoseconds since 1970; None for a file that is gone, as one that is being replaced may be."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns
