"""Adapters between folder, host memory and slots, on real files and real slot tensors."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from lora_core import adapter_reader as reader_module
from lora_core.config import LoRAConfig
from lora_core.errors import AdapterLost, AdapterNotFound
from lora_core.inputs import LoRAInputs
from lora_core.manager import LoRAManagerV3
from lora_core.model import LoRAModel
from lora_core.readiness import Readiness
from lora_core.slot_write import Move, SlotWrite
from lora_core.slots import NoFreeSlot
from lora_core.types import AdapterRef, LoRAStatus
from tests.unit.adapted_model import (
    NUM_LAYERS,
    PROJECTIONS,
    RANK,
    TARGETS,
    TinyModel,
    make_manager,
    random_pairs,
    save_adapter,
    save_adapters,
)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Folders of adapters "full", "wide", "partial" and "second", to be changed at will."""
    return save_adapters(tmp_path / "adapters")


def num_bytes(folder: Path) -> int:
    """Host memory that an adapter takes."""
    manager = make_manager()
    manager.load_adapter(f"a={folder}")
    return manager.loras["a"].num_bytes


def small_manager(host_memory_bytes: int, num_slots: int = 2, read_timeout_s: float = 60) -> LoRAManagerV3:
    """A manager with a model and this much host memory."""
    manager = LoRAManagerV3(
        LoRAConfig(
            enable_lora=True,
            max_lora_rank=RANK,
            max_num_loras=num_slots,
            host_memory_bytes=host_memory_bytes,
            read_timeout_s=read_timeout_s,
        ),
        "base",
        torch.float32,
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        max_lora_seq_len=256,
        targets=TARGETS,
        projections=PROJECTIONS,
        num_layers=NUM_LAYERS,
    )
    manager.wrap(TinyModel())
    manager.bind_inputs(manager.input_buffers())
    return manager


def load(manager: LoRAManagerV3, folders: dict[str, Path], *names: str) -> list[AdapterRef]:
    """Load adapters, and be a user of each."""
    for name in names:
        response = manager.load_adapter(f"{name}={folders[name]}")
        assert response.status is LoRAStatus.SUCCESS, response.message
    return [manager.acquire(name) for name in names]


def come_to(manager: LoRAManagerV3, ref: AdapterRef, *ends: Readiness) -> Readiness:
    """Prepare an adapter until it has come so far."""
    deadline = time.monotonic() + 30
    while (readiness := manager.prepare(ref)) not in ends:
        assert time.monotonic() < deadline, readiness
        manager.wait(0.05)
        manager.check()
    manager.check()
    return readiness


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the other thread did not come this far"
        time.sleep(0.001)


