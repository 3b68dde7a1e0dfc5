"""Loading and unloading through the manager: statuses, identity of content, and many callers at once."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_core import adapter_reader as reader_module
from lora_core.model import LoRAModel
from lora_core.store import AdapterStore
from lora_core.targets import LoRATargetModule
from lora_core.types import AdapterRef, LoRAStatus
from tests.unit.adapted_model import RANK, TARGETS, make_manager, random_pairs, save_adapter, save_adapters


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_adapters(tmp_path_factory.mktemp("adapters"))


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait up to 30 s for another thread."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the other thread did not come this far"
        time.sleep(0.001)


def test_load_statuses(folders: dict[str, Path], tmp_path: Path) -> None:
    manager = make_manager()
    assert manager.load_adapter(f"a={folders['full']}").message == "LoRA adapter 'a' loaded successfully"
    assert manager.load_adapter(str(folders["full"])).status is LoRAStatus.SUCCESS
    assert set(manager.loras) == {"a", str(folders["full"])}

    (tmp_path / "empty").mkdir()
    big = save_adapter(tmp_path / "big", random_pairs(0, RANK + 1), 1.0)
    for spec, status, words in [
        (f"a={folders['wide']}", LoRAStatus.LOAD_NAME_EXISTS, "unload it first"),
        (f"b={tmp_path / 'absent'}", LoRAStatus.LOAD_INVALID_PATH, "absent"),
        (f"b={tmp_path / 'empty'}", LoRAStatus.LOAD_INVALID_PATH, "adapter_config.json"),
        (f"b={big}", LoRAStatus.LOAD_INVALID_ADAPTER, "9"),
        ("=x", LoRAStatus.LOAD_INVALID_PATH, "name=path"),
        ("x=", LoRAStatus.LOAD_INVALID_PATH, "name=path"),
        ("", LoRAStatus.LOAD_INVALID_PATH, "name=path"),
    ]:
        response = manager.load_adapter(spec)
        assert response.status is status, (spec, response)
        assert words in response.message
    assert not manager.is_lora("b")
    assert manager.unload_adapter("b").status is LoRAStatus.UNLOAD_NAME_NONEXISTENT


def test_an_unforeseen_fault_is_an_answer_and_a_log_entry(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(*args: Any, **kwargs: Any) -> LoRAModel:
        raise MemoryError("no room for it")

    monkeypatch.setattr(reader_module, "LoRAModel", full_disk)
    response = make_manager().load_adapter(f"a={folders['full']}")
    assert response.status is LoRAStatus.LOAD_ERROR
    assert "MemoryError: no room for it" in response.message
    assert "Traceback" in caplog.text


def test_loading_the_same_again_succeeds_and_changed_files_are_another_adapter(tmp_path: Path) -> None:
    manager = make_manager()
    folder = save_adapter(tmp_path / "adapter", random_pairs(0, 2), 4.0)
    (tmp_path / "link").symlink_to(folder)
    manager.load_adapter(f"a={folder}")
    ref = manager.acquire("a")
    manager.next_residency()
    for path in (folder, tmp_path / "link", tmp_path / "adapter" / ".." / "adapter"):
        assert manager.load_adapter(f"a={path}").status is LoRAStatus.SUCCESS
    assert manager.next_residency() is None
    assert manager.acquire("a") == ref

    copy = save_adapter(tmp_path / "copy", random_pairs(0, 2), 4.0)
    assert manager.load_adapter(f"a={copy}").status is LoRAStatus.LOAD_NAME_EXISTS
    save_adapter(folder, random_pairs(1, 2), 4.0)
    response = manager.load_adapter(f"a={folder}")
    assert response.status is LoRAStatus.LOAD_NAME_EXISTS
    assert "changed" in response.message


def test_generations_are_the_callers_or_fresh(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager()
    manager.load_adapter(f"a={folders['full']}", generation=41)
    assert manager.acquire("a") == AdapterRef("a", 41)
    manager.load_adapter(f"b={folders['full']}")
    assert manager.acquire("b") == AdapterRef("b", 42)
    response = manager.load_adapter(f"c={folders['full']}", generation=41)
    assert response.status is LoRAStatus.LOAD_ERROR
    assert "generation 41" in response.message
    assert "Traceback" not in caplog.text


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file seem to have been there for a while: the time of change of a file's entry cannot be set."""
    now = time.time_ns
    monkeypatch.setattr("lora_core.adapter_record.time.time_ns", lambda: now() + 10**10)


