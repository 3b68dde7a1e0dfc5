"""`tests/gpu/run.sh`: is every operation right on this GPU, and what do adapters cost there? In under four minutes.

    (a) Every operation against its reference, in bf16, fp16 and fp32.
    (b) Graphs captured once and replayed with other adapters, from none to all, and with other lengths.
    (c) compute-sanitizer's memcheck and racecheck over every operation at small shapes.
    (d) Microseconds a layer that adapters add to a graph of base products at Llama-3-8B's shapes, for our kernels,
        for those of vLLM and SGLang where VLLM_SRC and SGL_SRC name their files, and the floors of the device.

(a) to (c) run side by side, while other processes compile what (d) needs; (d) then has the device to itself. Lines are
JSON. The last one counts checks and names what was not run; the status is 1 if a check failed. `--quick` times rank 16
alone, without the sanitizer.

`--engine` looks at the engine instead, in under five minutes: greedy answers with graphs and steps that run ahead,
against those with neither; then decode steps of a random Llama-3-8B at 1 to 256 rows and 0 to 64 adapters, as tokens
a second, as a share of the memory's bandwidth, and against the same step without adapters.

`--check` needs no GPU: all of it under Triton's interpreter, with tiny shapes and no times.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.gpu import sanitizer
from tests.gpu.children import Child, Line, own_command, start, wait
from tests.gpu.clock import Clock

PARTS = ("part", "sanitized", "warm", "time", "engine")
GROUPS = ("sgmv", "one-launch", "swiglu", "rows", "attention", "replays")

LIMIT_S, QUICK_LIMIT_S, ENGINE_LIMIT_S = 225.0, 112.0, 285.0
CHECKS_SHARE = 0.5
"""Of the time, for what runs before timing."""


COMPILER_BYTES = 6 << 30
"""Device memory that a process which compiles is thought to take, a share of the checks' included."""


class Tally:
    """What has been found so far."""

    def __init__(self) -> None:
        self.checks: Counter[str] = Counter()
        self.failures: list[str] = []
        self.not_run: list[str] = []
        self.points: list[bool | None] = []
        # Lines come from several parts at a time.
        self._lock = threading.Lock()

    def take(self, line: Line) -> None:
        """Count a line, and print it if it tells of more than a check that passed."""
        with self._lock:
            if "check" in line:
                self.checks[line["check"]] += 1
                if not line["ok"]:
                    self.failures.append(f"{line['check']} {line['about']}")
                if line["ok"] and not line.get("error") and "skipped" not in line:
                    return
            if "measure" in line:
                self.points.append(line["met"])
            if "dropped" in line:
                self.not_run.extend(line["dropped"])
            elif not line.keys() & {"begun", "ended", "launched"}:
                print(json.dumps(line), flush=True)

    def fail(self, what: str) -> None:
        """Note a failure that no line tells of."""
        self.failures.append(what)
        print(json.dumps({"failed": what}), flush=True)

    def close(self, clock: Clock) -> int:
        """Print the last line; returns the exit status."""
        summary = {
            "checks": dict(self.checks),
            "failed": self.failures,
            "not_run": self.not_run,
            "points": len(self.points),
            "met": self.points.count(True),
            "missed": self.points.count(False),
            "seconds": round(clock.spent_s, 1),
        }
        print(json.dumps(summary), flush=True)
        return 1 if self.failures or not self.checks else 0


def run_all(tally: Tally, clock: Clock, *, is_quick: bool) -> None:
    """Every part, in processes of their own."""
    limit_s = CHECKS_SHARE * clock.limit_s
    indices = list(range(7 if is_quick else 21))
    parts = [start(name, own_command("part", name), limit_s, tally.take) for name in GROUPS]
    tools = [] if is_quick else start_sanitizer(tally, limit_s)
    if is_quick:
        tally.not_run.append("compute-sanitizer (--quick)")
    jobs = [f"{index}:{whose}" for index in indices for whose in ("ours", "peers")]
    num_warm = num_compilers()
    warm = [
        start(f"compile {first}", own_command("warm", *jobs[first::num_warm]), limit_s) for first in range(num_warm)
    ]
    wait([*parts, *tools, *warm])
    for child in parts:
        if child.fault is not None:
            tally.fail(child.fault)
    for child in tools:
        judge(tally, child)
    for child in warm:
        if child.fault is not None:
            print(json.dumps({"note": child.fault}), flush=True)
    time_all(tally, clock, indices)


def num_compilers() -> int:
    """Processes that compile beside the checks: as many as cores are left, and as the device has memory for."""
    import torch

    cores = (os.cpu_count() or 2) - 4
    memory = torch.cuda.get_device_properties(0).total_memory // COMPILER_BYTES if torch.cuda.is_available() else 1
    return max(1, min(12, cores, memory))


def start_sanitizer(tally: Tally, limit_s: float) -> list[Child]:
    """One process for each tool, or none where there is no sanitizer."""
    found = sanitizer.find()
    if found is None:
        tally.not_run.append("compute-sanitizer (not on PATH, in a CUDA toolkit or among Python's packages)")
        return []
    program = own_command("sanitized")
    return [
        start(tool, sanitizer.command(found, tool, program), limit_s, environment=sanitizer.ENVIRONMENT)
        for tool in sanitizer.TOOLS
    ]


