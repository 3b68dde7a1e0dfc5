"""`AdapterLanes`: changes of different adapters side by side, those of one adapter in order."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.changes import Change
from cluster.names import served_name
from deployments.bell import Bell

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Step:
    """A change on its way into the engine."""

    change: Change
    epoch: int | None
    """What its outcome is acknowledged with; None where nobody waits for it."""
    reason: str | None = None
    """Why this replica gives up what its fellows go on serving; None for a change of the whole fleet."""


class AdapterLanes:
    """A lane per adapter that is being changed, what is staged to replace it included: steps of a lane run in the order
    they came, one at a time, and no lane waits for another.

    Args:
        run: Carries out a step. What it raises is logged, and the lane goes on with the next one.
        progress: Rung after each.
    """

    def __init__(self, run: Callable[[Step], Awaitable[None]], progress: Bell) -> None:
        self._run = run
        self._progress = progress
        # The first of each is under way.
        self._steps: dict[str, deque[Step]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, step: Step) -> None:
        """Run a step after those of its adapter that came before."""
        name = served_name(step.change.request.lora_name)
        steps = self._steps.setdefault(name, deque())
        steps.append(step)
        if len(steps) == 1:
            task = asyncio.create_task(self._run_all(name, steps), name=f"adapter-{name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @property
    def names(self) -> set[str]:
        """Names of what is being changed, or is yet to be."""
        return {step.change.request.lora_name for steps in self._steps.values() for step in steps}

    def disown(self) -> None:
        """Forget changes of the fleet that have not begun; nobody waits for those under way any more.

        What a lane is given later still waits for what is left in it.
        """
        for steps in self._steps.values():
            first, *later = steps
            first.epoch = None
            steps.clear()
            steps.extend([first, *(step for step in later if step.reason is not None)])

    def is_through(self, name: str, epoch: int) -> bool:
        """Whether no change of an adapter up to `epoch` is left to do, nor what it holds to be given up."""
        return all(step.reason is None and step.change.epoch > epoch for step in self._steps.get(name, ()))

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_all(self, name: str, steps: deque[Step]) -> None:
        try:
            while steps:
                try:
                    await self._run(steps[0])
                except Exception:
                    logger.exception("a change of adapter %r was not carried out", name)
                steps.popleft()
                self._progress.ring()
        finally:
            del self._steps[name]
