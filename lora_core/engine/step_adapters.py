"""Which adapters take part in a step, where not all of them may."""

from collections.abc import Iterable

from lora_core.engine.request import ScheduledRow
from lora_core.types import AdapterRef


class StepAdapters:
    """Lets at most so many adapters take part in a step, by turns: those first that have waited for one longest.

    One that has just come is behind all that wait already, and before those that were in the last step: however others
    come and go, nobody is passed over again and again.
    """

    def __init__(self, max_adapters: int | None) -> None:
        """Set the limit; None is no limit."""
        self._max_adapters = max_adapters
        self._chosen: set[AdapterRef] = set()
        self._step = 0
        # The first step that each could have been in since its last one, or since it came; and whether it had one.
        self._waiting: dict[AdapterRef, tuple[int, bool]] = {}

    def choose(self, running: Iterable[AdapterRef]) -> None:
        """Begin a step: choose among the adapters whose requests run."""
        if self._max_adapters is None:
            return
        self._step += 1
        came = self._step, False
        self._waiting = {adapter: self._waiting.get(adapter, came) for adapter in dict.fromkeys(running)}
        order = sorted(self._waiting, key=self._waiting.__getitem__)
        self._chosen = set(order[: self._max_adapters])

    def add(self, adapter: AdapterRef) -> None:
        """Take note of an adapter that has come during the step: it takes part if there is room."""
        if self._max_adapters is not None and len(self._chosen) < self._max_adapters:
            self._chosen.add(adapter)

    def admits(self, adapter: AdapterRef | None) -> bool:
        """Whether requests of the adapter may be in the step; the base model's always may."""
        return self._max_adapters is None or adapter is None or adapter in self._chosen

    def ran(self, rows: Iterable[ScheduledRow]) -> None:
        """Take note of the step that was put together."""
        if self._max_adapters is None:
            return
        for adapter in {row.adapter for row in rows} - {None}:
            if adapter is not None:
                self._waiting[adapter] = self._step + 1, True