class Reads:
    """What is read from folders, and a gate that every read waits at."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gate = threading.Event()
        self.gate.set()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    reads = Reads()

    class SlowModel(LoRAModel):
        def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
            reads.names.append(name)
            assert reads.gate.wait(30)
            super().__init__(name, *args, **kwargs)

    monkeypatch.setattr(reader_module, "LoRAModel", SlowModel)
    yield reads
    reads.gate.set()


# Eviction and reading again


def test_an_adapter_evicted_from_memory_is_read_again_once_for_all_who_wait(
    folders: dict[str, Path], reads: Reads
) -> None:
    manager = small_manager(2 * num_bytes(folders["full"]))
    a, _, c = load(manager, dict.fromkeys("abc", folders["full"]), *"abc")
    assert [manager.status(name).tier for name in "abc"] == ["disk", "host", "host"]
    reads.names.clear()
    reads.gate.clear()
    for _ in range(5):
        assert manager.prepare(a) is Readiness.READING
    # A request of another one is served meanwhile.
    assert manager.prepare(c) is Readiness.READY
    reads.gate.set()
    come_to(manager, a, Readiness.READY)
    assert reads.names == ["a"]
    assert manager.num_slot_writes == 2
    assert manager.status("a").tier == "slot"


def test_adapters_read_again_are_what_they_were(folders: dict[str, Path]) -> None:
    manager = small_manager(num_bytes(folders["wide"]), num_slots=1)
    refs = load(manager, folders, *folders)
    roomy = small_manager(2**30, num_slots=1)
    same = load(roomy, folders, *folders)
    for index in (0, 1, 2, 3, 1, 0, 3, 2):
        come_to(manager, refs[index], Readiness.READY)
        manager.pin(refs[index])
        manager.unpin(refs[index])
        roomy.activate_adapter(same[index])
        for found, expected in zip(manager.input_buffers()[3:], roomy.input_buffers()[3:], strict=True):
            assert torch.equal(found, expected)
    assert manager.num_file_reads > len(refs)
    assert roomy.num_file_reads == len(refs)


def test_an_adapter_larger_than_all_host_memory_is_refused(folders: dict[str, Path]) -> None:
    size = num_bytes(folders["wide"])
    manager = small_manager(size - 1)
    response = manager.load_adapter(f"wide={folders['wide']}")
    assert response.status is LoRAStatus.LOAD_INVALID_ADAPTER
    assert all(word in str(response.message) for word in (str(size), str(size - 1), "host_memory_bytes"))
    assert manager.loras == {}
    assert manager.load_adapter(f"wide={folders['second']}").status is LoRAStatus.SUCCESS


def test_one_read_at_a_time_is_waited_for_by_an_activation(folders: dict[str, Path], reads: Reads) -> None:
    manager = small_manager(num_bytes(folders["full"]))
    full, _ = load(manager, {"full": folders["full"], "b": folders["full"]}, "full", "b")
    reads.names.clear()
    reads.gate.clear()
    manager.prepare(full)
    wait_until(lambda: reads.names == ["full"])
    with ThreadPoolExecutor(1) as pool:
        activating = pool.submit(manager.activate_adapter, full)
        time.sleep(0.02)
        assert not activating.done()
        reads.gate.set()
        assert activating.result(30) == 0
    assert reads.names == ["full"]
    # One that is only on disk is read by the activation itself.
    manager.load_adapter(f"c={folders['full']}")
    assert manager.status("b").tier == "disk"
    assert manager.activate_adapter("b") == 1
    manager.check()


def test_no_file_is_read_for_an_activation_that_finds_no_slot(folders: dict[str, Path], reads: Reads) -> None:
    manager = small_manager(num_bytes(folders["full"]), num_slots=1)
    a, b = load(manager, {"a": folders["full"], "b": folders["full"]}, "a", "b")
    manager.activate_adapter(b)
    manager.pin(b)
    manager.load_adapter(f"c={folders['full']}")
    reads.names.clear()
    with pytest.raises(NoFreeSlot, match="max_num_loras"):
        manager.activate_adapter(a)
    assert reads.names == []


def test_slots_are_bound_anew_with_tensors_that_left_memory(folders: dict[str, Path]) -> None:
    manager = small_manager(num_bytes(folders["full"]))
    full, other = load(manager, {"full": folders["full"], "other": folders["full"]}, "full", "other")
    come_to(manager, full, Readiness.READY)
    come_to(manager, other, Readiness.READY)
    before = [tensor.clone() for tensor in manager.input_buffers()[3:]]
    manager.bind_inputs([torch.zeros(spec.shape, dtype=spec.dtype) for spec in manager.symbolic_inputs()])
    for found, expected in zip(manager.input_buffers()[3:], before, strict=True):
        assert torch.equal(found[:2], expected[:2])
    manager.check()


# Folders that are gone or changed


def test_a_folder_deleted_after_the_load_matters_only_when_it_is_needed(folders: dict[str, Path]) -> None:
    manager = small_manager(num_bytes(folders["full"]), num_slots=2)
    names = {"slot": folders["full"], "disk": folders["full"].parent / "copy", "host": folders["full"].parent / "copy2"}
    for name in ("disk", "host"):
        shutil.copytree(folders["full"], names[name])
    (in_slot,) = load(manager, names, "slot")
    come_to(manager, in_slot, Readiness.READY)
    on_disk, in_host = load(manager, names, "disk", "host")
    assert [manager.status(name).tier for name in ("slot", "host", "disk")] == ["slot", "host", "disk"]
    for folder in names.values():
        shutil.rmtree(folder)
    assert manager.prepare(in_slot) is Readiness.READY
    assert manager.prepare(in_host) is Readiness.READY
    with pytest.raises(AdapterLost) as caught:
        come_to(manager, on_disk, Readiness.READY)
    for word in ("'disk'", str(names["disk"]), "load it again"):
        assert word in str(caught.value)
    assert manager.prepare(in_slot) is Readiness.READY
    manager.release(in_host)
    with pytest.raises(AdapterLost, match="'disk'"):
        manager.activate_adapter("disk")
    manager.check()


def test_files_that_come_back_are_read_again(folders: dict[str, Path], tmp_path: Path) -> None:
    manager = small_manager(num_bytes(folders["full"]))
    full, _ = load(manager, {"full": folders["full"], "b": folders["full"]}, "full", "b")
    away = folders["full"].rename(tmp_path / "away")
    with pytest.raises(AdapterLost, match=r"full.*could not be read again"):
        come_to(manager, full, Readiness.READY)
    away.rename(folders["full"])
    come_to(manager, full, Readiness.READY)


def test_files_changed_after_the_load_are_not_served(folders: dict[str, Path]) -> None:
    manager = small_manager(num_bytes(folders["full"]))
    full, _ = load(manager, {"full": folders["full"], "b": folders["second"]}, "full", "b")
    manager.load_adapter(f"c={folders['full']}")
    content = manager.loras["full"].content_hash
    assert manager.status("full").tier == "disk"
    save_adapter(folders["full"], random_pairs(99, 4), 8.0)
    with pytest.raises(AdapterLost, match=rf"other files.*{content[:12]}.*load it again, in place"):
        come_to(manager, full, Readiness.READY)
    response = manager.load_adapter(f"full={folders['full']}", replace=True)
    assert response.status is LoRAStatus.SUCCESS
    come_to(manager, manager.acquire("full"), Readiness.READY)


# Slots written between steps


class StepwiseWrites:
    """Makes every slot write take as many calls as `calls` says, whatever the time is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
        self.budgets: list[float | None] = []
        advance = SlotWrite.advance
        left: dict[int, int] = {}

        def stepwise(write: SlotWrite, budget_s: float | None) -> bool:
            self.budgets.append(budget_s)
            left[id(write)] = left.get(id(write), calls) - 1
            if budget_s is not None and left[id(write)] > 0:
                return False
            return advance(write, None)

        monkeypatch.setattr(SlotWrite, "advance", stepwise)


