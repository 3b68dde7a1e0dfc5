"""`tests/gpu/run.sh` without a GPU: the whole of it under the interpreter, and what it does when parts go wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import reference
from tests.bench.result import CheckFailed
from tests.gpu import __main__ as program
from tests.gpu import marginal, parts, sanitizer
from tests.gpu.children import start, wait
from tests.gpu.clock import Clock
from tests.gpu.gate import gate
from tests.gpu.marginal import Point, System
from tests.gpu.operations import Check, require_close
from tests.gpu.stage import InterpretedStage, Recording
from tests.kernels import interpreter
from tests.kernels.cases import DEVICE
from tests.kernels.sites import LLAMA_3_8B, Step

interpreter.install()
interpreted = pytest.mark.skipif(not interpreter.is_active(), reason="the stand-in runs under the interpreter")

SCRIPT = Path(__file__).with_name("run.sh")
OPERATIONS = {
    *("sgmv", "sgmv halves", "sgmv_swiglu", "one launch", "sgmv_embed", "scale_rows", "paged_attention"),
    *(f"replay {name}" for name in ("sgmv", "sgmv_swiglu", "sgmv_embed", "scale_rows", "paged_attention")),
    "time",
    *("engine answers", "engine decode"),
}


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_the_script_checks_every_operation_under_the_interpreter() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("VLLM_SRC", "SGL_SRC")}
    result = subprocess.run(
        [str(SCRIPT), "--check"],
        env={**environment, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json_lines(result.stdout)[-1]
    assert summary["failed"] == []
    assert set(summary["checks"]) == OPERATIONS
    assert summary["not_run"] == ["compute-sanitizer (--check)", "times (--check)"]
    assert summary["points"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("interpreted", "says"), [("0", "no CUDA device"), ("1", "TRITON_INTERPRET is set")])
def test_without_a_gpu_it_says_so(
    interpreted: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert program.main([]) == 2
    assert says in capsys.readouterr().err


def test_a_check_that_fails_is_named_and_the_rest_run(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise AssertionError("y differs")

    parts.run_checks([Check("first", "a", fail), Check("second", "b", lambda: None)])
    tally = program.Tally()
    for line in json_lines(capsys.readouterr().out):
        tally.take(line)
    assert tally.close(Clock(10)) == 1
    summary = json_lines(capsys.readouterr().out)[-1]
    assert summary["failed"] == ["first a"]
    assert summary["checks"] == {"first": 1, "second": 1}


def test_a_run_without_a_check_is_no_success() -> None:
    assert program.Tally().close(Clock(10)) == 1


@interpreted
@pytest.mark.parametrize("fill", [None, float("nan")], ids=["nothing", "nan"])
def test_a_wrong_kernel_is_not_timed(fill: float | None) -> None:
    def bind(work: marginal.Work, weights: marginal.Weights, site: Any) -> Any:
        return lambda: None if fill is None else work.outputs[site.name].fill_(fill)

    stage = InterpretedStage()
    work = marginal.make_work(stage, parts.TINY, Point(Step(3, 2), 8), 2)
    ((_, result),) = marginal.measure(stage, work, [System("wrong", bind)], repeats=1)
    assert isinstance(result, CheckFailed)
    assert "wrong T=3 G=2 r=8 qkv: largest error" in str(result)


@interpreted
def test_recorded_launches_run_again_on_what_is_at_their_addresses() -> None:
    stage = InterpretedStage()
    work = marginal.make_work(stage, parts.TINY, Point(Step(3, 2), 8), 1)
    (system,) = [system for system in marginal.our_systems(False) if system.name == "two_launches"]
    site = work.sites[1]
    graph = stage.record(system.bind(work, work.layers[0][site.name], site))
    assert isinstance(graph, Recording)
    assert len(graph.launches) == 2
    x, y = work.inputs[site.name], work.outputs[site.name]
    x.neg_()
    y.zero_()
    graph.replay()
    minus = y.clone()
    x.neg_()
    y.zero_()
    graph.replay()
    assert torch.equal(y, -minus)
    assert y.any()


@pytest.mark.parametrize("shape", [(3, 48), (1, 4200)])
def test_the_base_layers_gate_is_the_reference_s(shape: tuple[int, int]) -> None:
    y = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    require_close(gate(y), reference.gate(y, "silu"), roundings=2)


def test_layers_are_as_many_as_fit() -> None:
    model, point = LLAMA_3_8B, Point(Step(64, 64), 64)
    assert marginal.layers_that_fit(model, point, 140 << 30) == 16
    assert 2 <= marginal.layers_that_fit(model, point, 24 << 30) < 16
    assert marginal.layers_that_fit(model, point, 2 << 30) == 0


def run_report(capsys: pytest.CaptureFixture[str], point: Point, times: dict[str, float]) -> dict[str, Any]:
    bind = marginal.our_systems(False)[0].bind
    systems = {System(name, bind, is_ours=name.startswith(("two", "one"))): us for name, us in times.items()}
    parts.report_point(point, 16, systems, 4.9, {8: 12.0})
    (line,) = json_lines(capsys.readouterr().out)
    return line


@pytest.mark.parametrize(
    ("point", "times", "met"),
    [
        (Point(Step(8, 8), 16), {"two_launches_gated": 14.0, "one_launch_gated": 9.0}, True),
        (Point(Step(8, 8), 16), {"two_launches_gated": 14.0, "one_launch_gated": 11.0}, False),
        (Point(Step(8, 8), 16), {"two_launches_pdl": 14.0}, False),
        (Point(Step(8, 8), 16), {"two_launches_gated": 14.0, "one_launch_gated": 9.0, "vllm": 13.0}, False),
        (Point(Step(1, 1), 8), {"two_launches_gated": 14.0, "vllm": 15.0}, True),
        (Point(Step(1, 1), 8), {"two_launches_gated_pdl": 14.0, "vllm": 15.0}, False),
        (Point(Step(1, 1), 8), {"vllm": 15.0}, False),
        (Point(Step(1, 1), 8), {"two_launches_gated": 14.0}, None),
    ],
)
def test_a_point_meets_its_goals_and_is_below_every_peer(
    point: Point, times: dict[str, float], met: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    line = run_report(capsys, point, times)
    assert line["met"] is met
    assert line["measure"] == "lora_layer_us"
    assert line["ours_us"] == times.get(parts.DEFAULT)
    assert (line["tokens"], line["groups"], line["rank"]) == (*point.step, point.rank)
    for name, us in times.items():
        assert line[f"{name}_us"] == us


def test_a_peer_that_could_not_be_timed_is_not_one_that_was_beaten(capsys: pytest.CaptureFixture[str]) -> None:
    system = System(parts.DEFAULT, marginal.our_systems(False)[0].bind)
    parts.report_point(Point(Step(8, 8), 16), 16, {system: 1.0}, 4.9, {8: 12.0}, ["vllm"])
    (line,) = json_lines(capsys.readouterr().out)
    assert line["met"] is None
    assert line["missing"] == ["vllm"]


def test_the_clock_names_what_it_drops() -> None:
    clock = Clock(5)
    assert clock.has(1, "short")
    assert not clock.has(60, "long")
    assert clock.dropped == ["long"]


def test_a_part_that_hangs_is_ended_and_named() -> None:
    script = "import time; print('{\"begun\": \"a\"}', flush=True); print('busy', flush=True); time.sleep(60)"
    child = start("slow part", [sys.executable, "-c", script], 3)
    wait([child])
    assert child.is_late
    assert child.lines == [{"begun": "a"}]
    assert child.fault is not None
    assert "slow part: not finished in its time: busy" in child.fault


def test_a_part_that_dies_is_named_with_its_last_words() -> None:
    child = start("part", [sys.executable, "-c", "raise SystemExit('illegal address')"], 30)
    wait([child])
    assert child.fault == "part: ended with status 1: illegal address"


def test_timing_goes_on_after_the_point_that_ended_its_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = """
import json, sys
for index in sys.argv[1:]:
    print(json.dumps({"begun": index}), flush=True)
    if index == "1":
        sys.exit("illegal address")
    print(json.dumps({"measure": index, "met": True}), flush=True)
    print(json.dumps({"ended": index}), flush=True)
