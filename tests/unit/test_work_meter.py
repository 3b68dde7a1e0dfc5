"""What an engine's work is accounted as: by adapter, by request, and on its way to the router actor."""

import random

import pytest

from deployments.work_account import WorkAccount
from lora_core.engine.request import Request, ScheduledBatch, ScheduledRow
from lora_core.engine.step_line import StepLine
from lora_core.engine.work_meter import WorkMeter
from lora_core.types import AdapterRef
from lora_core.workload import AdapterWork, SlotCounts, Workload

OLD, NEW = AdapterRef("a", 1), AdapterRef("a", 2)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def request(name: str, adapter: AdapterRef | None = None, prompt: int = 4) -> Request:
    return Request(request_id=name, token_ids=[1] * prompt, num_prompt_tokens=prompt, arrival=0, adapter=adapter)


def run(meter: WorkMeter, clock: Clock, *rows: tuple[Request, int], seconds: float = 0.1) -> None:
    """A step; each request then has a token more."""
    batch = ScheduledBatch([ScheduledRow(each, num_tokens) for each, num_tokens in rows])
    meter.begins(batch)
    clock.now_s += seconds
    for each, num_tokens in rows:
        each.block_table = [0]
        each.num_computed += num_tokens
        each.token_ids.append(2)
    meter.ran(batch, seconds)


def test_tokens_are_counted_by_name_and_once(clock: Clock) -> None:
    meter = WorkMeter(clock)
    old, new, base = request("old", OLD), request("new", NEW), request("base")
    for each in (old, new, base):
        meter.came(each)
    clock.now_s = 2.0
    run(meter, clock, (old, 4), (new, 3))
    run(meter, clock, (old, 1), (base, 4))
    meter.ended(old)
    work = meter.take()
    assert work.seconds == pytest.approx(2.2)
    a, of_base = sorted(work.adapters, key=lambda work: work.name is None)
    assert (a.name, a.num_tokens, a.num_started, a.wait_s) == ("a", 8, 2, 4.0), "generations of a name together"
    assert (of_base.name, of_base.num_tokens, of_base.num_started) == (None, 4, 1)
    assert of_base.wait_s == pytest.approx(2.1)
    meter.ended(new)
    meter.ended(base)
    assert meter.take().adapters == []


def test_the_oldest_request_is_looked_at_for_progress(clock: Clock) -> None:
    meter = WorkMeter(clock)
    first, second = request("first", OLD), request("second", OLD)
    meter.came(first)
    clock.now_s = 5.0
    meter.came(second)
    (work,) = meter.take().adapters
    assert (work.num_running, work.num_waiting) == (0, 2)
    assert (work.oldest_age_s, work.oldest_idle_s) == (5.0, 5.0)
    run(meter, clock, (first, 4), seconds=1.0)
    (work,) = meter.take().adapters
    assert (work.num_running, work.num_waiting) == (1, 1)
    assert (work.oldest_age_s, work.oldest_idle_s, work.oldest_waits) == (6.0, 0.0, False)
    for _ in range(2):
        clock.now_s += 3.0
        (work,) = meter.take().adapters
    assert (work.oldest_age_s, work.oldest_idle_s) == (12.0, 6.0), "nothing has moved"
    meter.ended(first)
    (work,) = meter.take().adapters
    assert (work.oldest_age_s, work.oldest_idle_s) == (7.0, 7.0), "the second one never began"


def test_an_old_request_that_waits_is_told_from_newer_ones_that_run(clock: Clock) -> None:
    meter = WorkMeter(clock)
    old, newer = request("old"), request("newer")
    meter.came(old)
    meter.came(newer)
    run(meter, clock, (newer, 4), seconds=61.0)
    (work,) = meter.take().adapters
    assert (work.num_running, work.num_waiting, work.oldest_idle_s) == (1, 1, 61.0)
    assert work.oldest_waits


