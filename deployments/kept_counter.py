"""`KeptCounter`: a counter that is on the page of metrics before it has anything to count."""

import threading
from collections.abc import Mapping, Sequence

from deployments.kept_gauge import KeptGauge


class KeptCounter:
    """Counts in this process, and shows the sum through a gauge of Ray, which `deployments.exposition` calls a counter.

    Ray's own counter refuses an increment of 0: its series would come with what was counted first, and no rate or
    increase that Prometheus computes would ever tell of that. The agent of a node would show it, too, for as long as
    the node lives, whatever has become of the process.

    Args:
        name: As for Ray's `Counter`, without `_total`.
        description: What is counted, with its unit.
        tag_keys: Of each series. Without any, the one that there is begins at 0 at once.
    """

    def __init__(self, name: str, description: str, tag_keys: Sequence[str] = ()) -> None:
        self._gauge = KeptGauge(f"{name}_total", description, tag_keys)
        # Held until the sum is shown: a lower one that is shown later would look like a counter that began anew.
        self._lock = threading.Lock()
        # By the values of the tags, in their order.
        self._sums: dict[tuple[str, ...], float] = {}
        if not tag_keys:
            self.inc(0)

    def inc(self, amount: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        """Count; 0 lets a series begin, where it has not yet. May be called on any thread."""
        tags = tags or {}
        key = tuple(tags.values())
        with self._lock:
            if amount or key not in self._sums:
                self._sums[key] = self._sums.get(key, 0.0) + amount
                self._gauge.set(self._sums[key], tags)