"""
    monkeypatch.setattr(program, "own_command", lambda part, seconds, *points: [sys.executable, "-c", script, *points])
    tally = program.Tally()
    program.time_all(tally, Clock(60), [0, 1, 2])
    assert len(tally.points) == 2
    (failure,) = tally.failures
    assert failure.startswith("time 1: time: ended with status 1: illegal address")


PART = """
import json, sys
part, *rest = sys.argv[1:]
def say(**line): print(json.dumps(line), flush=True)
if part == "part":
    if rest == ["rows"]:
        sys.exit("illegal address")
    say(check=rest[0], about="all", ok=rest != ["swiglu"], error=None)
elif part == "sanitized":
    say(launched=3)
elif part == "warm":
    print("compiled", rest, flush=True)
else:
    for point in rest[1:-1]:
        say(begun=point)
        say(measure="lora_layer_us", point=point, met=True)
        say(ended=point)
    say(dropped=[rest[-1]])
"""
SANITIZER = """#!/bin/sh
tool="$2"
shift 6
"$@"
if [ "$tool" = memcheck ]; then echo "========= ERROR SUMMARY: 0 errors"
else echo "========= Error: Device not supported"; fi
"""


def test_a_run_gathers_its_parts_and_tells_of_those_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(program, "own_command", lambda *arguments: [sys.executable, "-c", PART, *arguments])
    tally = program.Tally()
    program.run_all(tally, Clock(100), is_quick=False)
    assert tally.checks == {
        **dict.fromkeys(("sgmv", "one-launch", "swiglu", "attention", "replays"), 1),
        "compute-sanitizer": 1,
    }
    assert sorted(tally.failures) == ["rows: ended with status 1: illegal address", "swiglu all"]
    assert len(tally.points) == 20
    assert tally.not_run == ["compute-sanitizer racecheck (no summary)", "20"]
    assert "Device not supported" in capsys.readouterr().out


def test_a_quick_run_times_one_rank_and_says_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "own_command", lambda *arguments: [sys.executable, "-c", PART, *arguments])
    tally = program.Tally()
    program.run_all(tally, Clock(100), is_quick=True)
    assert len(tally.points) == 6
    assert tally.not_run == ["compute-sanitizer (--quick)", "6"]
    assert {point.rank for point in marginal.points()[:7]} == {16}


MEMCHECK = "========= COMPUTE-SANITIZER\n{}========= ERROR SUMMARY: {}\n"
FOUND = "========= Invalid __global__ read of size 16 bytes\n=========     at shrink_kernel+0x230\n"


@pytest.mark.parametrize(
    ("tool", "output", "faults"),
    [
        ("memcheck", MEMCHECK.format("", "0 errors"), 0),
        ("memcheck", MEMCHECK.format(FOUND, "1 error"), 1),
        ("racecheck", "=========\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("racecheck", "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n", 3),
        ("memcheck", "========= Error: Device not supported.\n", None),
        ("racecheck", "", None),
    ],
)
def test_the_sanitizers_report_is_read(tool: str, output: str, faults: int | None) -> None:
    verdict = sanitizer.verdict(tool, output, is_finished=True)
    assert verdict.faults == faults
    assert sanitizer.verdict(tool, output, is_finished=False).faults is None
    if "Invalid" in output:
        assert any("shrink_kernel" in line for line in verdict.lines)
    if "not supported" in output:
        assert any("Device not supported" in line for line in verdict.lines)


def test_a_tool_that_found_nothing_out_is_not_a_check_that_passed(capsys: pytest.CaptureFixture[str]) -> None:
    tally = program.Tally()
    script = "print('========= Error: Device not supported.')"
    child = start("memcheck", [sys.executable, "-c", script], 30)
    wait([child])
    program.judge(tally, child)
    assert not tally.checks
    assert tally.not_run == ["compute-sanitizer memcheck (no summary)"]


@pytest.mark.parametrize(("line", "failed"), [("print('{\"launched\": 3}')", False), ("pass", True)])
def test_a_clean_report_counts_only_if_the_program_came_to_its_end(line: str, failed: bool) -> None:
    tally = program.Tally()
    script = f"{line}\nprint('========= ERROR SUMMARY: 0 errors')"
    child = start("memcheck", [sys.executable, "-c", script], 30)
    wait([child])
    program.judge(tally, child)
    assert tally.checks["compute-sanitizer"] == 1
    assert bool(tally.failures) is failed
