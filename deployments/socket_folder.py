"""`SocketFolder`: the private folder of one engine's sockets, which does not outlive who made it."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "lora-fleet-"

LOCK = "owner.lock"
"""Locked for as long as the owner lives: the kernel lets go of it however a process ends, and knows no reused ids."""

MAX_PATH_BYTES = 80
"""Of a folder's path: a unix socket's path, file name included, holds 107."""


class SocketFolder:
    """A new folder only this user can enter, with a path short enough for sockets in it.

    Who is killed cannot remove it: what owners that are gone have left is removed when the next one is made.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) + 1 + len(PREFIX) + 8 > MAX_PATH_BYTES:
            parent = Path("/tmp")
        sweep(parent)
        self.path, self._lock = _new_folder(parent)

    def remove(self) -> None:
        """Remove it with all that is in it. Safe to call again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_sockets(base: str) -> None:
    """Remove the sockets of an endpoint base, and their folder if nothing else is in it; others may do so, too."""
    path = Path(base.removeprefix("ipc://"))
    for file in (*path.parent.glob(f"{path.name}-*"), path.parent / LOCK):
        with contextlib.suppress(OSError):
            file.unlink()
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def sweep(parent: Path | None = None) -> None:
    """Remove this user's folders in `parent` (unset: the folder for temporary files) whose owners are gone."""
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        # Somebody else may be sweeping; and what cannot be removed is no reason not to start.
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _new_folder(parent: Path) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # Not locked until now, it may have been taken for one that was left.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
                return folder, lock
        os.close(lock)
