"""`RoutingMetrics`: what the choice of replicas costs, as gauges of Ray."""

from ray.serve.metrics import Gauge

from deployments.counted_histogram import CountedHistogram
from deployments.show_timer import ShowTimer

DECISION_BOUNDS_S = [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2]


class RoutingMetrics:
    """One for each process that holds a handle. `docs/metrics.md` lists them."""

    def __init__(self) -> None:
        self._decision_s = CountedHistogram(
            "lora_fleet_decision_seconds", "Seconds to choose a replica.", DECISION_BOUNDS_S, by_adapter=False
        )
        self._timer = ShowTimer(self._decision_s.show)
        self._table_age = Gauge("lora_fleet_table_age_seconds", "Since the router actor was last heard of.")

    def observe_decision(self, seconds: float) -> None:
        """Note how long the choice of a replica took."""
        self._decision_s.observe(seconds)
        self._timer.soon()

    def set_table_age(self, seconds: float) -> None:
        """Show how long ago the table, or word that it still holds, came."""
        self._table_age.set(seconds)