def test_a_request_is_worth_what_its_tokens_add_to_the_steps(clock: Clock) -> None:
    meter = WorkMeter(clock)
    assert meter.service_ms is None
    for index in range(40):
        asked = request(str(index))
        meter.came(asked)
        # A step takes 10 ms, and each of its tokens 2 ms more.
        run(meter, clock, (asked, 4), seconds=0.018)
        for _ in range(3):
            run(meter, clock, (asked, 1), seconds=0.012)
        meter.ended(asked)
    assert meter.service_ms == pytest.approx(14, rel=0.02)


def test_steps_that_are_all_alike_say_nothing() -> None:
    line = StepLine()
    for _ in range(100):
        line.add(8, 0.01)
    assert line.per_token_s is None
    for num_tokens in (2, 16) * 50:
        line.add(num_tokens, 0.02 - 0.0001 * num_tokens)
    assert line.per_token_s is None, "a token never makes a step shorter"


def test_what_chance_may_have_made_of_steps_says_nothing() -> None:
    line, chance = StepLine(), random.Random(0)
    slopes = []
    for _ in range(3000):
        line.add(chance.randrange(1, 9), 0.01 + chance.uniform(0, 0.01))
        slopes.append(line.per_token_s)
    assert sum(slope is not None for slope in slopes) < 0.1 * len(slopes)
    assert 0.0 not in slopes
    for _ in range(300):
        num_tokens = chance.randrange(1, 9)
        line.add(num_tokens, 0.01 + 0.002 * num_tokens + chance.uniform(0, 0.001))
    assert line.per_token_s == pytest.approx(0.002, rel=0.1)


# On its way


def test_two_accounts_are_one_with_all_that_was_done_and_the_queues_of_now() -> None:
    first = Workload(
        seconds=0.5,
        adapters=[
            AdapterWork(name="a", num_tokens=5, num_started=1, wait_s=0.5, num_running=2, oldest_age_s=9.0),
            AdapterWork(name="gone", num_tokens=7, num_waiting=1),
            AdapterWork(name="idle", num_waiting=1),
        ],
    )
    slots = SlotCounts(num_hits=3)
    second = Workload(
        seconds=0.25,
        adapters=[AdapterWork(name="a", num_tokens=1, num_running=1), AdapterWork(num_tokens=2)],
        service_ms=3.0,
        slots=slots,
    )
    assert second.after(first) == Workload(
        seconds=0.75,
        adapters=[
            AdapterWork(name="a", num_tokens=6, num_started=1, wait_s=0.5, num_running=1),
            AdapterWork(num_tokens=2),
            AdapterWork(name="gone", num_tokens=7),
        ],
        service_ms=3.0,
        slots=slots,
    )


def test_what_was_told_is_not_told_again_unless_it_did_not_arrive(clock: Clock) -> None:
    account = WorkAccount(clock)
    assert not account.has_news
    account.add(Workload(seconds=0.5, adapters=[AdapterWork(name="a", num_tokens=5, num_running=1)]))
    account.add(Workload(seconds=0.5, adapters=[AdapterWork(name="a", num_tokens=2, num_running=1, oldest_idle_s=1)]))
    clock.now_s = 4.0
    taken = account.take()
    assert (taken.seconds, taken.silent_s) == (1.0, 4.0)
    (a,) = taken.adapters
    assert (a.num_tokens, a.num_running, a.oldest_idle_s) == (7, 1, 5.0)
    account.put_back(taken)
    (again,) = account.take().adapters
    assert again.num_tokens == 7
    assert account.has_news, "a request is there yet, and waits longer and longer"
    (later,) = account.take().adapters
    assert (later.num_tokens, later.num_running) == (0, 1)
    account.add(Workload(seconds=0.5))
    assert account.take().adapters == []
    assert not account.has_news


def test_a_stall_stays_in_the_account_until_it_is_over(clock: Clock) -> None:
    account = WorkAccount(clock)
    assert account.set_stalled({"a": "no token for 60 s"}, "")
    assert not account.set_stalled({"a": "no token for 60 s"}, "")
    account.add(Workload(seconds=0.5))
    assert account.has_news
    assert account.take().stalled == {"a": "no token for 60 s"}
    assert account.take().stalled == {"a": "no token for 60 s"}
    assert account.set_stalled({}, "the engine hangs")
    assert (account.take().stalled, account.take().fault) == ({}, "the engine hangs")
