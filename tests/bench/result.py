"""One measured point: its figures, its goal, and whether it was met."""

import json
import os
from typing import Any


class CheckFailed(AssertionError):
    """What was to be timed does not do the right thing."""


def require(is_right: bool, what: str) -> None:
    """Refuse to time what is wrong."""
    if not is_right:
        raise CheckFailed(what)


def report(measure: str, *, compared: str, goal: str, met: bool | None, **figures: Any) -> None:
    """Print a point as one JSON line: its figures, what was `compared`, and the machine's load of the last minute.

    `met` is None where what the goal compares with is not on this machine.
    """
    load = round(os.getloadavg()[0], 2)
    rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}
    line = {"measure": measure, **rounded, "compared": compared, "goal": goal, "met": met, "machine_load": load}
    print(json.dumps(line), flush=True)
