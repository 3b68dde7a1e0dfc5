"""`QueueMetrics`: which requests wait for their first token, and which are refused before any replica."""

from collections.abc import Mapping
from typing import Literal, get_args

from deployments.kept_counter import KeptCounter
from deployments.kept_gauge import KeptGauge
from deployments.metric_labels import AdapterLabels, LabelledGauge

Reason = Literal["queue_full", "adapter_late", "no_replica"]
"""Why a request is refused."""


class QueueMetrics:
    """One for each process that answers requests. `docs/metrics.md` lists them."""

    def __init__(self) -> None:
        self._labels = AdapterLabels()
        self._refused = KeptCounter("lora_fleet_requests_refused", "Requests refused before any replica.", ("reason",))
        for reason in get_args(Reason):
            self._refused.inc(0, {"reason": reason})
        self._queued = KeptGauge(
            "lora_fleet_requests_queued", "Requests that wait for their first token.", ("adapter",)
        )
        self._shown = LabelledGauge()

    def refused(self, reason: Reason) -> None:
        """Count a refusal."""
        self._refused.inc(1, {"reason": reason})

    def set_queued(self, by_adapter: Mapping[str | None, float]) -> None:
        """Show how many requests of each adapter wait; None is the base model."""
        for label, value in self._shown.complete(self._labels.summed(by_adapter)).items():
            self._queued.set(value, {"adapter": label})
