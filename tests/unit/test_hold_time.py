"""`HoldTime`: how long requests take, from how many there are and how many end."""

import pytest

from cluster.hold_time import HoldTime


def steady(hold: HoldTime, *, seconds: float, per_s: float, began: float, until: float) -> None:
    """Requests of that length, evenly in time."""
    times = [(began + index / per_s, True) for index in range(int((until - began) * per_s))]
    times += [(at + seconds, False) for at, _ in times]
    for at, begins in sorted(times):
        (hold.begin if begins else hold.end)(at)


@pytest.mark.parametrize(("seconds", "per_s"), [(0.5, 10.0), (3.0, 4.0)])
def test_it_is_the_time_from_a_begin_to_its_end(seconds: float, per_s: float) -> None:
    hold = HoldTime()
    steady(hold, seconds=seconds, per_s=per_s, began=100.0, until=400.0)
    assert hold.mean_s == pytest.approx(seconds, rel=0.05)


def test_too_few_requests_say_nothing_and_old_ones_little() -> None:
    hold = HoldTime()
    assert hold.mean_s is None
    steady(hold, seconds=1.0, per_s=1.0, began=0.0, until=4.0)
    assert hold.mean_s is None
    steady(hold, seconds=1.0, per_s=5.0, began=10.0, until=100.0)
    before = hold.mean_s
    steady(hold, seconds=0.2, per_s=5.0, began=101.0, until=400.0)
    assert before == pytest.approx(1.0, rel=0.2)
    assert hold.mean_s == pytest.approx(0.2, rel=0.2)


def test_requests_that_are_lost_sight_of_count_no_longer() -> None:
    hold = HoldTime()
    for _ in range(50):
        hold.begin(0.0)
    hold.lose(50, 1.0)
    steady(hold, seconds=1.0, per_s=5.0, began=200.0, until=500.0)
    assert hold.mean_s == pytest.approx(1.0, rel=0.1)
    hold.lose(99, 500.0)
    hold.end(501.0)
    assert hold.mean_s is not None, "no fewer than none are under way"
