"""Gauges that hold are set again before Ray takes them off its page."""

import threading

import pytest

from deployments import kept_gauge
from deployments.kept_gauge import KEPT_EVERY_S, GaugeKeeper, KeptGauge
from tests.unit.recorded_metrics import RecordedMetric, Shown


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedMetric, "by_name", {})
    monkeypatch.setattr(kept_gauge, "Gauge", RecordedMetric)


def shown(name: str) -> Shown:
    return RecordedMetric.by_name[name].shown


def test_what_was_not_set_lately_is_set_again_as_it_was() -> None:
    clock = Clock()
    gauge = KeptGauge("held", "Things.", ("tier",), clock)
    gauge.set(2, {"tier": "slot"})
    gauge.set(3, {"tier": "host"})
    clock.now_s += KEPT_EVERY_S
    gauge.set(4, {"tier": "slot"})
    shown("held").clear()
    gauge.keep()
    assert shown("held") == {("host",): 3}, "the other one was set a moment ago"
    clock.now_s += KEPT_EVERY_S
    gauge.keep()
    assert shown("held") == {("host",): 3, ("slot",): 4}


def test_a_gauge_without_labels_is_kept_too() -> None:
    clock = Clock()
    gauge = KeptGauge("slots", "Slots.", clock=clock)
    gauge.keep()
    assert shown("slots") == {}, "nothing is made up before it is set"
    gauge.set(4)
    clock.now_s += KEPT_EVERY_S
    shown("slots").clear()
    gauge.keep()
    assert shown("slots") == {(): 4}


def test_a_thread_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    again = threading.Event()
    monkeypatch.setattr(KeptGauge, "keep", lambda _: again.set())
    gauge = KeptGauge("slots", "Slots.")
    keeper = GaugeKeeper(every_s=0.01)
    keeper.add(gauge)
    assert again.wait(10)
