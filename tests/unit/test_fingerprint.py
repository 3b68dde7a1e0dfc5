"""Fingerprints of adapter folders."""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.fingerprint import folder_fingerprint, is_changed, is_unchanged


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.safetensors.index.json"):
        (folder / name).write_bytes(b"as trained")
    return folder


def age(path: Path, seconds: int) -> None:
    """Move a file's time of change into the past, finer than any clock's step."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns - seconds * 10**9))


def test_a_folder_left_alone_keeps_its_fingerprint(folder: Path) -> None:
    before = folder_fingerprint(str(folder))
    assert before is not None
    (folder / "README.md").write_text("what nothing reads")
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / "adapter_model.safetensors").write_bytes(b"of an earlier step")
    assert folder_fingerprint(str(folder)) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"trained for longer"),
        lambda folder: age(folder / "adapter_model.safetensors", 1),
        lambda folder: age(folder / "adapter_config.json", 1),
        lambda folder: age(folder / "adapter_model.safetensors.index.json", 1),
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "other.safetensors"),
        lambda folder: (folder / "more.safetensors").write_bytes(b""),
    ],
)
def test_any_change_to_what_is_read_changes_it(folder: Path, change: Callable[[Path], object]) -> None:
    before = folder_fingerprint(str(folder))
    change(folder)
    after = folder_fingerprint(str(folder))
    assert is_changed(before, after)
    assert not is_unchanged(before, after)


def replace_by_lookalike(file: Path) -> None:
    found = file.stat()
    other = file.with_name("unpacked")
    other.write_bytes(file.read_bytes()[::-1])
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(file)


@pytest.mark.parametrize("change", [replace_by_lookalike, lambda file: file.chmod(0o600)])
def test_files_that_look_as_before_are_neither_changed_nor_surely_the_same(
    folder: Path, change: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock() + 3 * 10**9)
    before = folder_fingerprint(str(folder))
    assert is_unchanged(before, folder_fingerprint(str(folder)))
    time.sleep(0.02)
    change(folder / "adapter_model.safetensors")
    after = folder_fingerprint(str(folder))
    assert not is_changed(before, after)
    assert not is_unchanged(before, after)


def test_files_just_written_are_not_surely_the_same_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tick of the file system's clock they may be written once more."""
    clock = time.time_ns
    before = folder_fingerprint(str(folder))
    assert not is_unchanged(before, folder_fingerprint(str(folder)))
    monkeypatch.setattr(time, "time_ns", lambda: clock() + 3 * 10**9)
    after = folder_fingerprint(str(folder))
    assert not is_changed(before, after)
    assert not is_unchanged(before, after)
    assert is_unchanged(after, folder_fingerprint(str(folder)))


def test_a_fingerprint_of_an_earlier_version_is_compared_by_the_look(folder: Path) -> None:
    """It was the hash of each file's name, size and time, and nothing else."""
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]
    kept = hashlib.blake2b(repr(files).encode(), digest_size=16).hexdigest()
    found = folder_fingerprint(str(folder))
    assert not is_changed(kept, found)
    assert not is_unchanged(kept, kept)
    age(folder / "adapter_model.safetensors", 1)
    assert is_changed(kept, folder_fingerprint(str(folder)))


def test_a_link_counts_as_what_it_leads_to(folder: Path, tmp_path: Path) -> None:
    """As in the Hub's cache, whose files are links to blobs."""
    weights = folder / "adapter_model.safetensors"
    weights.rename(tmp_path / "blob")
    weights.symlink_to(tmp_path / "blob")
    before = folder_fingerprint(str(folder))
    age(tmp_path / "blob", 1)
    after = folder_fingerprint(str(folder))
    assert is_changed(before, after)
    (tmp_path / "blob").unlink()
    assert folder_fingerprint(str(folder)) is None, "what cannot be read says nothing"


@pytest.mark.parametrize("path", ["/nowhere/at/all", "org/name@rev", "", "a\x00b", "file"])
def test_what_is_no_folder_has_none(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert folder_fingerprint(path) is None


def test_only_two_known_fingerprints_can_differ() -> None:
    assert is_changed("x", "y")
    assert not any(is_changed(*pair) for pair in [("x", "x"), ("x", None), (None, "x"), (None, None)])
    assert not any(is_unchanged(*pair) for pair in [("x", None), (None, "x"), (None, None)])
