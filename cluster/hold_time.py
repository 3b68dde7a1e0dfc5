"""`HoldTime`: how long requests are under way, measured without following any."""

_KEPT = 0.98
"""What counts of a second ago still."""
_LEAST = 5.0
"""Requests that must have ended before anything is said."""


class HoldTime:
    """By Little's law: the mean number of requests under way, over the rate at which they end. The last minute counts
    most. Times are seconds on one clock of the caller's choice."""

    def __init__(self) -> None:
        self._num_now = 0
        self._area = 0.0
        self._num_ended = 0.0
        self._last: float | None = None

    @property
    def mean_s(self) -> float | None:
        """Seconds from a request's beginning to its end; None where too few have ended."""
        return self._area / self._num_ended if self._num_ended >= _LEAST else None

    def begin(self, now: float) -> None:
        """A request begins."""
        self._advance(now)
        self._num_now += 1

    def end(self, now: float) -> None:
        """A request ends."""
        self._advance(now)
        self._num_now = max(0, self._num_now - 1)
        self._num_ended += 1

    def lose(self, number: int, now: float) -> None:
        """So many requests are no longer followed: how long they take is not known."""
        self._advance(now)
        self._num_now = max(0, self._num_now - number)

    def _advance(self, now: float) -> None:
        passed_s = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        kept = _KEPT**passed_s
        self._area = self._area * kept + self._num_now * passed_s
        self._num_ended *= kept
