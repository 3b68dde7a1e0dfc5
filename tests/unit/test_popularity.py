"""Shares of the work over two windows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.popularity import Popularity


def test_shares_are_of_all_work_that_of_the_base_included() -> None:
    popularity = Popularity()
    assert popularity.shares() == {}
    popularity.add({"a": 30, "b": 10}, total=100, now=0)
    popularity.add({"a": 30, "b": 10}, total=100, now=1)
    assert popularity.shares() == pytest.approx({"a": 0.3, "b": 0.1})


def test_work_of_a_half_life_ago_counts_half() -> None:
    popularity = Popularity(half_life_s=10, fast_half_life_s=10)
    popularity.add({"old": 100}, total=100, now=0, grain=1e9)
    popularity.add({"new": 100}, total=100, now=10, grain=1e9)
    assert popularity.shares() == pytest.approx({"old": 1 / 3, "new": 2 / 3})


def test_a_crowd_counts_within_seconds_and_chance_does_not() -> None:
    def share_of_newcomer(num_requests: int) -> float:
        popularity = Popularity(half_life_s=600, fast_half_life_s=5)
        for second in range(600):
            popularity.add({"usual": 100.0}, total=100, now=second)
        popularity.add({"usual": 100.0 - num_requests, "newcomer": num_requests}, total=100, now=600)
        return popularity.shares()["newcomer"]

    assert share_of_newcomer(50) > 0.04
    assert share_of_newcomer(1) < 1e-4, "one request in a second says little"


def test_who_stops_is_noticed_as_soon_as_who_comes() -> None:
    popularity = Popularity(half_life_s=600, fast_half_life_s=5)
    for second in range(600):
        popularity.add({"old": 50.0, "usual": 50.0}, total=100, now=second)
    for second in range(600, 610):
        popularity.add({"new": 50.0, "usual": 50.0}, total=100, now=second)
    shares = popularity.shares()
    assert shares["old"] == pytest.approx(0.125, abs=0.02), "two half-lives of the short window"
    assert shares["new"] == pytest.approx(0.375, abs=0.02)
    assert shares["usual"] == pytest.approx(0.5, abs=0.01)


def test_what_is_forgotten_by_request_or_by_time_is_gone() -> None:
    popularity = Popularity(half_life_s=1, fast_half_life_s=1)
    popularity.add({"a": 1, "b": 1}, total=2, now=0)
    popularity.forget("a")
    assert popularity.shares() == pytest.approx({"b": 0.5})
    popularity.add({"c": 1}, total=1, now=60)
    assert set(popularity.shares()) == {"c"}
    popularity.add({}, total=0, now=1e6)
    popularity.add({"d": 1}, total=1, now=2e6)
    assert popularity.shares() == pytest.approx({"d": 1.0}), "however long it was idle"


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), st.floats(0, 100)), st.floats(0, 400)), max_size=12))
def test_shares_are_parts_of_the_whole(reports: list[tuple[dict[str, float], float]]) -> None:
    popularity, now = Popularity(), 0.0
    for work, passed_s in reports:
        now += passed_s
        popularity.add(work, total=sum(work.values()) + 1, now=now)
    shares = popularity.shares()
    assert all(0 < share < 1 for share in shares.values())


def test_half_lives_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="fast_half_life_s"):
        Popularity(half_life_s=5, fast_half_life_s=6)
