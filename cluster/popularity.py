"""`Popularity`: each adapter's share of the work lately, slow to forget and quick to notice."""

import math
from collections.abc import Mapping

_FORGOTTEN = 1e-7
"""An adapter whose share has sunk below this is dropped."""
_RESCALE_AT = 1e100
_CHANCE = 1.5
"""Standard errors by which the windows may differ by chance."""


class Popularity:
    """Exponentially weighted shares over two windows; all times are seconds on one clock of the caller's choice.

    The long window says how popular an adapter is. The short one is believed where it differs by more than chance
    does, and the more so the further it differs (the non-negative garrote, Breiman 1995): who comes and who goes is
    noticed within seconds, a few requests by chance are not.

    Args:
        half_life_s: Work of so long ago counts half.
        fast_half_life_s: The same in the short window.
    """

    def __init__(self, half_life_s: float = 60.0, fast_half_life_s: float = 10.0) -> None:
        if not 0 < fast_half_life_s <= half_life_s:
            raise ValueError(f"fast_half_life_s is {fast_half_life_s}; expected above 0, and at most {half_life_s}")
        self._slow, self._fast = _Average(half_life_s), _Average(fast_half_life_s)
        self._grain = 1.0

    def add(self, work: Mapping[str, float], *, total: float, now: float, grain: float = 1.0) -> None:
        """Note work done up to `now`.

        Args:
            work: By adapter, in one unit throughout (requests, or tokens).
            total: All of it, that of the base model included.
            now: When; earlier than a time noted before counts as that.
            grain: What a typical request comes to in that unit. The fewer requests, the less the short window says.
        """
        self._grain = grain
        for average in (self._slow, self._fast):
            average.add(work, total, now)

    def forget(self, name: str) -> None:
        """Drop an adapter; what it did stays part of the whole."""
        for average in (self._slow, self._fast):
            average.sums.pop(name, None)

    def shares(self) -> dict[str, float]:
        """Each adapter's share of all work. Their sum is below 1 by about what the base model did."""
        shares = self._slow.shares()
        num_requests = self._fast.recent_total / self._grain
        if num_requests < 1:
            return shares
        recent = self._fast.shares()
        # With fewer requests than this in both windows, they cannot differ by more than chance.
        least = ((_CHANCE / 2 + math.sqrt(3 / 8)) ** 2 - 3 / 8) / num_requests
        for name in {name for found in (shares, recent) for name, share in found.items() if share >= least}:
            usual, lately = shares.get(name, 0.0), recent.get(name, 0.0)
            # The root of a count has an error of a half, whatever the count (Anscombe 1948).
            errors = 2 * abs(math.sqrt(lately * num_requests + 3 / 8) - math.sqrt(usual * num_requests + 3 / 8))
            if errors > _CHANCE:
                shares[name] = usual + (lately - usual) * (1 - (_CHANCE / errors) ** 2)
        return shares


class _Average:
    """Sums in which new work weighs more than old: what was added is never touched again."""

    def __init__(self, half_life_s: float) -> None:
        self.sums: dict[str, float] = {}
        self._half_life_s = half_life_s
        self._total = 0.0
        self._weight = 1.0
        self._now: float | None = None

    @property
    def recent_total(self) -> float:
        """All work, that of a half-life ago counted half."""
        return self._total / self._weight

    def add(self, work: Mapping[str, float], total: float, now: float) -> None:
        passed_s = max(0.0, now - self._now) if self._now is not None else 0.0
        self._now = now if self._now is None else max(now, self._now)
        self._weight *= 2.0 ** min(passed_s / self._half_life_s, 300.0)
        for name, amount in work.items():
            self.sums[name] = self.sums.get(name, 0.0) + amount * self._weight
        self._total += max(total, sum(work.values())) * self._weight
        if self._weight > _RESCALE_AT:
            self._rescale()

    def shares(self) -> dict[str, float]:
        least = _FORGOTTEN * self._total
        for name in [name for name, amount in self.sums.items() if amount <= least]:
            del self.sums[name]
        return {name: amount / self._total for name, amount in self.sums.items()}

    def _rescale(self) -> None:
        self.sums = {name: amount / self._weight for name, amount in self.sums.items()}
        self._total /= self._weight
        self._weight = 1.0
