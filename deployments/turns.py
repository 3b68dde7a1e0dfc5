"""`Turns`: operations that outlive whoever asked for them, one at a time for each name."""

import asyncio
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Turns:
    """Operations on one name take turns, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        # Held by whoever changes a name; forgotten when nobody does.
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    @property
    def are_idle(self) -> bool:
        """Whether nothing is under way, and nothing kept for its sake."""
        return not (self._tasks or self._locks)

    def run(self, operation: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Run an operation apart from its caller, so that a caller that goes away does not leave it half done."""
        task = asyncio.get_running_loop().create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def turn(self, name: str) -> asyncio.Lock:
        """Held, in a `with`, by the operation on a name whose turn it is."""
        return self._locks.setdefault(name, asyncio.Lock())

    def is_taken(self, name: str) -> bool:
        """Whether an operation on a name is under way."""
        lock = self._locks.get(name)
        return lock is not None and lock.locked()

    def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
