"""The time a run has, and what it had no time for."""

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds from its making on.

    Attributes:
        limit_s: How long everything may take.
        dropped: Names of what was left out to keep to it.
    """

    limit_s: float
    dropped: list[str] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)

    @property
    def spent_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds until the limit; negative past it."""
        return self.limit_s - self.spent_s

    def has(self, needed_s: float, name: str) -> bool:
        """Whether that much time is left; what is not begun for want of it is noted by name."""
        if self.left_s >= needed_s:
            return True
        self.dropped.append(name)
        return False
