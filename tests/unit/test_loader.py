"""Loading and unloading through the manager: statuses, identity of content, and many callers at once."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_core import manager as manager_module
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

    monkeypatch.setattr(manager_module, "LoRAModel", full_disk)
    response = make_manager().load_adapter(f"a={folders['full']}")
    assert response.status is LoRAStatus.LOAD_ERROR
    assert "MemoryError: no room for it" in response.message
    assert "Traceback" in caplog.text


def test_loading_the_same_again_succeeds_and_changed_files_are_another_adapter(tmp_path: Path) -> None:
    manager = make_manager()
    folder = save_adapter(tmp_path / "adapter", random_pairs(0, 2), 4.0)
    (tmp_path / "link").symlink_to(folder)
    manager.load_adapter(f"a={folder}")
    version, ref = manager.version, manager.acquire("a")
    for path in (folder, tmp_path / "link", tmp_path / "adapter" / ".." / "adapter"):
        assert manager.load_adapter(f"a={path}").status is LoRAStatus.SUCCESS
    assert manager.version == version
    assert manager.acquire("a") == ref

    copy = save_adapter(tmp_path / "copy", random_pairs(0, 2), 4.0)
    assert manager.load_adapter(f"a={copy}").status is LoRAStatus.LOAD_NAME_EXISTS
    save_adapter(folder, random_pairs(1, 2), 4.0)
    response = manager.load_adapter(f"a={folder}")
    assert response.status is LoRAStatus.LOAD_NAME_EXISTS
    assert "changed" in response.message


def test_generations_are_the_callers_or_fresh(folders: dict[str, Path]) -> None:
    manager = make_manager()
    manager.load_adapter(f"a={folders['full']}", generation=41)
    assert manager.acquire("a") == AdapterRef("a", 41)
    manager.load_adapter(f"b={folders['full']}")
    assert manager.acquire("b") == AdapterRef("b", 42)
    response = manager.load_adapter(f"c={folders['full']}", generation=41)
    assert response.status is LoRAStatus.LOAD_ERROR
    assert "generation 41" in response.message


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

    monkeypatch.setattr(manager_module, "LoRAModel", SlowModel)
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
        wait_until(lambda: len(resolved) == 21)
        time.sleep(0.1)  # the last of them is about to wait
        # While files are read, everything else goes on.
        assert manager.loras == {}
        assert manager.unload_adapter("a").status is LoRAStatus.UNLOAD_NAME_NONEXISTENT
        open_gate()
        assert {future.result(30).status for future in same} == {LoRAStatus.SUCCESS}
        assert other.result(30).status is LoRAStatus.LOAD_NAME_EXISTS
    assert reads == ["a"]
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
