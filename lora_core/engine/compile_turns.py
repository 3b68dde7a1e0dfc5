"""`CompileTurns`: one compilation at a time, by turns of those who ask for some."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from lora_core.errors import EngineError

T = TypeVar("T")

LONGEST_QUEUE_S = 20.0
"""How long a compilation may wait for its turn. Short of what a request that makes no progress is taken to be stuck
after, which would end those of others, too."""


@dataclass
class _Job:
    outcome: "Future[Any]"
    run: Callable[[], Any]
    asked_s: float


class CompileTurns:
    """A thread, started when it is first needed, that runs the jobs of several callers: one of each in turn.

    So a caller with one job waits for at most one of every other, however many those have.

    Args:
        name: Of the thread.
        clock: Seconds, never falling.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        # The first caller's turn is next.
        self._waiting: OrderedDict[Hashable, deque[_Job]] = OrderedDict()

    def submit(self, caller: Hashable, run: Callable[[], T]) -> "Future[T]":
        """Have `run` called when its turn comes; a future that is cancelled before that has it left out.

        The future's exception is that of `run`, or EngineError where its turn comes after `LONGEST_QUEUE_S`.
        """
        outcome: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(caller, deque()).append(_Job(outcome, run, self._clock()))
        self._thread.submit(self._run_next)
        return outcome

    def _run_next(self) -> None:
        with self._lock:
            caller, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[caller] = jobs
        if not job.outcome.set_running_or_notify_cancel():
            return
        try:
            if self._clock() - job.asked_s > LONGEST_QUEUE_S:
                raise EngineError(
                    f"the constraint could not be compiled within {LONGEST_QUEUE_S:g} s, because others before it take "
                    "long; send the request again"
                )
            job.outcome.set_result(job.run())
        # A panic of a library is no Exception.
        except BaseException as error:
            job.outcome.set_exception(error)
