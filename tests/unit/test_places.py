"""Places, and the threads that take them: what blocks holds up others for a bounded time."""

import threading
import time
from collections.abc import Callable

import pytest

from lora_core.places import Places
from lora_core.workers import Workers

LONG_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_job_that_takes_long_leaves_its_place_to_another() -> None:
    now_s = 0.0
    places = Places(2, patience_s=5.0, clock=lambda: now_s)
    first, second = places.try_take(), places.try_take()
    assert first is not None
    assert second is not None
    assert places.try_take() is None
    now_s = 4.9
    assert places.try_take() is None
    now_s = 5.0
    third, fourth = places.try_take(), places.try_take()
    assert third is not None
    assert fourth is not None
    assert places.try_take() is None
    # Those that took long give nothing back when they end: they had no place any more.
    places.leave(first)
    places.leave(second)
    assert places.try_take() is None
    places.leave(third)
    assert places.try_take() is not None


def test_whoever_waits_gets_the_place_of_one_that_ends_or_takes_long() -> None:
    places = Places(1, patience_s=0.2)
    job = places.try_take()
    assert job is not None
    started = time.monotonic()
    with places.hold():
        assert 0.15 < time.monotonic() - started < LONG_S
        assert places.try_take() is None
    places.leave(job)
    entered = threading.Event()

    def enter() -> None:
        with places.hold():
            entered.set()

    patient = Places(1, patience_s=LONG_S)
    places = patient
    job = places.try_take()
    assert job is not None
    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.05)
    places.leave(job)
    assert entered.wait(LONG_S)
    thread.join()


def test_workers_do_every_job_however_many_block() -> None:
    gate, done = threading.Event(), list[int]()
    jobs = list(range(12))

    def run(job: int) -> None:
        if job < 6:
            assert gate.wait(LONG_S)
        done.append(job)

    workers = Workers("worker", Places(2, patience_s=0.02), lambda: jobs.pop(0) if jobs else None, run)

    def start_until(condition: Callable[[], bool]) -> None:
        def is_so() -> bool:
            workers.start()
            return condition()

        until(is_so)

    start_until(lambda: len(done) == 6)
    assert sorted(done) == list(range(6, 12))
    gate.set()
    start_until(lambda: len(done) == 12)
    until(lambda: not any(thread.name == "worker" for thread in threading.enumerate()))


def test_a_job_is_done_where_the_system_has_no_thread_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    jobs, done = [1, 2, 3], list[int]()
    workers = Workers("worker", Places(1), lambda: jobs.pop(0) if jobs else None, done.append)
    workers.start()
    assert done == [1, 2, 3]
