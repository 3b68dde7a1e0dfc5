"""Adapter slots: who passes whom, who waits how long, and who makes room."""

import itertools
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from tests.unit.stepped_scheduler import STEP_S, SteppedScheduler


def test_base_and_resident_requests_pass_one_that_lacks_a_slot() -> None:
    engine = SteppedScheduler(num_slots=1, max_num_seqs=8)
    engine.add("a", max_tokens=12)
    engine.step()
    waiter = engine.add("b")
    base, resident = engine.add(None), engine.add("a")
    engine.step()
    assert engine.running(base)
    assert engine.running(resident)
    assert not engine.running(waiter)
    engine.run()
    engine.assert_exact(waiter)


def test_slot_waiters_are_served_in_order_of_arrival() -> None:
    engine = SteppedScheduler(num_slots=1, max_slot_wait_s=1000.0)
    engine.add("a", max_tokens=6)
    waiters = [engine.add(name) for name in ("b", "c", "b", "d")]
    # Resident by then, the second "b" shares the slot of the first; "c" waits for both.
    engine.run()
    started = [engine.outcomes[r.request_id].started_s for r in waiters]
    b1, c, b2, d = started
    assert None not in started
    assert b1 == b2
    assert b1 < c < d  # type: ignore[operator]


def test_a_slot_left_by_its_last_request_goes_to_the_oldest_waiter_not_back() -> None:
    engine = SteppedScheduler(num_slots=1, max_slot_wait_s=1000.0, max_num_seqs=2)
    first = engine.add("a", max_tokens=3)
    engine.step()
    waiter, back = engine.add("b"), engine.add("a", max_tokens=3)
    # Two seats: "a" may follow itself while it runs, which is what starves "b" without a bound.
    engine.run()
    outcome = engine.outcomes
    assert outcome[back.request_id].started_s < outcome[first.request_id].finished_s  # type: ignore[operator]
    assert outcome[waiter.request_id].started_s >= outcome[back.request_id].finished_s  # type: ignore[operator]


def saturate(
    engine: SteppedScheduler, depths: dict[str, int], steps: int, max_tokens: Sequence[int] = (10,)
) -> Counter[str]:
    """Keep so many unfinished requests of every adapter for `steps` steps; how many of each finished."""
    lengths = Random(0)
    for _ in range(steps):
        unfinished = Counter(r.adapter.name for r in engine.live if r.adapter is not None)
        for name, depth in depths.items():
            for _ in range(depth - unfinished[name]):
                engine.add(name, max_tokens=lengths.choice(max_tokens))
        engine.step()
    done = [o.request for o in engine.outcomes.values() if o.finished_s is not None]
    for request in done:
        engine.assert_exact(request)
    return Counter(r.adapter.name for r in done if r.adapter is not None)


@pytest.mark.parametrize("length", [10, 200])
@pytest.mark.parametrize("max_slot_wait_s", [0.0, 1.0, 3.0])
def test_one_request_gets_the_only_slot_within_its_bound_under_steady_load(max_slot_wait_s: float, length: int) -> None:
    engine = SteppedScheduler(num_slots=1, max_slot_wait_s=max_slot_wait_s, num_blocks=600)
    saturate(engine, {"a": 12}, steps=20, max_tokens=(length,))
    waiter = engine.add("b")
    arrived_s = engine.now_s
    saturate(engine, {"a": 12}, steps=80, max_tokens=(length,))
    started_s = engine.outcomes[waiter.request_id].started_s
    assert started_s is not None
    assert started_s - arrived_s <= max(max_slot_wait_s, STEP_S)
    # Half of it is the running adapter's, whatever comes.
    assert started_s - arrived_s >= max_slot_wait_s / 2
    engine.assert_exact(waiter)
    engine.run()


def test_one_request_waits_no_longer_behind_a_thousand_of_another_adapter() -> None:
    engine = SteppedScheduler(num_slots=1, max_slot_wait_s=2.0, checks=False)
    for _ in range(1000):
        engine.add("a", max_tokens=20)
    engine.step()
    waiter = engine.add("b")
    arrived_s = engine.now_s
    while not engine.running(waiter):
        engine.step()
    assert engine.now_s - arrived_s <= 2.0


