"""The points of `make bench-placement`.

`grid`: two fleets at four popularities and with one hot adapter, and one fleet on which everything else is varied by
itself. The settings of `cluster.placement` and `cluster.copies` were chosen by looking at it. `held_out`: other fleets,
popularities and disturbances, with other seeds, which nobody looked at for that.
"""

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from cluster.baselines import policies
from cluster.placement import TERMS, PlacementSettings
from cluster.simulator import Outcome, simulate
from cluster.workloads import Fault, Workload

SMALL = Workload(name="4 x 16", num_replicas=4, num_slots=16, catalogue=16.0)
LARGE = Workload(name="8 x 32", num_replicas=8, num_slots=32, catalogue=4.0)
CENTRE = Workload(name="8 x 16", num_replicas=8, num_slots=16, catalogue=4.0)

FEW = Workload(name="3 x 32", num_replicas=3, num_slots=32, catalogue=8.0)
ODD = Workload(name="6 x 24", num_replicas=6, num_slots=24, catalogue=5.0)
MANY = Workload(name="12 x 8", num_replicas=12, num_slots=8, catalogue=3.0)
_TWO_FAULTS = (Fault("kill", 0.35), Fault("add", 0.5), Fault("kill", 0.65), Fault("add", 0.75))

HELD_OUT_SEED = 1000
"""The first seed of points held out."""

T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t by number of seeds, for intervals of 95 %."""


class Run(NamedTuple):
    """One simulation to do."""

    workload: Workload
    policy: str
    seed: int
    num_requests: int
    without: tuple[str, ...] = ()


class Estimate(NamedTuple):
    """Mean over seeds, and half of its interval of 95 %."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} +- {self.half:.3f}"


def grid() -> list[Workload]:
    """All points."""
    points = [
        replace(fleet, name=f"{fleet.name}, Zipf {zipf}", zipf=zipf)
        for fleet in (SMALL, LARGE)
        for zipf in (0.0, 0.9, 1.2, 1.5)
    ]
    points += [replace(fleet, name=f"{fleet.name}, one has half", hot_share=0.5) for fleet in (SMALL, LARGE)]
    points += [replace(CENTRE, name=f"arrivals of CV {cv:g}", cv=cv) for cv in (1.0, 2.0, 4.0, 8.0)]
    points += [replace(CENTRE, name=f"load {load:.0%}", load=load) for load in (0.5, 0.9, 1.1)]
    points += [replace(CENTRE, name=f"adapters over slots {n:g}", catalogue=n) for n in (0.5, 1.0, 2.0, 8.0, 16.0)]
    points += [
        replace(CENTRE, name="flash crowd", crowd=0.3),
        replace(CENTRE, name="drift", drift=4),
        replace(CENTRE, name="mixed ranks", mixed_ranks=True),
        replace(CENTRE, name="a replica dies, one comes", faults=(Fault("kill", 0.45), Fault("add", 0.6))),
    ]
    return points


def held_out() -> list[Workload]:
    """Points that no setting was chosen by."""
    points = [
        replace(fleet, name=f"{fleet.name}, Zipf {zipf}", zipf=zipf)
        for fleet in (FEW, ODD, MANY)
        for zipf in (0.6, 1.05, 1.35)
    ]
    points += [
        replace(ODD, name="one has a third", hot_share=1 / 3),
        replace(ODD, name="arrivals of CV 3", cv=3.0),
        replace(ODD, name="load 60%", load=0.6),
        replace(ODD, name="load 100%", load=1.0),
        replace(ODD, name="adapters over slots 1.5", catalogue=1.5),
        replace(ODD, name="a crowd of a fifth, CV 2", crowd=0.2, cv=2.0),
        replace(ODD, name="drift, twice", drift=2),
        replace(MANY, name="drift, seven times, mixed ranks", drift=7, mixed_ranks=True),
        replace(MANY, name="two replicas die, two come", faults=_TWO_FAULTS),
    ]
    return points


def ablations(num_requests: int, seeds: Sequence[int]) -> list[Run]:
    """Ours without each term in turn, where popularity is flat and where it is steep."""
    points = [CENTRE, replace(LARGE, name="8 x 32, Zipf 1.5", zipf=1.5)]
    return [
        Run(point, policy, seed, num_requests, without)
        for point in points
        for policy, without in [("ours", ()), *(("ours", (term,)) for term in TERMS), ("ours, no plan", ())]
        for seed in seeds
    ]


def simulate_all(runs: Sequence[Run], num_workers: int) -> list[Outcome]:
    """Do them all, in their order."""
    if num_workers == 1:
        return [simulate_one(run) for run in runs]
    with ProcessPoolExecutor(num_workers) as pool:
        return list(pool.map(simulate_one, runs, chunksize=4))


def simulate_one(run: Run) -> Outcome:
    """Do one."""
    policy = next(policy for policy in policies() if policy.name == run.policy.partition(",")[0])
    if run.policy.endswith("no plan"):
        policy = replace(policy, has_plan=False)
    return simulate(run.workload, policy, run.seed, run.num_requests, PlacementSettings(without=run.without))


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of one figure over seeds; one seed has no interval."""
    if len(values) < 2:
        return Estimate(values[0], math.nan)
    half = T_975.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(statistics.mean(values), half)
