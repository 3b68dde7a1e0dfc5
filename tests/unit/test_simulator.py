"""The simulator: its parts keep their books, and what it says does not change from run to run."""

import dataclasses

import numpy as np
import pytest

from cluster.baselines import Policy, policies
from cluster.simulated_replica import Machine, Request, SimulatedReplica
from cluster.simulator import Outcome, Simulator, saturation_per_ms, simulate
from cluster.workloads import Fault, Workload, make_trace

SMALL = Workload(name="small", num_replicas=3, num_slots=4, catalogue=3.0)
POLICIES = {policy.name: policy for policy in policies()}


def run(workload: Workload, policy: Policy, num_requests: int = 600, seed: int = 0) -> Outcome:
    return simulate(workload, policy, seed, num_requests)


@pytest.mark.parametrize("name", POLICIES)
def test_a_seed_gives_the_same_run_again(name: str) -> None:
    again = {policy.name: policy for policy in policies()}[name]
    first = {policy.name: policy for policy in policies()}[name]
    assert run(SMALL, first) == run(SMALL, again)


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_ends_whatever_happens_to_the_fleet(name: str) -> None:
    faults = (Fault("kill", 0.3), Fault("add", 0.6))
    workload = dataclasses.replace(SMALL, faults=faults, cv=4.0, load=0.9, crowd=0.3, drift=2, mixed_ranks=True)
    trace = make_trace(workload, 500, workload.load * 3 * saturation_per_ms(), seed=1)
    policy = {policy.name: policy for policy in policies()}[name]
    outcome = Simulator(workload, trace, policy, 1).run(to_the_end=True)
    assert outcome.num_answered == 500
    assert 0 <= outcome.hit_rate <= 1
    assert outcome.max_over_mean >= 1


def test_adapters_in_every_slot_are_always_hits_and_those_in_few_are_not() -> None:
    assert run(SMALL, POLICIES["all resident"]).hit_rate == 1
    assert 0.05 < run(SMALL, POLICIES["random"]).hit_rate < 0.6
    assert run(dataclasses.replace(SMALL, catalogue=0.25), POLICIES["random"]).hit_rate > 0.9


def test_ours_hits_more_than_chance_and_is_better_balanced_than_hashing() -> None:
    workload = dataclasses.replace(SMALL, num_slots=8, zipf=1.2)
    ours, chance, hashing = (run(workload, POLICIES[name], 3000) for name in ("ours", "random", "HRW"))
    assert ours.hit_rate > chance.hit_rate + 0.1
    assert ours.max_over_mean < min(hashing.max_over_mean, 1.2)


def test_saturation_is_what_full_batches_give() -> None:
    machine = Machine()
    step_ms = machine.step_ms + machine.seat_ms * machine.num_seats
    assert saturation_per_ms() == pytest.approx(machine.num_seats / step_ms / 100, rel=0.05)


# One replica


def request(adapter: str, arrived_ms: float = 0.0, tokens: float = 10.0) -> Request:
    return Request(adapter, 40.0, tokens, arrived_ms, 0, True)


def replica(num_slots: int = 2, **machine: float) -> SimulatedReplica:
    return SimulatedReplica("r", num_slots, Machine(**machine), dict.fromkeys("abcd", 40.0))  # type: ignore[arg-type]


def load(one: SimulatedReplica, now: float) -> float:
    """Let the next load run to its end; returns when that was."""
    ended = one.next_load(now)
    assert ended is not None
    one.end_load(ended)
    return ended


def test_a_load_takes_its_bytes_time_and_then_the_request_runs_and_hits_follow() -> None:
    one = replica()
    one.accept(request("a"), 0.0)
    assert one.next_finish() is None
    now = load(one, 0.0)
    assert now == 40 * one.machine.disk_ms_per_mib
    ended = one.next_finish()
    assert ended == pytest.approx(now + 10 * (one.machine.step_ms + one.machine.seat_ms))
    one.accept(request("a", now), now)
    assert one.state().resident == {"a"}
    assert (one.counts.num_hits, one.num_in_flight) == (1, 2)
    assert one.finish(one.next_finish() or 0.0).adapter == "a"