def test_a_load_reports_what_it_found_and_did(folders: dict[str, Path]) -> None:
    manager = make_manager()
    first = manager.load_adapter(f"a={folders['partial']}", generation=5)
    report = first.report
    assert report is not None
    assert (report.generation, report.num_modules, report.ranks) == (5, 4, {2: 4})
    assert report.num_bytes == manager.loras["a"].num_bytes > 0
    assert report.content_hash == manager.loras["a"].content_hash
    assert {"find", "read", "check", "convert", "canary"} <= report.phases_s.keys()
    assert all(seconds >= 0 for seconds in report.phases_s.values())
    assert not report.is_noop
    again = manager.load_adapter(f"a={folders['partial']}")
    assert again.report == report
    assert again.message == "LoRA adapter 'a' loaded successfully; it was loaded already, and nothing changed"
    assert manager.load_adapter("b=/absent").report is None
    assert manager.status("a").report == report


def test_an_adapter_that_changes_nothing_is_loaded_and_said_to_be_a_no_op(tmp_path: Path) -> None:
    pairs = {name: (a, torch.zeros_like(b)) for name, (a, b) in random_pairs(0, 2).items()}
    response = make_manager().load_adapter(f"a={save_adapter(tmp_path / 'zero', pairs, 2.0)}")
    assert response.status is LoRAStatus.SUCCESS
    assert response.report is not None
    assert response.report.is_noop
    assert "loaded successfully; it is a no-op" in str(response.message)


@pytest.mark.usefixtures("aged")
def test_files_that_did_not_change_are_not_read_again(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["full"], tmp_path / "adapter")
    manager = make_manager()
    manager.load_adapter(f"a={folder}")
    for replace in (False, True):
        assert manager.load_adapter(f"a={folder}", replace=replace).status is LoRAStatus.SUCCESS
    assert manager.num_file_reads == 1
    # The same size and, if whoever wrote it insists, the same age: its time of change tells.
    weights = folder / "adapter_model.safetensors"
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert manager.load_adapter(f"a={folder}").status is LoRAStatus.LOAD_NAME_EXISTS
    assert manager.num_file_reads == 2
    weights.unlink()
    assert manager.load_adapter(f"a={folder}").status is LoRAStatus.LOAD_INVALID_ADAPTER


