"""How long adapters take into slots, measured by where they were before."""

import threading
from collections import Counter

MIB = 1 << 20

FADE = 0.9
"""What a measurement counts for after the next one: conditions change, and so do adapters."""

HOST, DISK, REMOTE = "host", "disk", "remote"


class _Rate:
    """Time over size of the last measurements, the newer ones counting more."""

    def __init__(self) -> None:
        self._ms = 0.0
        self._mib = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self._ms = FADE * self._ms + 1e3 * seconds
        self._mib = FADE * self._mib + num_bytes / MIB

    @property
    def ms_per_mib(self) -> float | None:
        return self._ms / self._mib if self._mib else None


class LoadTimes:
    """Measurements of one engine's loads. Thread-safe.

    Attributes:
        num_loads: Slots written, by where the adapter was ("host" or "disk"), and downloads ("remote").
        load_s: Seconds of those.
    """

    def __init__(self) -> None:
        self.num_loads: Counter[str] = Counter()
        self.load_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._rates = {HOST: _Rate(), DISK: _Rate(), REMOTE: _Rate()}

    def wrote(self, num_bytes: int, seconds: float, read_s: float | None) -> None:
        """Note a slot that was written: the adapter's size, the time from its slot to its last byte there, and how long
        its files had been read for it before; None where they were in memory.
        """
        with self._lock:
            tier = HOST if read_s is None else DISK
            self.num_loads[tier] += 1
            self.load_s[tier] = self.load_s.get(tier, 0.0) + seconds + (read_s or 0.0)
            self._rates[HOST].add(num_bytes, seconds)

    def read(self, num_bytes: int, seconds: float) -> None:
        """Note a read from files to host memory."""
        with self._lock:
            self._rates[DISK].add(num_bytes, seconds)

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """Note a download."""
        with self._lock:
            self.num_loads[REMOTE] += 1
            self.load_s[REMOTE] = self.load_s.get(REMOTE, 0.0) + seconds
            self._rates[REMOTE].add(num_bytes, seconds)

    def ms_per_mib(self) -> dict[str, float]:
        """Milliseconds from each tier to a slot for a MiB of adapter; tiers that nothing came from are left out."""
        with self._lock:
            found: dict[str, float] = {}
            so_far = 0.0
            # Each way goes through those before it.
            for tier in (HOST, DISK, REMOTE):
                step = self._rates[tier].ms_per_mib
                if step is not None:
                    so_far += step
                    found[tier] = so_far
            return found
