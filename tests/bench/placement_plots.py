"""The plots of `make bench-placement`, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from tests.bench.bench_placement import Point
    from tests.bench.placement_scale import Decisions

_SHOWN = ("ours", "HRW", "bounded HRW", "resident first", "stock multiplex", "power of two")


def plot_grid(points: Sequence[Point], folder: Path) -> None:
    """Slot hits, and the busiest replica over the mean, of the most telling policies at each point."""
    names = [point.workload.name for point in points]
    figure, (above, below) = plt.subplots(2, 1, figsize=(14, 9), sharex=True, layout="constrained")
    for offset, policy in enumerate(_SHOWN):
        places = [index + (offset - len(_SHOWN) / 2 + 0.5) * 0.12 for index in range(len(names))]
        for axes, of in ((above, "hits"), (below, "balance")):
            found = [getattr(point, of)[policy] for point in points]
            axes.errorbar(
                places, [one.mean for one in found], [one.half for one in found], fmt="o", markersize=4, label=policy
            )
    above.set_ylabel("requests whose adapter is in a slot")
    above.legend(ncols=len(_SHOWN), loc="upper center", bbox_to_anchor=(0.5, 1.12))
    below.set_ylabel("busiest replica over the mean")
    below.set_yscale("log")
    below.axhline(1.1, color="grey", linewidth=0.8)
    below.set_xticks(range(len(names)), names, rotation=60, ha="right")
    figure.savefig(folder / "grid.png", dpi=120)
    plt.close(figure)


def plot_scale(decisions: Sequence[Decisions], folder: Path) -> None:
    """Time of a decision by number of adapters, for each number of replicas."""
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for replicas in sorted({one.num_replicas for one in decisions}):
        found = [one for one in decisions if one.num_replicas == replicas]
        for label, style in (("p50", "o-"), ("p99", "o--")):
            values = [one.p50_us if label == "p50" else one.p99_us for one in found]
            axes.plot([one.num_adapters for one in found], values, style, label=f"{replicas} replicas, {label}")
    axes.axhline(50, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("adapters")
    axes.set_ylabel("microseconds of a decision")
    axes.legend()
    figure.savefig(folder / "decisions.png", dpi=120)
    plt.close(figure)
