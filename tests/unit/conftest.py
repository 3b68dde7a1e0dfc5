"""Fixtures of several unit tests."""

import pytest

from deployments import kept_gauge
from tests.unit.recorded_metrics import RecordedMetric


@pytest.fixture
def recorded_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are recorded in this process, from none on: see `shown`."""
    monkeypatch.setattr(RecordedMetric, "by_name", {})
    monkeypatch.setattr(kept_gauge, "Gauge", RecordedMetric)
