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


def report(measure: str, *, goal: str, met: bool, **figures: Any) -> None:
    """Print a point as one JSON line, with the machine's load of the last minute."""
    load = round(os.getloadavg()[0], 2)
    rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"measure": measure, **rounded, "goal": goal, "met": met, "machine_load": load}), flush=True)
