"""What is read from a device's file of measured tile sizes, what is left out of it, and what is found in it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import tuning_table
from kernels.tuning import (
    ExpandTile,
    ShrinkTile,
    StepShape,
    device_name,
    expand_tile,
    row_tile,
    shrink_tile,
    swiglu_tile,
)
from kernels.tuning_table import CHOICES, Entry, Point, TuningTable, path_of, power_of_two, read, trial, write
from tests.gpu.operations import check_gate, check_one_launch
from tests.kernels import interpreter
from tests.kernels.cases import DEVICE, make_case

interpreter.install()

GPU = "NVIDIA Something 9000"
SHRINK = {"block_n": 32, "block_k": 64, "splits": 4, "num_warps": 2, "num_stages": 2}
EXPAND = {"block_n": 32, "num_warps": 2}
QKV = Point("shrink", tokens=64, groups=8, block_m=16, itemsize=2, rank=16, projections=3, width=4096)
DOWN = Point("expand", tokens=64, groups=8, block_m=16, itemsize=2, rank=16, width=4096)
ROWS = Point("rows", tokens=64, groups=8)


def saved(folder: Path, *items: object, **head: object) -> Path:
    path = path_of(GPU, folder)
    path.write_text(json.dumps({"format": 1, "device": GPU, "entries": items, **head}))
    return path


def item(point: Point, tile: object, **changes: object) -> dict[str, object]:
    fields = {name: value for name, value in {**point._asdict(), **changes}.items() if value}
    return {**fields, "tile": tile}


def test_what_is_written_is_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = {
        QKV: Entry(SHRINK, 3.25, 4.5),
        DOWN: Entry(EXPAND, 1.0, 1.0),
        ROWS: Entry({"block_m": 32}, 2.0, 2.5),
    }
    path = path_of(GPU, tmp_path / "new")
    write(path, GPU, entries, {"triton": "3.9.0"})
    assert path.name == "nvidia-something-9000.json"
    assert [child.name for child in path.parent.iterdir()] == [path.name]
    assert read(path, GPU).entries == entries
    assert json.loads(path.read_text())["versions"] == {"triton": "3.9.0"}
    assert not caplog.records


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = path_of(GPU, tmp_path)
    write(path, GPU, {ROWS: Entry({"block_m": 32}, 1.0, 1.0)}, {})

    def full(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[:20])
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        write(path, GPU, {}, {})
    assert [child.name for child in tmp_path.iterdir()] == [path.name]
    assert ROWS in read(path, GPU).entries


def test_a_device_without_a_file_has_no_entries_and_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not read(path_of(GPU, tmp_path), GPU).entries
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b'{"format": 1, "device"', "Expecting"),
        (b"\xff\xfe\x00", "decode"),
        (b"[" * 100_000, ""),
        (b"[]", "its format is 'list', expected 1"),
        (b'{"format": 2}', "its format is 2, expected 1"),
        (b'{"format": 1, "device": "another"}', f"it is of 'another', this device is '{GPU}'"),
        (json.dumps({"format": 1, "device": GPU, "entries": {}}).encode(), "its entries are dict, expected a list"),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_one_warning(
    content: bytes, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of(GPU, tmp_path)
    path.write_bytes(content)
    assert not read(path, GPU).entries
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    assert reason in record.getMessage()


def test_a_file_that_cannot_be_opened_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of(GPU, tmp_path)
    path.mkdir()
    assert not read(path, GPU).entries
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (3, "it is int, expected an object"),
        (item(QKV, SHRINK, kernel="shrinc"), "kernel is 'shrinc', expected one of rows, launch"),
        ({"tile": SHRINK}, "kernel is None"),
        (item(QKV, SHRINK, arch=90), "it has 'arch', expected kernel, tokens"),
        (item(QKV, SHRINK, tokens=None), "tokens is None, expected a positive number"),
        (item(QKV, SHRINK, width=-1), "width is -1"),
        (item(QKV, SHRINK, width=4096.0), "width is 4096.0"),
        (item(QKV, SHRINK, groups=True), "groups is True"),
        (item(QKV, SHRINK, rank=12), "rank is 12, expected a power of two"),
        (item(QKV, None), "its tile has NoneType, expected block_n, block_k"),
        (item(QKV, EXPAND), "its tile has ['block_n', 'num_warps'], expected block_n, block_k"),
        (item(QKV, {**SHRINK, "block_n": 48}), "block_n is 48, expected one of 16, 32"),
        (item(QKV, {**SHRINK, "splits": 4.0}), "splits is 4.0, expected one of 1, 2"),
        ({**item(QKV, SHRINK), "us": "fast"}, "us is 'fast'"),
        ({**item(QKV, SHRINK), "us": float("inf")}, "us is inf"),
        ({**item(QKV, SHRINK), "us": 10**400}, "too large"),
    ],
)
def test_a_damaged_entry_is_left_out_with_one_warning_and_the_others_hold(
    damaged: object, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path, item(DOWN, EXPAND), damaged, 7)
    assert read(path, GPU).entries == {DOWN: Entry(EXPAND, 0.0, 0.0)}
    (record,) = caplog.records
    message = record.getMessage()
    assert str(path) in message
    assert "entry 1 (" in message
    assert reason in message
    assert "and 1 more" in message


@pytest.mark.parametrize(
    ("changes", "is_found"),
    [
        ({}, True),
        ({"width": 2048}, True),
        ({"width": 8192, "tokens": 128, "groups": 16}, True),
        ({"rank": 8}, True),
        ({"rank": 32}, False),
        ({"rank": 4}, False),
        ({"width": 1024}, False),
        ({"tokens": 256}, False),
        ({"groups": 2}, False),
        ({"block_m": 8}, False),
        ({"itemsize": 4}, False),
        ({"projections": 1}, False),
        ({"kernel": "expand"}, False),
    ],
)
def test_an_entry_serves_its_neighbours(changes: dict[str, Any], is_found: bool) -> None:
    found = TuningTable({QKV: Entry(SHRINK, 1.0, 1.0)}).find(QKV._replace(**changes))
    assert found == (SHRINK if is_found else None)


def test_the_nearest_entry_is_found_in_any_order() -> None:
    near, far = QKV._replace(tokens=128), QKV._replace(tokens=128, width=8192)
    entries = {
        point: Entry({**SHRINK, "num_stages": stages}, 1.0, 1.0)
        for stages, point in enumerate((far, near, QKV._replace(rank=32)), start=1)
    }
    for ordered in (entries, dict(reversed(entries.items()))):
        found = TuningTable(ordered).find(QKV)
        assert found is not None
        assert found["num_stages"] == 2


def test_tile_sizes_come_from_the_table_and_else_from_the_defaults() -> None:
    step = StepShape(GPU, 50, 8, 16)
    plain = shrink_tile(step, 16, 3, 4096, 2), expand_tile(step, 16, 4096, 2), row_tile(50, 8, GPU)
    entries = {
        QKV: Entry(SHRINK, 1.0, 1.0),
        DOWN: Entry(EXPAND, 1.0, 1.0),
        ROWS: Entry({"block_m": 64}, 1.0, 1.0),
    }
    with trial(GPU, entries):
        assert shrink_tile(step, 16, 3, 4096, 2) == ShrinkTile(**SHRINK)
        assert expand_tile(step, 16, 4096, 2) == ExpandTile(block_r=16, **EXPAND)
        assert row_tile(50, 8, GPU) == 64
        assert row_tile(50, 8) == plain[2]
        assert shrink_tile(step._replace(device="another"), 16, 3, 4096, 2) == plain[0]
    assert (shrink_tile(step, 16, 3, 4096, 2), expand_tile(step, 16, 4096, 2), row_tile(50, 8, GPU)) == plain
    assert plain[0] != ShrinkTile(**SHRINK)


def test_more_groups_than_rows_are_the_same_step() -> None:
    assert tuning_table.step_point("rows", 5, 256) == Point("rows", tokens=8, groups=8)
    assert [power_of_two(number) for number in (0, 1, 2, 3, 4, 5, 1023)] == [1, 1, 2, 4, 4, 8, 1024]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("end", [0, -1], ids=["smallest", "largest"])
def test_any_choice_of_the_table_computes_right(end: int, dtype: torch.dtype, poisoned_scratch: None) -> None:
    chosen = {kernel: {name: values[end] for name, values in choices.items()} for kernel, choices in CHOICES.items()}
    case = make_case(
        [(1, 3), (0, 6)],
        ranks=[12, 5],
        max_rank=16,
        in_features=200,
        slices=(40, 40),
        dtype=dtype,
        base_rows=2,
        block_m=chosen["rows"]["block_m"],
    )
    step = {"tokens": 16, "groups": 2, "block_m": case.routing.block_m, "itemsize": dtype.itemsize, "rank": 16}
    entries = {
        Point("shrink", **step, projections=2, width=200): Entry(chosen["shrink"], 1.0, 1.0),
        Point("expand", **step, width=80): Entry(chosen["expand"], 1.0, 1.0),
        Point("swiglu", **step, width=40): Entry(chosen["swiglu"], 1.0, 1.0),
    }
    shape = StepShape(device_name(DEVICE), 11, 2, case.routing.block_m)
    with trial(shape.device, entries):
        assert shrink_tile(shape, 16, 2, 200, dtype.itemsize) == ShrinkTile(**chosen["shrink"])
        assert expand_tile(shape, 16, 80, dtype.itemsize) == ExpandTile(block_r=16, **chosen["expand"])
        assert swiglu_tile(shape, 16, 40, dtype.itemsize) == ExpandTile(block_r=16, **chosen["swiglu"])
        arguments = (case.x, case.a_stack, case.routing.tiles, case.routing.block_m, case.routing.max_groups, 2)
        torch.library.opcheck(torch.ops.lora_fleet.sgmv_shrink, arguments, test_utils=("test_faketensor",))
        case.check()
        check_gate(case, "silu")
        check_gate(case, "silu", one_launch=True)
        check_one_launch(case, repeats=1)
