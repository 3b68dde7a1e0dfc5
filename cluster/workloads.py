"""Workloads for the simulator: which adapter is asked for when, and for how long an answer. All from a seed."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

MEAN_TOKENS = 100.0
_TOKENS_SIGMA = 0.6
"""Of the logarithm of an answer's length."""
_DRIFT_PART = 0.25
"""Part of the adapters that exchange their popularity at each step of a drift."""
_MIXED_MIB = (10.0, 20.0, 40.0, 80.0)
"""Sizes of adapters of ranks 8, 16, 32 and 64."""


class Fault(NamedTuple):
    """A replica that goes or comes."""

    kind: Literal["kill", "add"]
    at: float
    """After this part of the requests."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A fleet, and what is asked of it."""

    name: str
    num_replicas: int = 8
    num_slots: int = 16
    """Of each replica."""
    catalogue: float = 4.0
    """Adapters, over all slots of the fleet."""
    zipf: float = 0.9
    """The k-th adapter is asked for in proportion to 1 / k to this power; 0: all alike."""
    hot_share: float = 0.0
    """Share of the requests that one adapter has by itself; the rest follow `zipf`."""
    cv: float = 1.0
    """Coefficient of variation of the times between requests, Gamma distributed; 1 is Poisson."""
    load: float = 0.7
    """Requests a second, over what the fleet can serve with every adapter in a slot of every replica."""
    crowd: float = 0.0
    """Share of the requests that the coldest adapter has between 0.4 and 0.7 of the run."""
    drift: int = 0
    """How often in the run a quarter of the adapters exchange their popularity."""
    mixed_ranks: bool = False
    """Adapters of 10 to 80 MiB instead of 40."""
    faults: tuple[Fault, ...] = ()

    @property
    def num_adapters(self) -> int:
        """How many there are."""
        return max(1, round(self.catalogue * self.num_replicas * self.num_slots))

    def popularity(self) -> NDArray[np.float64]:
        """Share of the requests of each adapter, most popular first; sums to 1."""
        shares = np.arange(1, self.num_adapters + 1, dtype=np.float64) ** -self.zipf
        if self.hot_share:
            shares[1:] *= (1 - self.hot_share) / max(shares[1:].sum(), 1e-300)
            shares[0] = self.hot_share
        return shares / float(shares.sum())

    def top_share(self, number: int = 10) -> float:
        """Share of the requests that so many most popular adapters have together."""
        return float(self.popularity()[:number].sum())


class Trace(NamedTuple):
    """Requests in order of arrival. Adapters are numbers; `names` and `mib` are by number."""

    times_ms: list[float]
    adapters: list[int]
    tokens: list[float]
    names: list[str]
    mib: list[float]


def make_trace(workload: Workload, num_requests: int, rate_per_ms: float, seed: int) -> Trace:
    """Draw so many requests, `rate_per_ms` of them in a millisecond on average.

    Names depend on the seed, so that runs of different seeds differ in where hashing puts the adapters.
    """
    rng = np.random.default_rng(seed)
    shape = workload.cv**-2
    gaps = rng.gamma(shape, 1 / (shape * rate_per_ms), num_requests)
    tokens = rng.lognormal(np.log(MEAN_TOKENS) - _TOKENS_SIGMA**2 / 2, _TOKENS_SIGMA, num_requests)
    num_adapters = workload.num_adapters
    mib = rng.choice(_MIXED_MIB, num_adapters) if workload.mixed_ranks else np.full(num_adapters, 40.0)
    return Trace(
        times_ms=np.cumsum(gaps).tolist(),
        adapters=_drawn_adapters(workload, num_requests, rng).tolist(),
        tokens=np.maximum(1.0, np.rint(tokens)).tolist(),
        names=[f"{seed}-{number}" for number in range(num_adapters)],
        mib=mib.tolist(),
    )


def _drawn_adapters(workload: Workload, num_requests: int, rng: np.random.Generator) -> NDArray[Any]:
    ranks = np.searchsorted(np.cumsum(workload.popularity()), rng.random(num_requests), side="right")
    ranks = np.minimum(ranks, workload.num_adapters - 1)
    adapter_of = np.arange(workload.num_adapters)
    adapters = np.empty(num_requests, dtype=np.int64)
    for part in np.array_split(np.arange(num_requests), workload.drift + 1):
        adapters[part] = adapter_of[ranks[part]]
        moving = rng.choice(workload.num_adapters, int(workload.num_adapters * _DRIFT_PART), replace=False)
        adapter_of[moving] = adapter_of[rng.permutation(moving)]
    crowded = np.arange(int(0.4 * num_requests), int(0.7 * num_requests))
    crowded = crowded[rng.random(len(crowded)) < workload.crowd]
    adapters[crowded] = workload.num_adapters - 1
    return adapters
