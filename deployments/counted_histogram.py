"""`CountedHistogram`: a histogram that is counted in this process, and shown through gauges of Ray."""

from bisect import bisect_left
from collections.abc import Sequence

from deployments.kept_gauge import KeptGauge

ADAPTER = "adapter"
INFINITE = float("inf")


class CountedHistogram:
    """Shows exactly the series that Prometheus expects of a histogram: `_bucket` by `le`, `_sum` and `_count`.

    Ray's own histogram does not do here: a node's agent makes its sum up from the middles of the buckets, takes every
    single observation up in a loop, and has no way to observe many at once. What is shown is as of the last `show`.

    Args:
        name: Without the suffixes.
        description: What is measured, with its unit.
        bounds: Upper bounds of the buckets, rising; one without a bound is added.
        by_adapter: Whether each observation has the label of an adapter.
    """

    def __init__(self, name: str, description: str, bounds: Sequence[float], *, by_adapter: bool = True) -> None:
        self._bounds = (*bounds, INFINITE)
        self._by_adapter = by_adapter
        tags = (ADAPTER,) if by_adapter else ()
        self._bucket = KeptGauge(f"{name}_bucket", description, (*tags, "le"))
        self._sum = KeptGauge(f"{name}_sum", description, tags)
        self._count = KeptGauge(f"{name}_count", description, tags)
        self._les = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        self._changed: set[str] = set()

    def observe(self, value: float, label: str = "", times: int = 1) -> None:
        """Count a value, as if it had been observed so many times."""
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * len(self._bounds)
            self._sums[label] = 0.0
        counts[bisect_left(self._bounds, value)] += times
        self._sums[label] += value * times
        self._changed.add(label)

    def show(self) -> None:
        """Hand to Ray what has changed since the last time."""
        changed, self._changed = self._changed, set()
        for label in changed:
            tags = {ADAPTER: label} if self._by_adapter else {}
            num_up_to = 0
            for le, count in zip(self._les, self._counts[label], strict=True):
                num_up_to += count
                self._bucket.set(num_up_to, {**tags, "le": le})
            self._sum.set(self._sums[label], tags)
            self._count.set(num_up_to, tags)