def test_requests_that_run_together_slow_one_another() -> None:
    one = replica(seat_ms=10.0)
    one.accept(request("a"), 0.0)
    now = load(one, 0.0)
    alone = one.next_finish()
    one.accept(request("a"), now)
    assert one.next_finish() == pytest.approx(now + 10 * 40)
    assert alone == pytest.approx(now + 10 * 30)


def test_an_adapter_in_use_keeps_its_slot_and_the_least_recently_used_goes_first() -> None:
    one = replica(num_slots=2)
    now = 0.0
    for name in "ab":
        one.accept(request(name, tokens=1), now)
        now = load(one, now)
        one.finish(one.next_finish() or 0.0)
    one.accept(request("a", tokens=1e6), now + 100)
    one.accept(request("c"), now + 100)
    load(one, now + 100)
    assert one.state().resident == {"a", "c"}
    one.accept(request("d"), now + 300)
    assert one.next_load(now + 300) is None, "both slots are in use"


def test_slots_of_kept_adapters_go_last_and_warming_takes_none_of_them() -> None:
    one = replica(num_slots=2)
    one.wish(("a", "b"), frozenset("ab"))
    now = load(one, load(one, 0.0))
    assert one.state().resident == {"a", "b"}
    one.wish(("c",), frozenset("ab"))
    assert one.next_load(now) is None
    one.wish((), frozenset("a"))
    one.accept(request("d"), now)
    load(one, now)
    assert one.state().resident == {"a", "d"}


def test_an_adapter_that_waits_too_long_gets_the_slot_of_another() -> None:
    one = replica(num_slots=1)
    one.accept(request("a", tokens=100), 0.0)
    now = load(one, 0.0)
    one.accept(request("b", now), now)
    assert one.next_load(now) is None
    late = now + one.machine.slot_wait_ms
    assert one.next_load(late) is None, "set aside from now on"
    one.accept(request("a", late), late)
    assert one.started == [], "no more of it start"
    ended = one.next_finish()
    assert ended is not None
    one.finish(ended)
    assert one.next_load(ended) is not None
    assert one.state().loading == {"b"}


# Workloads


def test_popularity_is_as_stated() -> None:
    flat = dataclasses.replace(SMALL, zipf=0.0)
    assert flat.top_share(9) == pytest.approx(9 / 36)
    hot = dataclasses.replace(SMALL, hot_share=0.5)
    assert hot.popularity()[0] == pytest.approx(0.5)
    assert hot.popularity().sum() == pytest.approx(1)
    steep = dataclasses.replace(SMALL, zipf=1.5).popularity()
    assert steep[0] / steep[3] == pytest.approx(8)


def test_arrivals_have_the_rate_and_the_variation_asked_for() -> None:
    for cv in (1.0, 4.0):
        trace = make_trace(dataclasses.replace(SMALL, cv=cv), 20_000, 0.5, seed=3)
        gaps = np.diff([0.0, *trace.times_ms])
        assert gaps.mean() == pytest.approx(2.0, rel=0.15)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.15)
        assert np.mean(trace.tokens) == pytest.approx(100, rel=0.05)


def test_a_crowd_comes_for_the_coldest_adapter_and_goes() -> None:
    trace = make_trace(dataclasses.replace(SMALL, crowd=0.4), 10_000, 1.0, seed=0)
    coldest = [number == SMALL.num_adapters - 1 for number in trace.adapters]
    assert np.mean(coldest[4000:7000]) == pytest.approx(0.4, abs=0.05)
    assert np.mean(coldest[:4000] + coldest[7000:]) < 0.05


def test_a_drift_changes_who_is_popular() -> None:
    def top(part: list[int]) -> set[int]:
        return set(np.bincount(part, minlength=SMALL.num_adapters).argsort()[-5:].tolist())

    still = make_trace(dataclasses.replace(SMALL, zipf=1.5), 8000, 1.0, seed=0).adapters
    moving = make_trace(dataclasses.replace(SMALL, zipf=1.5, drift=8), 8000, 1.0, seed=0).adapters
    assert top(still[:800]) == top(still[-800:])
    assert top(moving[:800]) != top(moving[-800:])


def test_names_and_so_their_hashes_depend_on_the_seed() -> None:
    first, second = (make_trace(SMALL, 10, 1.0, seed).names for seed in (0, 1))
    assert set(first).isdisjoint(second)