def test_two_adapters_share_one_slot_fairly() -> None:
    engine = SteppedScheduler(num_slots=1, max_slot_wait_s=1.0)
    done = saturate(engine, {"a": 6, "b": 6}, steps=600)
    assert min(done.values()) > 0.7 * max(done.values())
    slots = [{row.adapter.name for row in batch.rows if row.adapter is not None} for batch in engine.history]
    turns = sum(now != before and bool(now) for before, now in itertools.pairwise(slots))
    # 60 s in turns within the bound, and not one a step.
    assert 60 <= turns <= 120
    engine.run()


@pytest.mark.parametrize("num_slots", [2, 3])
def test_no_adapter_keeps_its_slot_while_others_take_turns(num_slots: int) -> None:
    engine = SteppedScheduler(num_slots=num_slots, max_slot_wait_s=2.0, max_num_seqs=8)
    done = saturate(engine, dict.fromkeys("abcde", 6), steps=1500, max_tokens=range(2, 31))
    assert set(done) == set("abcde")
    assert min(done.values()) > 0.6 * max(done.values())
    engine.run()


def test_an_adapter_with_much_traffic_takes_turns_with_those_that_have_little() -> None:
    engine = SteppedScheduler(num_slots=2, max_slot_wait_s=0.5)
    done = saturate(engine, {"a": 12, "b": 3, "c": 3, "d": 3}, steps=1500, max_tokens=range(2, 31))
    # Four times the traffic of each of the others: about four times the answers, and not all there is.
    assert min(done.values()) > 0.2 * done["a"]
    engine.run()


def test_a_steady_adapter_is_not_starved_by_a_stream_of_newcomers() -> None:
    engine = SteppedScheduler(num_slots=1, max_slot_wait_s=0.5)
    for newcomer in range(30):
        engine.add(f"n{newcomer}", max_tokens=2)
        saturate(engine, {"a": 2}, steps=10, max_tokens=(5,))
    waits = [o.started_s for o in engine.outcomes.values()]
    assert waits.count(None) < 8
    done = Counter(
        o.request.adapter.name
        for o in engine.outcomes.values()
        if o.finished_s is not None and o.request.adapter is not None
    )
    assert done["a"] >= 30
    assert sum(done.values()) - done["a"] >= 25
    engine.run()


def test_the_adapter_with_fewest_running_requests_is_drained() -> None:
    engine = SteppedScheduler(num_slots=2, max_slot_wait_s=1.7)
    for _ in range(3):
        engine.add("a", max_tokens=20)
    engine.add("b", max_tokens=30)
    engine.step()
    engine.add("c")
    for _ in range(12):
        engine.step()
    held_back, admitted = engine.add("b"), engine.add("a")
    engine.step()
    assert engine.running(admitted)
    assert not engine.running(held_back)
    engine.run()


def test_of_equally_busy_adapters_the_one_done_first_is_drained() -> None:
    engine = SteppedScheduler(num_slots=2, max_slot_wait_s=1.7)
    engine.add("a", max_tokens=40)
    engine.add("b", max_tokens=25)
    engine.step()
    waiter = engine.add("c")
    for _ in range(12):
        engine.step()
    held_back, admitted = engine.add("b"), engine.add("a")
    engine.step()
    assert engine.running(admitted)
    assert not engine.running(held_back)
    engine.run()
    engine.assert_exact(held_back)
    assert engine.outcomes[waiter.request_id].started_s <= engine.outcomes[held_back.request_id].started_s  # type: ignore[operator]


def test_aborting_the_waiter_ends_the_drain() -> None:
    engine = SteppedScheduler(num_slots=1, max_slot_wait_s=1.7)
    engine.add("a", max_tokens=40)
    engine.step()
    waiter = engine.add("b")
    for _ in range(12):
        engine.step()
    behind = engine.add("a")
    engine.step()
    assert not engine.running(behind), "the slot is set aside"
    engine.abort(waiter)
    engine.step()
    assert engine.running(behind)
    engine.run()


