"""`RoutingMetrics`: what the routing of requests costs, and whom it refuses, as gauges and counters of Ray."""

from collections.abc import Mapping

from ray.serve.metrics import Counter, Gauge

from deployments.counted_histogram import CountedHistogram
from deployments.kept_gauge import KeptGauge
from deployments.metric_labels import AdapterLabels, LabelledGauge
from deployments.show_timer import ShowTimer

DECISION_BOUNDS_S = [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2]


class RoutingMetrics:
    """One for each process that holds a handle. `docs/metrics.md` lists them."""

    def __init__(self) -> None:
        self._labels = AdapterLabels()
        self._decision_s = CountedHistogram(
            "lora_fleet_decision_seconds", "Seconds to choose a replica.", DECISION_BOUNDS_S, by_adapter=False
        )
        self._timer = ShowTimer(self._decision_s.show)
        self._table_age = Gauge("lora_fleet_table_age_seconds", "Since the router actor was last heard of.")
        self._refused = Counter("lora_fleet_requests_refused", "Requests refused before any replica.", ("reason",))
        self._queued = KeptGauge(
            "lora_fleet_requests_queued", "Requests that wait for their first token.", ("adapter",)
        )
        self._shown = LabelledGauge()

    def observe_decision(self, seconds: float) -> None:
        """Note how long the choice of a replica took."""
        self._decision_s.observe(seconds)
        self._timer.soon()

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
