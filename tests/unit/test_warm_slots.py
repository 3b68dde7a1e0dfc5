"""Warm-ups, protection and measured loads of a real manager: real files, real slot tensors."""

import time
from pathlib import Path

import pytest
import torch

from lora_core.load_times import LoadTimes
from lora_core.manager import LoRAManagerV3
from lora_core.readiness import Readiness
from lora_core.types import AdapterRef, LoRAStatus
from tests.unit.adapted_model import make_manager, save_adapters
from tests.unit.test_staging import come_to, load, num_bytes, small_manager, wait_until


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return save_adapters(tmp_path / "adapters")


def warm(manager: LoRAManagerV3, *names: str) -> list[LoRAStatus]:
    """Ask for warm-ups, and step until nothing is left to do."""
    answers = [manager.warm_adapter(name).status for name in names]
    deadline = time.monotonic() + 30
    while manager.is_busy:
        assert time.monotonic() < deadline
        manager.advance(0.001)
        manager.check()
        manager.wait(0.001)
    return answers


def slots(manager: LoRAManagerV3) -> list[str]:
    return [ref.name for ref in manager.residency()[0]]


def unused(manager: LoRAManagerV3, folders: dict[str, Path], *names: str) -> list[AdapterRef]:
    """Load adapters that nobody uses."""
    refs = load(manager, folders, *names)
    for ref in refs:
        manager.release(ref)
    return refs


def test_a_warmed_adapter_has_in_its_slot_what_a_request_would_have_found(folders: dict[str, Path]) -> None:
    size = num_bytes(folders["wide"])
    manager, other = small_manager(size), small_manager(2**30)
    unused(manager, folders, *folders)
    refs = unused(other, folders, *folders)
    assert [manager.status(name).tier for name in folders] != ["host"] * len(folders)
    assert warm(manager, "full", "partial") == [LoRAStatus.SUCCESS] * 2
    assert sorted(slots(manager)) == ["full", "partial"]
    for name in slots(manager):
        other.activate_adapter(refs[list(folders).index(name)])
    for found, expected in zip(manager.input_buffers()[3:], other.input_buffers()[3:], strict=True):
        assert torch.equal(found, expected)
    again = manager.warm_adapter("full")
    assert (again.status, again.message) == (LoRAStatus.SUCCESS, "LoRA adapter 'full' is in a slot")


def test_warm_ups_that_cannot_be_had_are_answered_and_have_no_effect(folders: dict[str, Path]) -> None:
    manager = small_manager(2**30, num_slots=1)
    (full,) = load(manager, folders, "full")
    unused(manager, folders, "wide")
    come_to(manager, full, Readiness.READY)
    manager.pin(full)
    assert warm(manager, "wide") == [LoRAStatus.UNAVAILABLE]
    assert slots(manager) == ["full"]
    manager.unpin(full)
    manager.release(full)
    manager.protect_adapters(["full"])
    assert warm(manager, "wide") == [LoRAStatus.UNAVAILABLE]
    manager.protect_adapters([])
    assert warm(manager, "wide") == [LoRAStatus.SUCCESS]
    assert slots(manager) == ["wide"]
    assert warm(manager, "absent") == [LoRAStatus.PIN_NAME_NONEXISTENT]
    off = make_manager(enable_lora=False)
    assert "enable_lora" in str(off.warm_adapter("full").message)


def test_files_that_are_gone_end_a_warm_up(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    manager = small_manager(num_bytes(folders["wide"]))
    unused(manager, folders, *folders)
    name = next(name for name in folders if manager.status(name).tier == "disk")
    (folders[name] / "adapter_config.json").unlink()
    assert warm(manager, name) == [LoRAStatus.SUCCESS], "it was on its way"
    assert slots(manager) == []
    wait_until(lambda: "could not be read again" in caplog.text)


def test_nobody_counts_on_a_slot_whose_write_has_begun(folders: dict[str, Path]) -> None:
    manager = small_manager(2**30, num_slots=1)
    full, _ = unused(manager, folders, "full", "wide")
    manager.activate_adapter(full)
    stacks = manager.input_buffers()[3:]
    content = [stack.clone() for stack in stacks]
    seen: list[tuple[list[str], list[str], bool]] = []

    def look() -> None:
        report = manager.next_residency()
        assert report is not None
        is_untouched = all(torch.equal(*pair) for pair in zip(stacks, content, strict=True))
        seen.append(([ref.name for ref in report.resident], [ref.name for ref in report.loading], is_untouched))

    manager.next_residency()
    manager.before_write = look
    manager.activate_adapter("wide")
    assert seen == [([], ["wide"], True)]
    report = manager.next_residency()
    assert report is not None
    assert [ref.name for ref in report.resident] == ["wide"]


def test_an_adapter_that_was_reset_is_what_it_was(folders: dict[str, Path]) -> None:
    manager = small_manager(2**30, num_slots=1)
    (full,) = load(manager, folders, "full")
    come_to(manager, full, Readiness.READY)
    before = [stack.clone() for stack in manager.input_buffers()[3:]]
    reads = manager.num_file_reads
    manager.reset_adapter("full")
    assert manager.status("full").tier == "disk"
    come_to(manager, full, Readiness.READY)
    assert manager.num_file_reads == reads + 1
    for found, expected in zip(manager.input_buffers()[3:], before, strict=True):
        assert torch.equal(found, expected)


def test_loads_are_measured_by_the_tier_they_came_from(folders: dict[str, Path]) -> None:
    manager = small_manager(num_bytes(folders["full"]))
    assert manager.load_ms_per_mib() == {}
    a, b = load(manager, dict.fromkeys("ab", folders["full"]), *"ab")
    come_to(manager, b, Readiness.READY)
    counts = manager.slot_counts()
    assert (counts.num_loads, counts.num_misses) == ({"host": 1}, 2)
    assert manager.load_ms_per_mib().keys() == {"host"}
    come_to(manager, a, Readiness.READY)
    counts, rates = manager.slot_counts(), manager.load_ms_per_mib()
    assert counts.num_loads == {"host": 1, "disk": 1}
    assert counts.load_s.keys() == {"host", "disk"}
    assert 0 < rates["host"] < rates["disk"]


def test_a_tier_costs_its_own_step_and_those_after_it() -> None:
    times = LoadTimes()
    times.read(1 << 21, 0.2)
    assert times.ms_per_mib() == {"disk": pytest.approx(100)}
    times.wrote(1 << 20, 0.01, read_s=None)
    times.fetched(1 << 20, 1.0)
    assert times.ms_per_mib() == {
        "host": pytest.approx(10),
        "disk": pytest.approx(110),
        "remote": pytest.approx(1110),
    }
    for _ in range(100):
        times.wrote(1 << 20, 0.002, read_s=0.5)
    assert times.ms_per_mib()["host"] == pytest.approx(2, rel=0.01), "newer measurements count more"
    assert times.num_loads == {"host": 1, "disk": 100, "remote": 1}
    assert times.load_s["disk"] == pytest.approx(50.2)
