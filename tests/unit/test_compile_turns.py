"""Whose compilation comes next, and which come too late."""

import threading
from concurrent.futures import CancelledError, wait

import pytest

from lora_core.engine.compile_turns import LONGEST_QUEUE_S, CompileTurns
from lora_core.errors import EngineError


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Jobs:
    """Turns whose first job waits until all others have been asked for."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.turns = CompileTurns("test-turns", self.clock)
        self.done: list[str] = []
        self._go_on = threading.Event()
        self.first = self.turns.submit("first", self._wait)

    def _wait(self) -> None:
        assert self._go_on.wait(10)

    def ask(self, caller: str, name: str) -> None:
        self.turns.submit(caller, lambda: self.done.append(name))

    def run(self) -> None:
        self._go_on.set()
        last = self.turns.submit("last of all", lambda: None)
        wait([self.first, last], 10)


def test_callers_take_turns_however_many_jobs_each_has() -> None:
    jobs = Jobs()
    for index in range(4):
        jobs.ask("greedy", f"greedy {index}")
    jobs.ask("modest", "modest 0")
    jobs.ask("modest", "modest 1")
    jobs.ask("late", "late 0")
    outcome = jobs.turns.submit("greedy", lambda: 7)
    jobs.run()
    assert outcome.result(10) == 7
    assert jobs.done[:5] == ["greedy 0", "modest 0", "late 0", "greedy 1", "modest 1"]
    assert jobs.done[5:] == ["greedy 2", "greedy 3"]


def test_what_was_cancelled_takes_no_time_and_errors_are_told() -> None:
    jobs = Jobs()
    cancelled = jobs.turns.submit("one", lambda: jobs.done.append("cancelled"))
    assert cancelled.cancel()

    def fail() -> None:
        raise ValueError("as it is")

    failed = jobs.turns.submit("one", fail)
    jobs.ask("one", "after it")
    jobs.run()
    with pytest.raises(ValueError, match="as it is"):
        failed.result(10)
    with pytest.raises(CancelledError):
        cancelled.result()
    assert jobs.turns.submit("one", lambda: list(jobs.done)).result(10) == ["after it"]


def test_what_waits_for_too_long_is_not_begun() -> None:
    jobs = Jobs()
    early = jobs.turns.submit("one", lambda: jobs.done.append("early"))
    jobs.clock.now_s = LONGEST_QUEUE_S + 1
    jobs.turns.submit("one", lambda: jobs.done.append("in time"))
    jobs.run()
    with pytest.raises(EngineError, match=r"within 20 s.*send the request again"):
        early.result(10)
    assert jobs.turns.submit("one", lambda: list(jobs.done)).result(10) == ["in time"]
