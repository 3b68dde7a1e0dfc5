"""Fingerprints of adapter folders."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.fingerprint import folder_fingerprint, is_changed


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
    dangling = folder_fingerprint(str(folder))
    assert is_changed(after, dangling)


@pytest.mark.parametrize("path", ["/nowhere/at/all", "org/name@rev", "", "a\x00b", "file"])
def test_what_is_no_folder_has_none(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert folder_fingerprint(path) is None


def test_only_two_known_fingerprints_can_differ() -> None:
    assert is_changed("x", "y")
    assert not any(is_changed(*pair) for pair in [("x", "x"), ("x", None), (None, "x"), (None, None)])
