"""When a replica that refused an adapter is asked again."""

from cluster.changes import Topic
from cluster.retries import FIRST_PAUSE_S, LONGEST_PAUSE_S, Retries


def load(name: str) -> Topic:
    return Topic(name, is_pin=False)


def test_pauses_grow_up_to_the_longest_and_begin_anew_with_another_generation() -> None:
    retries, now, pauses = Retries(), 100.0, []
    for _ in range(9):
        retries.note_refusal(load("a"), "r0", 7, "no space", now)
        due = retries.next_due
        assert due is not None
        pauses.append(due - now)
        assert retries.take_due(due - 0.01) == {}
        now = due
        assert retries.take_due(now) == {load("a"): ["r0"]}
        assert retries.take_due(now) == {}, "it has been asked, and is waited for"
        assert retries.next_due is None
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    (retry,) = retries.of("a", now).values()
    assert (retry.num_attempts, retry.in_s, retry.reason) == (9, 0, "no space")
    retries.note_refusal(load("a"), "r0", 8, "no space", now)
    assert retries.next_due == now + FIRST_PAUSE_S
    for _ in range(5000):
        retries.note_refusal(load("a"), "r0", 8, "no space", now)
    assert retries.next_due == now + LONGEST_PAUSE_S


def test_what_is_done_gone_or_nobodys_any_more_is_not_asked_for() -> None:
    retries = Retries()
    for name, replica in (("a", "r0"), ("a", "r1"), ("b", "r0"), ("c", "r0"), ("d", "r2")):
        retries.note_refusal(load(name), replica, 1, "no", 0)
    retries.note_success(load("a"), "r0")
    retries.forget(load("b"))
    retries.drop(["r2", "r9"])
    retries.note_success(load("unknown"), "r0")
    assert retries.take_due(10) == {load("a"): ["r1"], load("c"): ["r0"]}
    retries.postpone(load("a"), ["r1", "r5"], 10)
    retries.postpone(load("b"), ["r0"], 10)
    assert retries.next_due == 10 + FIRST_PAUSE_S
    assert retries.of("a", 10)["r1"].in_s == FIRST_PAUSE_S


def test_a_pin_and_a_load_of_one_adapter_are_asked_for_apart() -> None:
    retries, pin = Retries(), Topic("a", is_pin=True)
    retries.note_refusal(load("a"), "r0", 1, "no space", 0)
    retries.note_refusal(pin, "r0", 1, "no slot", 0)
    retries.note_success(load("a"), "r0")
    assert retries.of("a", 0) == {}
    assert retries.take_due(10) == {pin: ["r0"]}