def test_a_large_adapter_is_written_over_steps_and_serves_nobody_before(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = StepwiseWrites(monkeypatch, 3)
    manager = small_manager(2**30, num_slots=2)
    full, wide = load(manager, folders, "full", "wide")
    manager.advance(10.0)
    assert manager.prepare(full) is Readiness.WRITING
    assert manager.is_writing
    assert not manager.is_active_lora("full")
    assert manager.residency()[0] == []
    # One after the other.
    assert manager.prepare(wide) is Readiness.SLOT_AVAILABLE
    manager.advance(10.0)
    assert manager.prepare(full) is Readiness.WRITING
    manager.advance(10.0)
    assert manager.prepare(full) is Readiness.READY
    assert not manager.is_writing
    assert all(budget is not None and 0 < budget <= 10 for budget in writes.budgets)
    assert manager.num_slot_writes == 1


def test_nothing_is_written_in_a_step_whose_time_is_over(folders: dict[str, Path]) -> None:
    manager = small_manager(2**30)
    (full,) = load(manager, folders, "full")
    manager.advance(0.0)
    assert manager.prepare(full) is Readiness.WRITING
    manager.advance(0.0)
    assert manager.prepare(full) is Readiness.WRITING
    manager.advance(None)
    assert manager.prepare(full) is Readiness.READY


def test_a_slot_whose_adapter_is_unloaded_while_it_is_written_goes_to_another(folders: dict[str, Path]) -> None:
    manager = small_manager(2**30, num_slots=1)
    full, wide = load(manager, folders, "full", "wide")
    manager.advance(0.0)
    assert manager.prepare(full) is Readiness.WRITING
    manager.unload_adapter("full")
    manager.release(full)
    assert not manager.is_writing
    manager.advance(None)
    assert manager.prepare(wide) is Readiness.READY
    expected = small_manager(2**30, num_slots=1)
    expected.activate_adapter(load(expected, folders, "wide")[0])
    for found, right in zip(manager.input_buffers()[3:], expected.input_buffers()[3:], strict=True):
        assert torch.equal(found, right)


def test_a_write_that_cannot_begin_frees_its_slot(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def misfit(*_: Any) -> Iterator[Move]:
        raise ValueError("a tensor does not fit")

    monkeypatch.setattr(LoRAInputs, "begin_write", misfit)
    manager = small_manager(2**30, num_slots=1)
    (full,) = load(manager, folders, "full")
    with pytest.raises(AdapterLost, match="could not be written into a slot: ValueError: a tensor does not fit"):
        manager.prepare(full)
    manager.check()
    assert manager.slot_of(full) is None


def test_a_write_that_fails_between_steps_is_told_to_those_who_wait(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = small_manager(2**30, num_slots=2)
    full, _, idle = load(manager, folders, "full", "wide", "second")
    manager.release(idle)
    manager.pin_adapter("second")
    manager.advance(0.0)
    assert manager.prepare(full) is Readiness.WRITING or manager.is_writing

    def fail(self: SlotWrite, budget_s: float | None) -> bool:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(SlotWrite, "advance", fail)
    for _ in range(3):
        manager.advance(1.0)
        manager.check()
    with pytest.raises(AdapterLost, match="could not be written into a slot: RuntimeError: out of memory"):
        come_to(manager, full)
    # Nobody asks for the pinned one: it is not tried for ever.
    assert not manager.pinned_without_slot()
    monkeypatch.undo()
    come_to(manager, full, Readiness.READY)
    assert manager.pin_adapter("second").status is LoRAStatus.SUCCESS
    manager.advance(None)
    assert manager.is_active_lora("second")


# Pins


def test_pinned_adapters_take_the_next_slot_and_keep_it(folders: dict[str, Path]) -> None:
    manager = small_manager(num_bytes(folders["full"]), num_slots=2)
    names = dict.fromkeys("abcd", folders["full"])
    a, b, c, d = load(manager, names, *names)
    for ref in (b, c):
        come_to(manager, ref, Readiness.READY)
        manager.pin(ref)
    response = manager.pin_adapter("a")
    assert (response.status, response.message) == (LoRAStatus.SUCCESS, "LoRA adapter 'a' pinned successfully")
    assert "nothing changed" in str(manager.pin_adapter("a").message)
    assert manager.is_busy
    manager.advance(None)
    assert manager.slot_of(a) is None
    manager.unpin(c)

    def settled() -> bool:
        manager.advance(None)
        return not manager.is_busy

    wait_until(settled)
    assert manager.slot_of(a) is not None
    assert manager.slot_of(c) is None
    assert manager.status("a").pinned
    manager.unpin(b)
    for ref in (d, c, d):
        come_to(manager, ref, Readiness.READY)
        manager.pin(ref)
        manager.unpin(ref)
    assert manager.slot_of(a) is not None
    refused = manager.pin_adapter("b")
    assert refused.status is LoRAStatus.PIN_ERROR
    assert all(word in str(refused.message) for word in ("1 adapter", "2 slot", "max_num_loras"))
    assert manager.pin_adapter("nobody").status is LoRAStatus.PIN_NAME_NONEXISTENT
    assert manager.unpin_adapter("a").status is LoRAStatus.SUCCESS
    assert not manager.status("a").pinned
    manager.check()


def test_a_pin_ends_with_an_unload_and_passes_to_a_replacement(folders: dict[str, Path]) -> None:
    manager = small_manager(2**30, num_slots=2)
    (old,) = load(manager, folders, "full")
    manager.pin_adapter("full")
    manager.advance(None)
    assert manager.load_adapter(f"full={folders['wide']}", replace=True).status is LoRAStatus.SUCCESS
    manager.advance(None)
    new = manager.acquire("full")
    assert manager.slot_of(new) is not None
    assert manager.is_pinned(new)
    manager.unload_adapter("full")
    assert not manager.is_pinned(new)
    assert not manager.is_busy
    manager.release(old)
    manager.release(new)
    assert manager.load_adapter(f"full={folders['full']}").status is LoRAStatus.SUCCESS
    assert not manager.status("full").pinned
    manager.check()


def test_a_pinned_adapter_whose_files_are_gone_does_not_keep_the_engine_busy(folders: dict[str, Path]) -> None:
    manager = small_manager(num_bytes(folders["full"]), num_slots=2)
    load(manager, {"full": folders["full"], "b": folders["second"]}, "full", "b")
    manager.load_adapter(f"c={folders['full'].parent / 'wide'}")
    manager.load_adapter(f"d={folders['second']}")
    manager.load_adapter(f"e={folders['partial']}")
    away = folders["full"].rename(folders["full"].parent / "away")
    if manager.status("full").tier != "disk":
        manager.load_adapter(f"f={away}")
    manager.pin_adapter("full")

    def settled() -> bool:
        manager.advance(None)
        return not manager.is_busy

    wait_until(settled)
    assert manager.status("full").tier == "disk"
    away.rename(folders["full"])
    manager.pin_adapter("full")
    wait_until(settled)
    assert manager.status("full").tier == "slot"


# Everything at once


def test_threads_load_replace_pin_and_unload_while_requests_are_prepared(folders: dict[str, Path]) -> None:
    manager = small_manager(2 * num_bytes(folders["full"]), num_slots=3)
    sources, stop = list(folders.values()), threading.Event()
    names = [f"n{index}" for index in range(6)]

    def churn(seed: int) -> int:
        random, count = Random(seed), 0
        while not stop.is_set():
            name, source = random.choice(names), random.choice(sources)
            action = random.choice(["load", "load", "replace", "unload", "pin", "unpin"])
            if action in ("load", "replace"):
                response = manager.load_adapter(f"{name}={source}", replace=action == "replace")
                assert response.status in (LoRAStatus.SUCCESS, LoRAStatus.LOAD_NAME_EXISTS), response.message
            elif action == "unload":
                manager.unload_adapter(name)
            else:
                (manager.pin_adapter if action == "pin" else manager.unpin_adapter)(name)
            count += 1
        return count

    waiting: list[AdapterRef] = []
    running: list[AdapterRef] = []
    random, num_served = Random(0), 0
    with ThreadPoolExecutor(3) as pool:
        churning = [pool.submit(churn, seed) for seed in range(3)]
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            manager.advance(0.001)
            if len(waiting) < 8:
                try:
                    waiting.append(manager.acquire(random.choice(names)))
                except AdapterNotFound:
                    continue
            for ref in list(waiting):
                if manager.prepare(ref) is Readiness.READY:
                    manager.pin(ref)
                    waiting.remove(ref)
                    running.append(ref)
            if len(running) > 2:
                ref = running.pop(0)
                manager.unpin(ref)
                manager.release(ref)
                num_served += 1
            manager.check()
        stop.set()
        assert all(future.result(60) > 0 for future in churning)
    for ref in running:
        manager.unpin(ref)
    for ref in running + waiting:
        manager.release(ref)
    for name in names:
        manager.unload_adapter(name)
    assert num_served > 20
    assert manager.residency() == ([], [])
    assert manager.retired() == []
    manager.check()


# Files that take too long


class DeadMount:
    """Reads of some adapters block, as from a file server that is gone, until it is mended."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.blocked: list[str] = []
        self.mended = threading.Event()


@pytest.fixture
def dead_mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeadMount]:
    mount = DeadMount()

    class BlockingModel(LoRAModel):
        def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
            if name in mount.names:
                mount.blocked.append(name)
                assert mount.mended.wait(30)
            super().__init__(name, *args, **kwargs)

    monkeypatch.setattr(reader_module, "LoRAModel", BlockingModel)
    yield mount
    mount.mended.set()
    wait_until(lambda: not any(thread.name == "lora-reader" for thread in threading.enumerate()))


def test_reads_that_block_for_ever_hold_up_others_for_a_bounded_time(
    folders: dict[str, Path], dead_mount: DeadMount
) -> None:
    manager = small_manager(2 * num_bytes(folders["full"]), num_slots=1, read_timeout_s=0.2)
    refs = load(manager, dict.fromkeys("abcdef", folders["full"]), *"abcdef")
    dead_mount.names = {"a", "b", "c"}
    lost: dict[str, list[str]] = {name: [] for name in "abcdef"}
    ready: set[str] = set()
    started = time.monotonic()
    while ready != {"d", "e", "f"} or not all(lost[name] for name in "abc"):
        assert time.monotonic() < started + 20, (ready, lost)
        manager.advance(None)
        for ref in refs:
            if ref.name in ready:
                continue
            try:
                if manager.prepare(ref) is Readiness.READY:
                    ready.add(ref.name)
                    manager.release(ref)
            except AdapterLost as error:
                lost[ref.name].append(str(error))
        manager.wait(0.005)
        manager.check()
    assert not any(lost[name] for name in "def")
    assert sorted(dead_mount.blocked) == ["a", "b", "c"], "each blocks one thread, however often it is asked for"
    assert all(word in lost["a"][0] for word in ("'a'", "longer than 0.2 s", "lora_config.read_timeout_s"))
    dead_mount.mended.set()
    wait_until(lambda: not any(thread.name == "lora-reader" for thread in threading.enumerate()))
    for ref in refs[:3]:
        come_to(manager, ref, Readiness.READY)
        manager.release(ref)


def test_more_reads_that_block_than_are_staged_hold_up_others_for_seconds_though_they_are_waited_for(
    folders: dict[str, Path], dead_mount: DeadMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_core.staging.PATIENCE_S", 0.1)
    manager = small_manager(2 * num_bytes(folders["full"]), num_slots=1, read_timeout_s=1000)
    refs = load(manager, dict.fromkeys("abcdef", folders["full"]), *"abcdef")
    dead_mount.names = set("abcd")
    for name in "abcd":
        manager.load_adapter(f"fill-{name}={folders['full']}")
    ready: set[str] = set()
    started = time.monotonic()
    while ready != {"e", "f"}:
        assert time.monotonic() < started + 20, ready
        manager.advance(None)
        for ref in refs:
            if ref.name not in ready and manager.prepare(ref) is Readiness.READY:
                ready.add(ref.name)
                manager.release(ref)
        manager.wait(0.005)
        manager.check()
    dead_mount.mended.set()
    for ref in refs[:4]:
        come_to(manager, ref, Readiness.READY)
        manager.release(ref)
    manager.check()


def test_an_adapter_whose_read_blocks_is_unloaded_and_loaded_again_at_once(
    folders: dict[str, Path], dead_mount: DeadMount
) -> None:
    manager = small_manager(num_bytes(folders["full"]), num_slots=1, read_timeout_s=0.1)
    old, _ = load(manager, dict.fromkeys("ab", folders["full"]), *"ab")
    dead_mount.names = {"a"}
    assert manager.prepare(old) is Readiness.READING
    wait_until(lambda: bool(dead_mount.blocked))
    manager.release(old)
    assert manager.unload_adapter("a").status is LoRAStatus.SUCCESS
    dead_mount.names.clear()
    time.sleep(0.15)
    manager.advance(None)
    (new,) = load(manager, {"a": folders["full"]}, "a")
    come_to(manager, new, Readiness.READY)
    dead_mount.mended.set()
    wait_until(lambda: not any(thread.name == "lora-reader" for thread in threading.enumerate()))
    manager.check()
    assert manager.status("a").generation == new.generation
