"""`make tune` without a GPU: all but the compiling, programs in place of time, and what it does with wrong tiles."""

import json
from pathlib import Path

import pytest
import torch

from kernels.launch import Launch
from kernels.tuning_table import CHOICES, Point, path_of, read
from tests.gpu import tune
from tests.gpu.clock import Clock
from tests.gpu.parts import TINY
from tests.gpu.places import Place, candidates, combined
from tests.gpu.stage import InterpretedStage
from tests.gpu.tune import Bench, Tuner
from tests.kernels import interpreter
from tests.kernels.sites import Step

interpreter.install()
interpreted = pytest.mark.skipif(not interpreter.is_active(), reason="the rehearsal runs under the interpreter")

STEP = Step(2, 2)
SHRINK = Point("shrink", tokens=64, groups=64, block_m=8, itemsize=2, rank=16, projections=3, width=4096)
DEFAULT = {"block_n": 16, "block_k": 256, "splits": 4, "num_warps": 4, "num_stages": 3}


def tuner(limit_s: float = 600) -> Tuner:
    return Tuner(Bench(InterpretedStage(), cold_bytes=1, repeats=1), Clock(limit_s), {}, None)


@interpreted
def test_the_rehearsal_fills_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--check"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["point"]["kernel"] for line in lines[:-1]} == set(CHOICES)
    assert lines[-1]["entries"] >= 1
    assert lines[-1]["wrong"] == 0
    for line in lines[:-1]:
        assert line["kept"] == (line["us"] < 0.97 * line["default_us"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert tune.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@interpreted
def test_a_wrong_candidate_is_neither_timed_nor_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Launch, "run", lambda launch: None)
    one = tuner()
    one.place(Place(TINY.o, STEP, 8, is_gated=False))
    assert len(one.bench.wrong) == 2
    assert "largest error" in one.bench.wrong[0]
    assert not one.entries
    assert not one.measured


@interpreted
def test_a_candidate_the_device_cannot_run_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain_run = Launch.run

    def run(launch: Launch) -> None:
        if launch.constants.get("STAGES") == 4:
            raise RuntimeError("out of resource: shared memory")
        plain_run(launch)

    monkeypatch.setattr(Launch, "run", run)
    one = tuner()
    one.place(Place(TINY.o, STEP, 8, is_gated=False))
    assert len(one.measured) == 2
    assert not one.bench.wrong
    assert "out of resource" in capsys.readouterr().out


@interpreted
def test_when_the_time_is_up_what_is_done_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = tuner(limit_s=0)
    path = path_of(one.bench.device, tmp_path)
    tune.tune(one, [TINY.o], [STEP], [8], path, is_dependable=True)
    assert not one.measured
    assert len(one.clock.dropped) == 3
    assert path.exists()
    assert not read(path, one.bench.device).entries


def test_candidates_differ_from_the_default_in_one_part_each() -> None:
    tiles = candidates(SHRINK, DEFAULT, 4096)
    assert tiles[0] == DEFAULT
    assert len({tuple(tile.values()) for tile in tiles}) == len(tiles)
    for tile in tiles[1:]:
        assert sum(tile[name] != DEFAULT[name] for name in DEFAULT) == 1
        assert all(tile[name] in CHOICES["shrink"][name] for name in DEFAULT)
        assert tile["block_k"] * tile["splits"] <= 4096


def test_the_best_of_each_part_are_combined() -> None:
    times = [
        (DEFAULT, 10.0),
        ({**DEFAULT, "splits": 8}, 8.0),
        ({**DEFAULT, "splits": 16}, 9.0),
        ({**DEFAULT, "num_warps": 8}, 9.5),
        ({**DEFAULT, "block_k": 128}, 11.0),
    ]
    assert combined(times) == {**DEFAULT, "splits": 8, "num_warps": 8}
    assert combined(times[:1]) == DEFAULT