def test_a_drain_ends_when_the_waiter_finds_another_slot() -> None:
    engine = SteppedScheduler(num_slots=2, max_slot_wait_s=2.7, max_num_seqs=3)
    for _ in range(2):
        engine.add("a", max_tokens=20)
    engine.add("c", max_tokens=40)
    engine.step()
    waiter, behind, last = engine.add("b", max_tokens=30), engine.add("c"), engine.add("b")
    while not engine.running(waiter):
        engine.step()
    # "a" was done before "c", which may admit again although one more request of "b" waits, for a seat.
    assert engine.running(behind)
    assert not engine.running(last)
    engine.run()


def test_two_adapters_that_never_finish_take_turns_within_the_bound() -> None:
    engine = SteppedScheduler(num_slots=1, max_slot_wait_s=2.0)
    saturate(engine, {"a": 4, "b": 4}, steps=200, max_tokens=(100,))
    slots = [batch.rows[0].adapter for batch in engine.history]
    lengths = [len(list(turn)) for _, turn in itertools.groupby(slots)]
    # In steps of a tenth of a second: from half the bound to 0.8 of it.
    assert min(lengths[1:-1]) >= 10
    assert max(lengths) <= 16
    assert engine.scheduler.num_put_back > 40
    engine.run()


@pytest.mark.parametrize(("num_adapters", "num_slots"), [(2, 1), (3, 1), (6, 1), (5, 2), (8, 3)])
def test_adapters_that_never_finish_wait_for_their_turns_as_long_as_is_promised(
    num_adapters: int, num_slots: int
) -> None:
    bound_s = 2.0
    engine = SteppedScheduler(
        num_slots=num_slots, max_slot_wait_s=bound_s, num_blocks=4000, max_num_seqs=16, checks=False, write_steps=2
    )
    names = [f"a{index}" for index in range(num_adapters)]
    saturate(engine, dict.fromkeys(names, 3), steps=600, max_tokens=(500,))
    promised_s = max(bound_s, num_adapters / num_slots * bound_s / 2)
    for name in names:
        adapter = engine.adapter(name)
        steps = [place for place, batch in enumerate(engine.history) if adapter in {row.adapter for row in batch.rows}]
        gaps_s = [STEP_S * (after - before - 1) for before, after in itertools.pairwise([0, *steps, 600])]
        assert max(gaps_s) <= 1.2 * promised_s, name


@pytest.mark.parametrize("share", [False, True])
def test_requests_that_are_put_back_compute_nothing_twice_while_there_is_room(share: bool) -> None:
    engine = SteppedScheduler(num_slots=1, max_slot_wait_s=0.5, num_blocks=200, share=share)
    requests = [engine.add(name, prompt=6, max_tokens=40) for name in "abc"]
    engine.run()
    assert engine.scheduler.num_put_back > 10
    # The last token of an answer is not computed.
    assert sum(batch.num_tokens for batch in engine.history) == sum(len(r.token_ids) - 1 for r in requests)
    for request in requests:
        engine.assert_exact(request)


def test_requests_that_were_put_back_make_room_for_those_that_need_it() -> None:
    engine = SteppedScheduler(num_slots=1, max_slot_wait_s=0.5, num_blocks=14, block_size=4, share=False)
    requests = [engine.add(name, prompt=6, max_tokens=30) for name in "ab"]
    engine.step()
    base = engine.add(None, prompt=30, max_tokens=20)
    engine.run()
    num_tokens = sum(batch.num_tokens for batch in engine.history)
    assert num_tokens > sum(len(request.token_ids) - 1 for request in (*requests, base)), "there was room for all"
    for request in (*requests, base):
        engine.assert_exact(request)


def test_aborting_a_request_that_was_put_back_frees_its_blocks() -> None:
    engine = SteppedScheduler(num_slots=1, max_slot_wait_s=0.5)
    first, second = engine.add("a", max_tokens=40), engine.add("b", max_tokens=40)
    while not first.is_parked:
        engine.step()
    assert first.block_table
    engine.abort(first)
    engine.abort(second)
    assert engine.blocks.num_free == engine.num_blocks


def test_turns_that_are_taken_at_every_step_come_to_an_end_though_each_begins_from_nothing() -> None:
    # Room for one of them, so that whoever is put back loses what was computed.
    engine = SteppedScheduler(num_slots=1, num_blocks=4, max_slot_wait_s=0.0, share=False, max_num_batched_tokens=2)
    requests = [engine.add(name, prompt=10, max_tokens=6) for name in "abc"]
    engine.run(max_steps=400)
    for request in requests:
        engine.assert_exact(request)
    assert engine.scheduler.num_put_back > 10


