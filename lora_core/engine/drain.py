"""How long requests of adapters that were unloaded or replaced may go on."""

from collections.abc import Collection

from lora_core.types import AdapterRef


class Drain:
    """Notes since when generations have been unloaded with requests in progress.

    Args:
        timeout_s: How long their requests may take to end.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._since_s: dict[AdapterRef, float] = {}

    @property
    def is_idle(self) -> bool:
        """Whether none was there at the last look."""
        return not self._since_s

    def overdue(self, retired: Collection[AdapterRef], now_s: float) -> set[AdapterRef]:
        """Of the generations that are unloaded with requests in progress now: those whose time is over."""
        self._since_s = {ref: self._since_s.get(ref, now_s) for ref in retired}
        return {ref for ref, since_s in self._since_s.items() if now_s - since_s >= self.timeout_s}