def test_files_written_just_now_are_read_again(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", random_pairs(0, 2), 4.0)
    manager = make_manager()
    for _ in range(2):
        assert manager.load_adapter(f"a={folder}").status is LoRAStatus.SUCCESS
    assert manager.num_file_reads == 2
    assert len(manager.loras) == 1


def test_another_generation_for_what_is_loaded_becomes_its_identity(folders: dict[str, Path]) -> None:
    manager = make_manager()
    manager.load_adapter(f"a={folders['full']}", generation=3)
    old = manager.acquire("a")
    manager.activate_adapter(old)
    same = manager.load_adapter(f"a={folders['full']}", generation=3)
    assert "nothing changed" in str(same.message)
    response = manager.load_adapter(f"a={folders['full']}", generation=8)
    assert response.status is LoRAStatus.SUCCESS
    assert "changed from generation 3" in str(response.message)
    assert response.report is not None
    assert response.report.generation == 8
    assert manager.acquire("a") == AdapterRef("a", 8)
    assert manager.status("a").draining == [3]
    assert manager.slot_of(old) == 0
    manager.release(old)
    assert manager.slot_of(old) is None
    # Never given twice.
    assert manager.load_adapter(f"a={folders['full']}", generation=3).status is LoRAStatus.LOAD_ERROR
    assert manager.acquire("a").generation == 8
    manager.check()


def test_the_content_that_is_expected_is_what_is_loaded(folders: dict[str, Path], tmp_path: Path) -> None:
    manager = make_manager()
    manager.load_adapter(f"a={folders['full']}")
    content = manager.loras["a"].content_hash
    for name in "ab":
        assert manager.load_adapter(f"{name}={folders['full']}", content_hash=content).status is LoRAStatus.SUCCESS
        response = manager.load_adapter(f"{name}={folders['full']}", content_hash="beef" * 16)
        assert response.status is LoRAStatus.LOAD_INVALID_ADAPTER
        assert content[:12] in str(response.message)
        assert "beefbeefbeef" in str(response.message)
    response = manager.load_adapter(f"a={folders['wide']}", replace=True, content_hash=content)
    assert response.status is LoRAStatus.LOAD_INVALID_ADAPTER
    assert manager.loras["a"].content_hash == content


def test_replacing_swaps_once_the_new_files_are_good(folders: dict[str, Path], tmp_path: Path) -> None:
    manager = make_manager()
    manager.load_adapter(f"a={folders['full']}")
    old = manager.acquire("a")
    big = save_adapter(tmp_path / "big", random_pairs(0, RANK + 1), 1.0)
    for source, status in (
        (big, LoRAStatus.LOAD_INVALID_ADAPTER),
        (tmp_path / "absent", LoRAStatus.LOAD_INVALID_PATH),
    ):
        assert manager.load_adapter(f"a={source}", replace=True).status is status
        assert manager.acquire("a") == old
    response = manager.load_adapter(f"a={folders['wide']}", replace=True)
    assert (response.status, response.message) == (LoRAStatus.SUCCESS, "LoRA adapter 'a' loaded successfully")
    new = manager.acquire("a")
    assert new != old
    assert manager.loras["a"].path == folders["wide"]
    assert manager.retired() == [old]
    # What was refused can be corrected, and loaded under the same name at once.
    save_adapter(big, random_pairs(5, RANK), 1.0)
    assert manager.load_adapter(f"a={big}", replace=True).status is LoRAStatus.SUCCESS
    assert manager.load_adapter(f"new={folders['wide']}", replace=True).status is LoRAStatus.SUCCESS
    manager.check()


def test_replacing_by_the_same_content_only_notes_where_it_is_now(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["full"], tmp_path / "first")
    copy = shutil.copytree(folder, tmp_path / "second")
    manager = make_manager()
    manager.load_adapter(f"a={folder}")
    ref = manager.acquire("a")
    response = manager.load_adapter(f"a={copy}", replace=True)
    assert response.status is LoRAStatus.SUCCESS
    assert "nothing changed" in str(response.message)
    assert manager.acquire("a") == ref
    assert manager.loras["a"].path == copy
    assert manager.load_adapter(f"a={folder}").status is LoRAStatus.LOAD_NAME_EXISTS


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], Callable[[], None]]]:
    """Names as they are read, each read waiting until the second value is called."""
    reads: list[str] = []
    gate = threading.Event()

    class SlowModel(LoRAModel):
        def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
            reads.append(name)
            assert gate.wait(30)
            super().__init__(name, *args, **kwargs)

    monkeypatch.setattr(reader_module, "LoRAModel", SlowModel)
    yield reads, gate.set
    gate.set()


