"""The table's rows: one registered function per case, and one row for each input of it."""

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.cases.world import World

OWN = "own"
"""Origin of a case that no public report stands behind."""


class Got(NamedTuple):
    """What a case saw, in one line, and whether that is right."""

    text: str
    right: bool


@dataclass(frozen=True)
class Case:
    """One row: where it comes from, what is tried, what should happen, and the code that tries it."""

    origin: str
    title: str
    expected: str
    run: Callable[[World], Got]

    @property
    def name(self) -> str:
        """Unique in the table."""
        return f"{self.origin}: {self.title}"


class Result(NamedTuple):
    """A case that has run."""

    case: Case
    got: Got
    wall_s: float


CASES: dict[str, Case] = {}
"""Every case by name, in the order of registration."""


def case(
    origin: str, title: str, expected: str, inputs: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., Got]], Callable[..., Got]]:
    """Register a function as a case.

    Args:
        origin: The report it answers, e.g. `vllm#55193`, or `OWN`.
        title: What is tried.
        expected: What should happen.
        inputs: The function's second argument by label, a row each; without it the function takes the world alone.
    """

    def register(function: Callable[..., Got]) -> Callable[..., Got]:
        if inputs is None:
            _add(Case(origin, title, expected, function))
        else:
            for label, value in inputs.items():
                _add(Case(origin, f"{title}: {label}", expected, _bound(function, value)))
        return function

    return register


def run_case(case: Case, world: World) -> Result:
    """Run one case; whatever it raises is what it got, and wrong."""
    start = time.monotonic()
    try:
        got = case.run(world)
    except Exception as error:
        got = Got(_in_one_line(error), False)
    return Result(case, got, time.monotonic() - start)


def all_of(*parts: Got) -> Got:
    """Several checks as one: right if all are; the wrong ones come first in the text."""
    wrong = [part for part in parts if not part.right]
    return Got("; ".join(part.text for part in (wrong or parts)), not wrong)


def _add(case: Case) -> None:
    assert case.name not in CASES, f"two cases are named {case.name}"
    CASES[case.name] = case


def _bound(function: Callable[..., Got], value: Any) -> Callable[[World], Got]:
    return lambda world: function(world, value)


def _in_one_line(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "nowhere"
    return f"{type(error).__name__} at {where}: {' '.join(str(error).split())}"