def test_a_resident_adapter_is_not_behind_the_queue_of_another() -> None:
    engine = SteppedScheduler(num_slots=2, max_num_seqs=4, checks=False)
    for _ in range(200):
        engine.add("a", max_tokens=10)
    for _ in range(15):
        engine.step()
    other, base = engine.add("b", max_tokens=5), engine.add(None, max_tokens=5)
    arrived_s = engine.now_s
    while not (engine.running(other) and engine.running(base)):
        engine.step()
    # The first seats that come free.
    assert engine.now_s - arrived_s <= 11 * STEP_S


def test_whoever_lacks_blocks_is_not_overtaken_by_a_stream_of_other_adapters() -> None:
    engine = SteppedScheduler(num_slots=40, num_blocks=12, block_size=4, max_num_batched_tokens=64)
    for _ in range(2):
        engine.add("a", prompt=8, max_tokens=20)
    engine.step()
    large = engine.add("a", prompt=36, max_tokens=2)
    passed = 0
    while not engine.running(large):
        small = engine.add(f"n{engine.now_s:.1f}", prompt=2, max_tokens=2)
        engine.step()
        passed += engine.running(small)
    assert passed <= 1
    engine.run()


def test_more_adapters_than_a_step_may_have_take_turns() -> None:
    engine = SteppedScheduler(num_slots=4, max_loras_per_step=2, max_num_seqs=16, max_num_batched_tokens=32)
    requests = [engine.add(name, max_tokens=8) for name in "aabbccdd"] + [engine.add(None, max_tokens=8)]
    engine.step()
    for _ in range(6):
        batch = engine.step()
        assert len({row.adapter for row in batch.rows} - {None}) == 2
        assert requests[-1] in [row.request for row in batch.rows]
    # Three steps each, less those in which their prompts came.
    assert {request.num_output_tokens for request in requests[:-1]} <= {3, 4}
    engine.run()
    for request in requests:
        engine.assert_exact(request)


def test_requests_outside_a_step_do_not_let_in_more_than_a_step_can_decode() -> None:
    engine = SteppedScheduler(num_slots=3, max_loras_per_step=1, max_num_seqs=12, max_num_batched_tokens=4)
    requests = [engine.add(name, prompt=2, max_tokens=12) for name in "aaabbbccc"]
    engine.run()
    for request in requests:
        engine.assert_exact(request)
    assert all(batch.num_tokens <= 4 for batch in engine.history)


def test_no_newcomer_takes_the_slot_that_was_set_aside_for_another() -> None:
    engine = SteppedScheduler(num_slots=1, max_slot_wait_s=1.0, num_blocks=12, block_size=4, max_num_batched_tokens=64)
    engine.add(None, prompt=4, max_tokens=40)
    preempted = engine.add("c", prompt=16, max_tokens=25)
    engine.step()
    first, second = engine.add("b", prompt=2, max_tokens=6), engine.add("d", prompt=2, max_tokens=2)
    while not engine.running(first):
        engine.step()
    # The base request took the blocks of "c", whose slot was being drained; "d" has waited for a slot for longer, and
    # gets the next one although "c" stands before it in the queue.
    assert not engine.running(preempted)
    while not engine.running(second):
        engine.step()
        assert not engine.running(preempted)
    engine.run()
    engine.assert_exact(preempted)


def test_a_thousand_adapters_pass_through_four_slots() -> None:
    engine = SteppedScheduler(
        num_slots=4, max_num_seqs=16, max_num_batched_tokens=64, max_slot_wait_s=0.5, checks=False
    )
    requests = [engine.add(f"adapter-{index}", max_tokens=2) for index in range(1000)]
    engine.run(max_steps=1000)
    for request in requests:
        engine.assert_exact(request)


def test_aborts_free_blocks_and_pins_at_once_waiting_or_running() -> None:
    engine = SteppedScheduler(num_slots=1)
    running, waiting = engine.add("a", max_tokens=9), engine.add("b")
    engine.step()
    engine.abort(waiting)
    engine.abort(running)
    assert engine.blocks.num_free == engine.num_blocks
    assert engine.step().rows == []
