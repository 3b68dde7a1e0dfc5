"""Time by phase of work whose phases take turns."""

import time


class LapClock:
    """Adds up, phase by phase, the seconds since the lap before; for one thread.

    Attributes:
        phases_s: Seconds by phase.
    """

    def __init__(self, *phases: str) -> None:
        """Start with these phases at zero."""
        self.phases_s = dict.fromkeys(phases, 0.0)
        self._lap_started = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count the time since the last call, or since the clock was made, as spent on this phase."""
        now = time.perf_counter()
        self.phases_s[phase] += now - self._lap_started
        self._lap_started = now
