"""The folder of an engine's sockets: private, and gone with its owner, however that ends."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployments import socket_folder
from deployments.child_process import PROJECT_ROOT
from deployments.socket_folder import LOCK, PREFIX, SocketFolder, remove_sockets, sweep

OWNER = """
import sys
from deployments.socket_folder import SocketFolder
folder = SocketFolder()
(folder.path / "engine-request").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # pytest's own folder may be too long for a socket in it.
    monkeypatch.setattr(socket_folder, "MAX_PATH_BYTES", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def owner(parent: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """Another process with a folder of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import deployments.socket_folder as s; s.MAX_PATH_BYTES = 1000\n{OWNER}"],
        env={**os.environ, "TMPDIR": str(parent)},
        cwd=PROJECT_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_it_is_private_and_removed_with_what_is_in_it(parent: Path) -> None:
    folder = SocketFolder()
    assert folder.path.parent == parent
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "engine-request").touch()
    for _ in range(2):
        folder.remove()
        assert list(parent.iterdir()) == []


def test_a_killed_owners_folder_is_removed_by_the_next_and_a_live_ones_is_not(parent: Path) -> None:
    with owner(parent) as (alive, kept), owner(parent) as (killed, left):
        mine = SocketFolder()
        assert {kept, left, mine.path} == set(parent.iterdir())
        killed.kill()
        killed.wait()
        sweep()
        assert {kept, mine.path} == set(parent.iterdir())
        alive.kill()
        alive.wait()
        next_one = SocketFolder()
        assert {mine.path, next_one.path} == set(parent.iterdir())
        mine.remove()
        next_one.remove()


def test_what_is_not_known_to_be_left_stays(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (parent / f"{PREFIX}without-lock").mkdir()
    (parent / f"{PREFIX}file").touch()
    other = parent / "other"
    other.mkdir()
    (other / LOCK).touch()
    (parent / f"{PREFIX}link").symlink_to(other)
    (parent / f"{PREFIX}linked-lock").mkdir()
    (parent / f"{PREFIX}linked-lock" / LOCK).symlink_to(other / LOCK)
    before = set(parent.rglob("*"))
    sweep()
    assert set(parent.rglob("*")) == before
    left = parent / f"{PREFIX}left"
    left.mkdir()
    (left / LOCK).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
        sweep()
    assert left.exists(), "another user's"
    sweep()
    assert not left.exists()


def test_a_folder_taken_for_one_that_was_left_is_made_anew(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = os.open, []

    def swept_at_once(path: Path, flags: int, *mode: int) -> int:
        made.append(Path(path).parent)
        found = real(path, flags, *mode)
        if len(made) == 1:
            monkeypatch.setattr(os, "open", real)
            sweep()
            monkeypatch.setattr(os, "open", swept_at_once)
        return found

    monkeypatch.setattr(os, "open", swept_at_once)
    folder = SocketFolder()
    assert len(made) == 2
    assert list(parent.iterdir()) == [folder.path] == [made[1]]
    folder.remove()


def test_the_other_end_removes_the_sockets_and_their_folder(parent: Path) -> None:
    folder = SocketFolder()
    for link in ("request", "response"):
        (folder.path / f"engine-{link}").touch()
    for _ in range(2):
        remove_sockets(f"ipc://{folder.path}/engine")
        assert list(parent.iterdir()) == []
    folder.remove()
    shared = parent / "shared"
    shared.mkdir()
    (shared / "mine").touch()
    (shared / "engine-request").touch()
    remove_sockets(f"ipc://{shared}/engine")
    assert list(shared.iterdir()) == [shared / "mine"]


def test_a_path_too_long_for_sockets_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_folder, "MAX_PATH_BYTES", 30)
    folder = SocketFolder()
    assert folder.path.parent == Path("/tmp")
    folder.remove()
    assert not folder.path.exists()
