"""Gauges that hold are set again before Ray takes them off its page."""

import threading
from collections.abc import Mapping

import pytest

from deployments.kept_gauge import KEPT_EVERY_S, GaugeKeeper, KeptGauge
from tests.unit.recorded_metrics import RecordedMetric, shown


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


pytestmark = pytest.mark.usefixtures("recorded_metrics")


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


def test_what_is_set_meanwhile_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that fell back would look to Prometheus like one that began anew."""
    clock = Clock()
    gauge = KeptGauge("sum", "Things.", clock=clock)
    gauge.set(5)
    clock.now_s += KEPT_EVERY_S
    setting = threading.Thread(target=gauge.set, args=(6,))

    def set_slowly(metric: RecordedMetric, value: float, tags: Mapping[str, str] | None = None) -> None:
        if value == 5:
            setting.start()
            setting.join(0.2)
        metric.shown[()] = value

    monkeypatch.setattr(RecordedMetric, "set", set_slowly)
    gauge.keep()
    setting.join(10)
    assert shown("sum") == {(): 6}


def test_a_thread_keeps_them_for_as_long_as_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    again = threading.Event()
    monkeypatch.setattr(KeptGauge, "keep", lambda _: again.set())
    keeper = GaugeKeeper(every_s=0.01)
    for _ in range(2):
        gauge = KeptGauge("slots", "Slots.")
        keeper.add(gauge)
        thread = keeper._thread
        assert thread is not None
        assert again.wait(10)
        del gauge
        thread.join(10)
        assert not thread.is_alive()
        again.clear()
