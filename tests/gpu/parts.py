"""The parts of a run, each the whole work of one process. Everything they say is a JSON line on standard output."""

import json
import traceback
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from kernels.support import can_launch_dependently
from tests.bench.result import report
from tests.gpu import floors, marginal
from tests.gpu.clock import Clock
from tests.gpu.marginal import Point, System
from tests.gpu.operations import GROUPS, Check
from tests.gpu.replays import replay_checks
from tests.gpu.stage import Stage
from tests.kernels.peers import load_peers
from tests.kernels.scratch import poisoned_empty
from tests.kernels.sites import LLAMA_3_8B, Model, Step

TINY = Model("tiny", 64, 4, 2, 16, 96, 128)
DEFAULT = "two_launches_gated"
"""The form of ours that an engine runs by its default settings."""

TINY_POINTS = (Point(Step(5, 3), 16), Point(Step(2, 1), 8))


class Say(Protocol):
    """Where lines go."""

    def __call__(self, **line: object) -> None:
        """Tell of something."""


def say_json(**line: object) -> None:
    """Print one JSON line."""
    print(json.dumps(line), flush=True)


def run_checks(checks: Iterable[Check], say: Say = say_json) -> None:
    """Run checks with scratch memory full of NaN, and say how each went."""
    with poisoned_empty():
        for check in checks:
            try:
                check.run()
                error = None
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
                traceback.print_exc()
            say(check=check.operation, about=check.about, ok=error is None, error=error)


def check_group(name: str, stage: Stage, is_small: bool, say: Say = say_json) -> None:
    """The checks of one group of operations, or of the replays."""
    run_checks(replay_checks(stage, is_small) if name == "replays" else GROUPS[name](is_small), say)


def systems(stage: Stage, say: Say = say_json) -> list[System]:
    """Ours, and those of the peers that are here."""
    peers, absent = load_peers()
    for reason in absent:
        say(absent=reason)
    return [*marginal.our_systems(can_launch_dependently(stage.device)), *marginal.peer_systems(peers)]


def warm(stage: Stage, jobs: Sequence[tuple[Point, bool]]) -> None:
    """Compile what our systems, or the peers', need at points into the compiler's cache, by running it over one layer.

    Nothing is judged: what fails here fails again where it counts.
    """
    known = systems(stage)
    for point, is_ours in jobs:
        work = marginal.make_work(stage, LLAMA_3_8B, point, 1)
        for system in known:
            if system.is_ours != is_ours:
                continue
            try:
                marginal.verify(work, system)
            except Exception as error:
                print(f"{point.name} {system.name}: {error}", flush=True)
        del work


def time_points(stage: Stage, points: Sequence[Point], clock: Clock) -> None:
    """Verify and time points until the time is up; each begins and ends with a line."""
    known = systems(stage)
    bandwidth = floors.copy_bytes_per_s(stage)
    say_json(floor="copy", bytes_per_s=round(bandwidth))
    launch_us = {launches: floors.launch_floor_us(stage, launches) for launches in (4, 7, 8, 12)}
    say_json(floor="empty launches a layer", us={str(launches): round(us, 2) for launches, us in launch_us.items()})
    longest_s = 3.0
    for point in points:
        if not clock.has(1.3 * longest_s, point.name):
            continue
        began_s = clock.spent_s
        say_json(begun=point.name)
        time_point(stage, LLAMA_3_8B, point, known, bandwidth, launch_us)
        say_json(ended=point.name)
        longest_s = max(longest_s, clock.spent_s - began_s)
        torch.cuda.empty_cache()
    say_json(dropped=clock.dropped)


def time_point(
    stage: Stage, model: Model, point: Point, known: Sequence[System], bandwidth: float, launch_us: dict[int, float]
) -> None:
    """One line with the figures of every system at a point, or with why there are none."""
    num_layers = marginal.layers_that_fit(model, point, torch.cuda.mem_get_info(stage.device)[0])
    if not num_layers:
        say_json(check="time", about=point.name, ok=True, skipped="not even two layers fit in the device's memory")
        return
    work = marginal.make_work(stage, model, point, num_layers)
    times: dict[System, float] = {}
    missing: list[str] = []
    for system, result in marginal.measure(stage, work, known, repeats=15):
        if isinstance(result, Exception):
            error = f"{type(result).__name__}: {result}"[:300]
            say_json(check="time", about=f"{point.name} {system.name}", ok=not system.is_ours, error=error)
            missing.append(system.name)
        else:
            times[system] = result
    floor_us = marginal.adapter_bytes(model, point) / bandwidth * 1e6
    report_point(point, num_layers, times, floor_us, launch_us, missing)


def report_point(
    point: Point,
    num_layers: int,
    times: dict[System, float],
    floor_us: float,
    launch_us: dict[int, float],
    missing: Sequence[str] = (),
) -> None:
    """Print a point's line: every system's microseconds a layer, the floors, the goal and whether it was met.

    A peer that could not be timed (`missing`) is not one that was beaten: nothing is then said to be met.
    """
    by_name = {system.name: us for system, us in times.items()}
    theirs = {system.name: us for system, us in times.items() if not system.is_ours}
    # What an engine runs by its settings; the other forms of ours are on the line beside it.
    ours = by_name.get(DEFAULT)
    wanted = marginal.goals(point)
    met = [(found := by_name.get(f"{kind}_gated")) is not None and found <= limit for kind, limit in wanted.items()]
    if theirs:
        met.append(ours is not None and ours < min(theirs.values()))
    goal = [f"{kind} <= {limit:g} us" for kind, limit in wanted.items()]
    goal.append("below every peer" if theirs else "below every peer (none is here)")
    report(
        "lora_layer_us",
        compared=", ".join(theirs) or "the floors alone",
        goal=", ".join(goal),
        met=all(met) if met and not missing else None,
        tokens=point.step.num_rows,
        groups=point.step.num_groups,
        rank=point.rank,
        layers=num_layers,
        ours_us=ours,
        missing=list(missing),
        floor_us=floor_us,
        floor_8_launches_us=launch_us[8],
        **{f"{system.name}_us": us for system, us in times.items()},
    )


def rehearse(stage: Stage, say: Say = say_json) -> None:
    """All that `time_points` does, with tiny shapes and a stand-in for time."""
    known = systems(stage, say)
    floors.copy_bytes_per_s(stage, num_bytes=1 << 16, repeats=1)
    floors.launch_floor_us(stage, 4, programs=1, repeats=1)
    ours = [system for system in known if system.is_ours]
    peers = [system for system in known if not system.is_ours]
    # Peers run as many programs for few rows as for many: at the smaller point alone.
    for point, those in zip(TINY_POINTS, (ours, [ours[0], *peers]), strict=True):
        work = marginal.make_work(stage, TINY, point, 2)
        for system, result in marginal.measure(stage, work, those, repeats=1):
            # Peers' kernels may need what the interpreter lacks.
            is_ok = not isinstance(result, Exception)
            error = None if is_ok else f"{type(result).__name__}: {result}"[:300]
            say(check="time", about=f"{point.name} {system.name}", ok=is_ok or not system.is_ours, error=error)