def test_many_loads_of_one_name_read_once(
    folders: dict[str, Path],
    slow_reads: tuple[list[str], Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, open_gate = slow_reads
    manager = make_manager()
    resolved: list[str] = []
    resolve = AdapterStore.resolve

    def counted(self: AdapterStore, source: str) -> Path:
        resolved.append(source)
        return resolve(self, source)

    monkeypatch.setattr(AdapterStore, "resolve", counted)
    with ThreadPoolExecutor(21) as pool:
        same = [pool.submit(manager.load_adapter, f"a={folders['full']}") for _ in range(20)]
        wait_until(lambda: bool(reads))
        other = pool.submit(manager.load_adapter, f"a={folders['wide']}")
        time.sleep(0.1)  # all of them wait
        assert len(resolved) == 1
        # While files are read, everything else goes on.
        assert manager.loras == {}
        assert manager.unload_adapter("a").status is LoRAStatus.UNLOAD_NAME_NONEXISTENT
        open_gate()
        assert {future.result(30).status for future in same} == {LoRAStatus.SUCCESS}
        assert other.result(30).status is LoRAStatus.LOAD_NAME_EXISTS
    assert reads == ["a"]
    assert len(resolved) == 2
    assert set(manager.loras) == {"a"}
    assert manager.acquire("a").generation == 1


def test_a_load_that_waited_for_another_folders_failure_tries_itself(
    folders: dict[str, Path], tmp_path: Path, slow_reads: tuple[list[str], Callable[[], None]]
) -> None:
    reads, open_gate = slow_reads
    big = save_adapter(tmp_path / "big", random_pairs(0, RANK + 1), 1.0)
    manager = make_manager()
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(manager.load_adapter, f"a={big}")
        wait_until(lambda: bool(reads))
        good = pool.submit(manager.load_adapter, f"a={folders['full']}")
        open_gate()
        assert bad.result(30).status is LoRAStatus.LOAD_INVALID_ADAPTER
        assert good.result(30).status is LoRAStatus.SUCCESS


def test_a_load_does_not_share_the_answer_of_one_that_saw_other_files(
    tmp_path: Path, slow_reads: tuple[list[str], Callable[[], None]]
) -> None:
    reads, open_gate = slow_reads
    folder = save_adapter(tmp_path / "adapter", random_pairs(0, RANK + 1), 1.0)
    manager = make_manager()
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(manager.load_adapter, f"a={folder}")
        wait_until(lambda: bool(reads))
        # Read by now, as far as that load goes: it waits only in this test, so the files are put elsewhere.
        folder.rename(tmp_path / "away")
        save_adapter(folder, random_pairs(0, 2), 1.0)
        corrected = pool.submit(manager.load_adapter, f"a={folder}")
        time.sleep(0.05)
        open_gate()
        assert corrected.result(30).status is LoRAStatus.SUCCESS
        bad.result(30)
    assert manager.num_file_reads == 2


def test_an_unload_during_a_replacement_leaves_the_new_adapter(
    folders: dict[str, Path], slow_reads: tuple[list[str], Callable[[], None]]
) -> None:
    reads, open_gate = slow_reads
    manager = make_manager()
    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(manager.load_adapter, f"a={folders['full']}")
        wait_until(lambda: reads == ["a"])
        replacing = pool.submit(manager.load_adapter, f"a={folders['wide']}", replace=True)
        open_gate()
        loading.result(30)
        manager.unload_adapter("a")
        assert replacing.result(30).status is LoRAStatus.SUCCESS
    assert manager.loras["a"].path == folders["wide"]
    manager.check()


def test_two_parallel_unloads_one_wins(folders: dict[str, Path]) -> None:
    manager = make_manager()
    for _ in range(20):
        manager.load_adapter(f"a={folders['full']}")
        barrier = threading.Barrier(2)

        def unload(barrier: threading.Barrier = barrier) -> LoRAStatus:
            barrier.wait(30)
            return manager.unload_adapter("a").status

        with ThreadPoolExecutor(2) as pool:
            statuses = {future.result(30) for future in [pool.submit(unload), pool.submit(unload)]}
        assert statuses == {LoRAStatus.SUCCESS, LoRAStatus.UNLOAD_NAME_NONEXISTENT}


def test_modules_outside_the_targets_are_refused(tmp_path: Path) -> None:
    attention = make_manager(targets=TARGETS[:2])
    folder = save_adapter(tmp_path / "all", random_pairs(0, 2), 2.0)
    response = attention.load_adapter(f"a={folder}")
    assert response.status is LoRAStatus.LOAD_INVALID_ADAPTER
    assert "down_proj" in response.message

    # A projection is served where its target is, not wherever its name appears.
    fused = make_manager(targets=(LoRATargetModule("mixer.in_proj", ("in_proj",)),), projections={"in_proj": (4, 6)})
    pairs = {"layers.0.other.in_proj": (torch.ones(2, 6), torch.ones(4, 2))}
    response = fused.load_adapter(f"a={save_adapter(tmp_path / 'elsewhere', pairs, 2.0)}")
    assert response.status is LoRAStatus.LOAD_INVALID_ADAPTER
    assert "layers.0.other.in_proj" in response.message
    assert "mixer.in_proj" in response.message
