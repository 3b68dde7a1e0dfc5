"""`make bench-placement`, on a few small points."""

import dataclasses
import json
from pathlib import Path

import pytest

from cluster.placement import TERMS
from cluster.workloads import Workload
from tests.bench.bench_placement import Point, main
from tests.bench.placement_grid import Estimate, ablations, estimate, grid, held_out

SURE = 0.0


def test_it_prints_points_and_one_line_at_the_end_and_plots_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quick", "--seeds", "2", "--requests", "400", "--workers", "1", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    summary = json.loads(lines[-1])
    assert summary["points"] == 2
    assert summary["decision_p50_us"] > 0
    assert summary["delta_bytes"] < summary["table_bytes"]
    points = [json.loads(line) for line in lines if line.startswith("{") and '"placement"' in line]
    assert [point["point"] for point in points] == ["4 x 16, Zipf 0.9", "4 x 16, Zipf 1.5"]
    assert sum(point["met"] for point in points) == summary["met"]
    assert summary["held_out_points"] == 1
    assert summary["register_s"] > 0
    for name in ("grid.png", "decisions.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_grid_has_what_it_should() -> None:
    points = grid()
    assert len({point.name for point in points}) == len(points)
    assert {point.zipf for point in points} == {0.0, 0.9, 1.2, 1.5}
    assert {point.cv for point in points} >= {1.0, 8.0}
    assert {point.catalogue for point in points} >= {0.5, 16.0}
    assert {point.load for point in points} >= {0.5, 1.1}
    assert len(ablations(10, [0])) == 2 * (2 + len(TERMS))


def test_nothing_held_out_is_on_the_grid() -> None:
    def what(workload: Workload) -> Workload:
        return dataclasses.replace(workload, name="")

    assert len({one.name for one in (*grid(), *held_out())}) == len(grid()) + len(held_out())
    assert {what(one) for one in held_out()}.isdisjoint(map(what, grid()))


def point(ours: float, balance: float) -> Point:
    hits = {"ours": Estimate(ours, SURE), "HRW": Estimate(0.5, SURE), "all resident": Estimate(1.0, SURE)}
    return Point(Workload(name="any"), hits, {name: Estimate(balance, SURE) for name in hits})


def test_a_point_is_good_within_5_percent_of_the_best_baseline_and_balanced() -> None:
    assert point(0.48, 1.1).best == "HRW"
    assert [point(*figures).met for figures in ((0.475, 1.1), (0.47, 1.1), (0.6, 1.11))] == [True, False, False]


def test_intervals_are_those_of_students_t() -> None:
    mean, half = estimate([1.0, 2.0, 3.0])
    assert (mean, half) == pytest.approx((2.0, 4.303 / 3**0.5))