def judge(tally: Tally, child: Child) -> None:
    """Count a tool's finding as a check, or say that it found out nothing."""
    verdict = sanitizer.verdict(child.name, "\n".join(child.text), is_finished=not child.is_late)
    if verdict.faults is None:
        tally.not_run.append(f"compute-sanitizer {child.name} ({verdict.lines[0]})")
        print(json.dumps({"not_run": child.name, "output": verdict.lines}), flush=True)
        return
    ran = any("launched" in line for line in child.lines)
    error = "" if ran else "the program under it did not come to its end"
    if verdict.faults:
        error = f"{verdict.faults} found: " + " ".join(verdict.lines)
    tally.take(
        {"check": "compute-sanitizer", "about": child.name, "ok": not error, **({"error": error} if error else {})}
    )


def time_all(tally: Tally, clock: Clock, indices: Sequence[int]) -> None:
    """Time points, in a new process after each one that spoils its own."""
    left = list(indices)
    while left and clock.left_s > 10:
        command = own_command("time", str(clock.left_s - 4), *map(str, left))
        child = start("time", command, clock.left_s, tally.take)
        wait([child])
        if child.fault is None:
            return
        if child.is_late:
            tally.not_run.append(f"{len(left) - sum('ended' in line for line in child.lines)} points (no time left)")
            return
        begun = [line["begun"] for line in child.lines if "begun" in line]
        ended = [line["ended"] for line in child.lines if "ended" in line]
        spoiled = begun[-1] if len(begun) > len(ended) else "before the first point"
        tally.fail(f"time {spoiled}: {child.fault}"[:600])
        if len(begun) == len(ended):
            return
        left = left[len(begun) :]
    if left:
        tally.not_run.append(f"{len(left)} points")


def run_engine(tally: Tally, clock: Clock) -> None:
    """The engine's parts, one after the other."""
    for what in ("answers", "decode"):
        child = start(what, own_command("engine", what, str(clock.left_s - 4)), clock.left_s, tally.take)
        wait([child])
        if child.fault is not None:
            tally.fail(child.fault)


def rehearse(tally: Tally) -> None:
    """The whole program but for what only a GPU can do, in this process, under the interpreter."""
    from tests.engine.device_stand_in import device_stand_in
    from tests.gpu import end_to_end, parts
    from tests.gpu.stage import InterpretedStage
    from tests.kernels import interpreter

    interpreter.install()
    stage = InterpretedStage()

    def say(**line: object) -> None:
        tally.take(line)

    for name in GROUPS:
        parts.check_group(name, stage, is_small=True, say=say)
    parts.rehearse(stage, say)
    with device_stand_in(), tempfile.TemporaryDirectory() as folder:
        end_to_end.check_answers(stage, Path(folder, "answers"), say, num_tokens=3)
        end_to_end.time_decoding(stage, end_to_end.TINY, Path(folder, "decode"), Clock(LIMIT_S), say)
    tally.not_run += ["compute-sanitizer (--check)", "times (--check)"]


def run_part(arguments: Sequence[str]) -> None:
    """A part of a run: what a process started by `run_all` does. It ends well also where checks fail: lines tell."""
    from tests.gpu import parts
    from tests.gpu.marginal import points
    from tests.gpu.stage import CudaStage

    what, *rest = arguments
    stage = CudaStage()
    if what == "part":
        parts.check_group(rest[0], stage, is_small=False)
    elif what == "sanitized":
        parts.say_json(launched=sanitizer.run_launches())
    elif what == "warm":
        jobs = [job.split(":") for job in rest]
        parts.warm(stage, [(points()[int(index)], whose == "ours") for index, whose in jobs])
    elif what == "engine":
        from tests.gpu import end_to_end

        clock = Clock(float(rest[1]))
        with tempfile.TemporaryDirectory() as folder:
            if rest[0] == "answers":
                end_to_end.check_answers(stage, Path(folder))
                end_to_end.check_flashinfer(stage)
            else:
                end_to_end.time_decoding(stage, end_to_end.FULL, Path(folder), clock)
        parts.say_json(dropped=clock.dropped)
    else:
        parts.time_points(stage, [points()[int(index)] for index in rest[1:]], Clock(float(rest[0])))


def fault_of(is_check: bool) -> str | None:
    """Why the program cannot run here; None if it can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if is_check:
        return None if interpreted else "--check runs under the interpreter: set TRITON_INTERPRET=1, as run.sh does"
    if interpreted:
        return "TRITON_INTERPRET is set: unset it, or pass --check"
    import torch

    return None if torch.cuda.is_available() else "torch finds no CUDA device; --check runs without one"


def main(arguments: Sequence[str]) -> int:
    """Run everything, or one part of it; returns the exit status."""
    if arguments and arguments[0] in PARTS:
        run_part(arguments)
        return 0
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="rank 16 alone, no sanitizer: under two minutes")
    parser.add_argument("--engine", action="store_true", help="the engine, not the kernels: under five minutes")
    parser.add_argument("--check", action="store_true", help="under Triton's interpreter, on the CPU")
    options = parser.parse_args(arguments)
    if fault := fault_of(options.check):
        print(f"tests/gpu: {fault}", file=sys.stderr)
        return 2
    # A run that is ended ends its parts: see `wait`.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    limit_s = ENGINE_LIMIT_S if options.engine else QUICK_LIMIT_S if options.quick else LIMIT_S
    tally, clock = Tally(), Clock(limit_s)
    if options.check:
        rehearse(tally)
    elif options.engine:
        run_engine(tally, clock)
    else:
        run_all(tally, clock, is_quick=options.quick)
    return tally.close(clock)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
