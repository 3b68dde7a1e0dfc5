"""How many requests may wait, and what the refused ones are told."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.admission import LONGEST_RETRY_S, SHORTEST_RETRY_S, Admission, Place
from lora_core.errors import QueueFull


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(admission: Admission, adapter: str | None, load_s: float = 0.0) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        admission.enter(adapter, lambda: load_s)
    return caught.value


def test_an_adapter_has_so_many_places_and_the_base_all_of_them(clock: Clock) -> None:
    admission = Admission(5, 2, clock)
    places = [admission.enter("a"), admission.enter("a")]
    assert "2 requests for adapter 'a' are waiting" in str(refused(admission, "a"))
    assert "queue.max_waiting_per_adapter" in str(refused(admission, "a"))
    places += [admission.enter(None) for _ in range(3)]
    for adapter in ("a", "b", None):
        assert "5 requests are waiting, which is as many as may (queue.max_waiting)" in str(refused(admission, adapter))
    assert admission.waiting_by_model() == {"a": 2, None: 3}
    places[0].start()
    admission.enter("a")


def test_a_place_is_given_back_once_however_a_request_ends(clock: Clock) -> None:
    admission = Admission(2, 2, clock)
    with pytest.raises(ZeroDivisionError), admission.enter("a"):
        raise ZeroDivisionError
    assert admission.num_waiting == 0
    with admission.enter("a") as place:
        place.start()
        place.start()
        assert admission.num_waiting == 0
        with admission.enter("b"):
            assert admission.waiting_by_model() == {"b": 1}
    assert admission.waiting_by_model() == {}


def test_a_refusal_says_when_the_queue_will_be_through_at_its_pace(clock: Clock) -> None:
    admission = Admission(100, 20, clock)
    places = [admission.enter("a") for _ in range(20)]
    # A start every half second; places that come free are taken again.
    for _ in range(30):
        clock.now += 0.5
        places.pop(0).start()
        places.append(admission.enter("a"))
    assert refused(admission, "a").retry_after_s == pytest.approx(10, rel=0.01)
    # No faster than the adapter can be loaded, and no slower than a minute.
    assert refused(admission, "a", load_s=25).retry_after_s == 25
    assert refused(admission, "a", load_s=1e9).retry_after_s == LONGEST_RETRY_S


def test_of_a_queue_that_has_not_moved_the_load_or_its_age_is_all_that_is_known(clock: Clock) -> None:
    admission = Admission(100, 3, clock)
    for _ in range(3):
        admission.enter("cold")
    assert refused(admission, "cold").retry_after_s == SHORTEST_RETRY_S
    assert refused(admission, "cold", load_s=4).retry_after_s == 4
    clock.now += 12
    assert refused(admission, "cold", load_s=4).retry_after_s == 12


def test_time_in_which_nobody_waits_does_not_slow_the_pace(clock: Clock) -> None:
    admission = Admission(4, 4, clock)
    for _ in range(20):
        clock.now += 1000
        with admission.enter(None) as place:
            clock.now += 0.5
            place.start()
    for _ in range(4):
        admission.enter(None)
    assert refused(admission, None).retry_after_s == pytest.approx(2)


def test_a_refusal_crosses_processes_whole(clock: Clock) -> None:
    admission = Admission(1, 1, clock)
    admission.enter("a")
    error = refused(admission, "a", load_s=7)
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), copied.retry_after_s) == (QueueFull, str(error), 7)


@given(st.lists(st.tuples(st.sampled_from(["enter", "start", "leave"]), st.sampled_from([None, "a", "b", "c"]))))
def test_counts_are_those_of_the_places_given_and_never_beyond_the_limits(steps: list[tuple[str, str | None]]) -> None:
    admission, held = Admission(4, 2, Clock()), list[Place]()
    for step, adapter in steps:
        mine = [place for place in held if place.adapter == adapter]
        if step == "enter":
            full = len(held) >= 4 or (adapter is not None and len(mine) >= 2)
            if full:
                assert SHORTEST_RETRY_S <= refused(admission, adapter).retry_after_s <= LONGEST_RETRY_S
            else:
                held.append(admission.enter(adapter))
        elif mine:
            held.remove(mine[0])
            if step == "start":
                mine[0].start()
            else:
                mine[0].__exit__(None, None, None)
        assert admission.num_waiting == len(held)
        counts = {name: sum(place.adapter == name for place in held) for name in (None, "a", "b", "c")}
        assert admission.waiting_by_model() == {name: count for name, count in counts.items() if count}
