"""A run as a picture: how long users waited, how it went over time, and which adapters it went well for."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deployments.bench_serve.exchange import Outcome
from deployments.bench_serve.settings import Targets
from deployments.bench_serve.summary import is_good
from lora_core.errors import ConfigError

WARM, COLD, FAILED = "tab:blue", "tab:orange", "tab:red"


def check_plots(path: Path) -> None:
    """Say before a run that its picture could not be made. Raises ConfigError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'lora-fleet[bench]'")
    if path.suffix != ".png":
        raise ConfigError(f"--plot is {str(path)!r}; expected a name that ends with .png")


def save_plots(path: Path, outcomes: Sequence[Outcome], targets: Targets, title: str) -> None:
    """Write a PNG file. Raises OSError."""
    # No window, and none of the state that pyplot keeps.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    answered = [one for one in outcomes if one.error is None]
    _spread(axes[0, 0], "time to the first token", [(one.is_cold, one.ttft_s) for one in answered], targets.ttft_ms)
    inter_token = [(one.is_cold, one.inter_token_s) for one in answered]
    _spread(axes[0, 1], "mean time from token to token", inter_token, targets.inter_token_ms)
    _over_time(axes[1, 0], outcomes, targets)
    _by_adapter(axes[1, 1], outcomes, targets)
    figure.savefig(path, format="png", dpi=110)


def _spread(axes: Any, name: str, found: Sequence[tuple[bool, float | None]], target_ms: float) -> None:
    """Share of answers within a time, warm and cold apart."""
    for is_cold, label, style, color in ((False, "warm", "-", WARM), (True, "cold", "--", COLD)):
        known = np.sort([1e3 * seconds for of_cold, seconds in found if of_cold == is_cold and seconds is not None])
        if known.size:
            shares = np.arange(1, known.size + 1) / known.size
            axes.step(known, shares, style, where="post", color=color, label=f"{label} ({known.size})")
    axes.axvline(target_ms, color="gray", linestyle=":", label=f"target {target_ms:g} ms")
    axes.set(xlabel=f"{name}, ms", ylabel="share of answers within", ylim=(0, 1.02), xscale="log")
    _plain_numbers(axes.xaxis)
    axes.grid(alpha=0.3)
    axes.legend()


def _over_time(axes: Any, outcomes: Sequence[Outcome], targets: Targets) -> None:
    """The first token's wait of each request, by when it was due."""
    answered = [(one, one.ttft_s) for one in outcomes if one.error is None and one.ttft_s is not None]
    for is_cold, label, marker, color in ((False, "warm", ".", WARM), (True, "cold", "x", COLD)):
        points = [(one.due_s, 1e3 * ttft_s) for one, ttft_s in answered if one.is_cold == is_cold]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=color, label=label, alpha=0.7)
    failed = [one.due_s for one in outcomes if one.error is not None]
    if failed:
        axes.plot(failed, [targets.ttft_ms] * len(failed), "v", color=FAILED, label=f"failed ({len(failed)})")
    axes.axhline(targets.ttft_ms, color="gray", linestyle=":")
    axes.set(xlabel="due, s from the start", ylabel="first token, ms", yscale="log")
    _plain_numbers(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.legend()


def _by_adapter(axes: Any, outcomes: Sequence[Outcome], targets: Targets) -> None:
    """Good answers of each adapter, the most asked first."""
    asked: dict[str, list[bool]] = {}
    for one in outcomes:
        asked.setdefault(one.model, []).append(is_good(one, targets))
    of_each = sorted(asked.values(), key=len, reverse=True)
    places = np.arange(1, len(of_each) + 1)
    axes.bar(places, [len(of_one) for of_one in of_each], color="lightgray", label="asked")
    axes.bar(places, [sum(of_one) for of_one in of_each], color=WARM, label="good", width=0.5)
    axes.set(xlabel="adapters, the most asked first", ylabel="requests")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()


def _plain_numbers(axis: Any) -> None:
    """Of a logarithmic axis: 1, 2, 5, 10, 20, and no powers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")
