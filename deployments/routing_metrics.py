"""`RoutingMetrics`: what the routing of requests costs, and whom it refuses, as gauges and counters of Ray."""

from collections.abc import Mapping

from ray.serve.metrics import Counter, Gauge, Histogram

from deployments.metric_labels import AdapterLabels, LabelledGauge

DECISION_BOUNDS_MS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
WAIT_BOUNDS_MS = [1, 5, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 120_000]

DECISIONS_PER_SAMPLE = 8
"""Of so many decisions one is shown: a histogram costs a part of what a decision does."""


class RoutingMetrics:
    """One for each process that holds a handle. `docs/metrics.md` lists them."""

    def __init__(self) -> None:
        self._labels = AdapterLabels()
        self._num_decisions = 0
        self._decision_ms = Histogram(
            "lora_fleet_decision_ms", "Milliseconds to choose a replica (sampled).", DECISION_BOUNDS_MS
        )
        self._table_age = Gauge("lora_fleet_table_age_seconds", "Since the router actor was last heard of.")
        self._refused = Counter("lora_fleet_requests_refused", "Requests refused before any replica.", ("reason",))
        self._queued = Gauge("lora_fleet_requests_queued", "Requests that wait for a replica.", ("adapter",))
        self._shown = LabelledGauge()
        self._wait_ms = Histogram(
            "lora_fleet_queue_wait_ms", "Milliseconds that requests waited for a replica.", WAIT_BOUNDS_MS, ("adapter",)
        )

    def observe_decision(self, seconds: float) -> None:
        """Note how long the choice of a replica took."""
        self._num_decisions += 1
        if self._num_decisions % DECISIONS_PER_SAMPLE == 0:
            self._decision_ms.observe(1000 * seconds)

    def set_table_age(self, seconds: float) -> None:
        """Show how long ago the table, or word that it still holds, came."""
        self._table_age.set(seconds)

    def refused(self, reason: str) -> None:
        """Count a refusal; `reason` is one of few words."""
        self._refused.inc(1, {"reason": reason})

    def set_queued(self, by_adapter: Mapping[str | None, float]) -> None:
        """Show how many requests of each adapter wait; None is the base model."""
        for label, value in self._shown.complete(self._labels.summed(by_adapter)).items():
            self._queued.set(value, {"adapter": label})

    def observe_wait(self, adapter: str | None, seconds: float) -> None:
        """Note how long a request waited before it was sent."""
        self._wait_ms.observe(1000 * seconds, {"adapter": self._labels.of(adapter)})
