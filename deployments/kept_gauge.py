"""`KeptGauge`: a gauge of Ray that stays on the page of metrics while nothing happens."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakSet

from ray.serve.metrics import Gauge

KEPT_EVERY_S = 5.0
"""Ray reports a gauge once for each time it was set, every 10 s, and takes it off its page 20 s after the last report
(`metrics_report_interval_ms`)."""


class KeptGauge:
    """Set when its value changes; what was not set lately is set again by a thread of the process.

    For values that hold until they are set anew. A value that ages, or that only its owner's life vouches for, belongs
    in a plain gauge, so that its absence tells.

    Args:
        name: As for Ray's `Gauge`, like the two that follow.
        description: What is measured, with its unit.
        tag_keys: Of each series.
        clock: Seconds, never falling.
    """

    def __init__(
        self, name: str, description: str, tag_keys: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gauge = Gauge(name, description, tuple(tag_keys))
        self._clock = clock
        # Held while Ray is told: what is set again must not come after what was set meanwhile.
        self._lock = threading.Lock()
        # By the values of the tags, in their order: the tags, the value, and when it was last set.
        self._series: dict[tuple[str, ...], tuple[Mapping[str, str], float, float]] = {}
        KEEPER.add(self)

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Set one series. May be called on any thread."""
        tags = tags or {}
        with self._lock:
            self._series[tuple(tags.values())] = (tags, value, self._clock())
            self._gauge.set(value, dict(tags))

    def keep(self) -> None:
        """Set again what was not set lately. May be called on any thread."""
        latest_s = self._clock() - KEPT_EVERY_S / 2
        for key in list(self._series):
            with self._lock:
                tags, value, set_s = self._series[key]
                if set_s < latest_s:
                    self._gauge.set(value, dict(tags))


class GaugeKeeper:
    """Keeps gauges for as long as they live, by a thread that starts with the first one and ends after the last.

    Args:
        every_s: How often each is kept.
    """

    def __init__(self, every_s: float = KEPT_EVERY_S) -> None:
        self._every_s = every_s
        self._gauges: WeakSet[KeptGauge] = WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, gauge: KeptGauge) -> None:
        """Keep one more."""
        with self._lock:
            self._gauges.add(gauge)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kept-gauges", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while self._is_needed():
            time.sleep(self._every_s)
            self._keep()

    def _is_needed(self) -> bool:
        with self._lock:
            if not self._gauges:
                self._thread = None
            return self._thread is not None

    def _keep(self) -> None:
        # In a function of its own: what it names lives no longer than that.
        with self._lock:
            gauges = list(self._gauges)
        for gauge in gauges:
            gauge.keep()


KEEPER = GaugeKeeper()
"""Of this process."""
