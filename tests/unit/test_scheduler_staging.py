"""Adapters that are slow to read or to write: they hold up nobody, and are served in their turn."""

import contextlib
import itertools
from random import Random

import pytest

from lora_core.operator_pins import PinRefused
from tests.unit.stepped_scheduler import STEP_S, SteppedScheduler


def cold(engine: SteppedScheduler, *names: str) -> None:
    """Load adapters so that the last of them are those in host memory, and no other."""
    for name in names:
        engine.adapter(name)


def test_requests_pass_one_whose_files_are_being_read() -> None:
    engine = SteppedScheduler(num_slots=2, host_adapters=1, read_steps=20)
    cold(engine, "slow", "b")
    slow = engine.add("slow")
    others = [engine.add(None), engine.add("b"), engine.add(None)]
    engine.step()
    assert all(engine.running(request) for request in others)
    for _ in range(15):
        engine.step()
    assert not engine.running(slow)
    assert all(request not in engine.live for request in others)
    engine.run()
    engine.assert_exact(slow)


def test_requests_pass_one_whose_slot_is_being_written_and_its_slot_is_kept_for_it() -> None:
    engine = SteppedScheduler(num_slots=2, write_steps=6)
    large = engine.add("large", max_tokens=2)
    engine.step()
    others = [engine.add(None), engine.add("b"), engine.add("c")]
    for _ in range(4):
        engine.step()
    assert not engine.running(large)
    assert engine.outcomes[others[0].request_id].finished_s is not None
    # One slot is written at a time.
    assert not engine.running(others[1])
    engine.step()
    assert engine.running(large)
    engine.run()
    for request in (large, *others):
        engine.assert_exact(request)


def test_no_slot_is_set_aside_for_an_adapter_that_is_being_read() -> None:
    engine = SteppedScheduler(num_slots=1, host_adapters=1, read_steps=30, max_slot_wait_s=0.5)
    cold(engine, "slow", "a")
    engine.add("a", max_tokens=4)
    engine.step()
    slow = engine.add("slow", max_tokens=4)
    for _ in range(25):
        if not any(request.adapter == engine.adapter("a") for request in engine.live if engine.running(request)):
            engine.add("a", max_tokens=4)
        assert engine.step().rows, "the slot of 'a' is set aside"
    engine.run()
    engine.assert_exact(slow)


def test_the_wait_for_a_slot_is_bounded_once_the_files_are_there() -> None:
    engine = SteppedScheduler(num_slots=1, host_adapters=1, read_steps=10, write_steps=3, max_slot_wait_s=1.0)
    cold(engine, "slow", "a")
    waiter = engine.add("slow")
    for _ in range(60):
        while sum(request.adapter == engine.adapter("a") for request in engine.live) < 4:
            engine.add("a", max_tokens=10)
        engine.step()
    started_s = engine.outcomes[waiter.request_id].started_s
    assert started_s is not None
    # The read, the bound, and the write.
    assert started_s <= (10 + 10 + 3) * STEP_S
    engine.run()
    engine.assert_exact(waiter)


def test_a_reservation_ends_with_the_memory_of_the_adapter_it_was_for() -> None:
    engine = SteppedScheduler(num_slots=1, host_adapters=2, max_slot_wait_s=0.8)
    engine.add("a", max_tokens=30)
    engine.step()
    waiter = engine.add("b")
    for _ in range(6):
        engine.step()
    behind = engine.add("a")
    engine.step()
    assert not engine.running(behind), "the slot is set aside"
    engine.abort(waiter)
    cold(engine, "c", "d")
    again = engine.add("b")
    engine.step()
    assert engine.running(behind)
    engine.run()
    engine.assert_exact(again)


def test_lost_adapters_fail_all_of_their_waiting_requests_and_no_other() -> None:
    engine = SteppedScheduler(num_slots=2, host_adapters=1, read_steps=3)
    cold(engine, "gone", "b", "c")
    engine.slots.lost.add("gone")
    lost = [engine.add("gone") for _ in range(3)]
    others = [engine.add(name) for name in ("b", "c", None)]
    for _ in range(10):
        engine.step()
    assert [str(engine.outcomes[request.request_id].error) for request in lost] == ["gone is lost"] * 3
    assert not any(request in engine.live for request in lost)
    engine.slots.lost.clear()
    back = engine.add("gone")
    engine.run()
    for request in (*others, back):
        engine.assert_exact(request)


def test_a_pinned_adapter_is_not_drained_for_others() -> None:
    engine = SteppedScheduler(num_slots=2, max_slot_wait_s=1.35)
    pinned = engine.adapter("pinned")
    engine.slots.table.wanted.pin("pinned")
    engine.add("pinned", max_tokens=3)
    for _ in range(3):
        engine.add("a", max_tokens=30)
    engine.step()
    engine.add("b")
    for _ in range(10):
        engine.step()
    # The pinned one runs least, and yet it is "a" that admits no more.
    held_back, admitted = engine.add("a"), engine.add("pinned")
    engine.step()
    assert engine.running(admitted)
    assert not engine.running(held_back)
    engine.run()
    assert engine.slots.slot_of(pinned) is not None


@pytest.mark.parametrize(("num_slots", "host_adapters"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 5)])
def test_pinned_and_cold_adapters_are_served_within_a_bound_under_steady_load(
    num_slots: int, host_adapters: int
) -> None:
    engine = SteppedScheduler(
        num_slots=num_slots, host_adapters=host_adapters, max_slot_wait_s=1.0, num_blocks=500, max_num_seqs=32
    )
    busy = [f"busy{index}" for index in range(num_slots)]
    cold(engine, "pinned", "cold", *busy)

    def step() -> None:
        # Requests overlap, so that no slot of theirs is ever out of use.
        if len(engine.history) % 5 == 0:
            for name in busy:
                engine.add(name, max_tokens=10)
        engine.step()

    for _ in range(20):
        step()
    engine.slots.table.wanted.pin("pinned")
    asked_s = engine.now_s
    request = engine.add("cold")
    for _ in range(100):
        step()
        assert engine.slots.slot_of(engine.adapter("pinned")) is not None or engine.now_s < asked_s + 3.0
    started_s = engine.outcomes[request.request_id].started_s
    assert started_s is not None
    # The pinned one's turn, its own bound, and the longest request of the adapter that makes room, each time.
    assert started_s < asked_s + 6.0
    engine.run()


@pytest.mark.parametrize("host_adapters", [1, 3, 8])
@pytest.mark.parametrize("write_steps", [0, 3])
def test_hundreds_of_cold_adapters_are_each_read_once_in_their_order(host_adapters: int, write_steps: int) -> None:
    engine = SteppedScheduler(
        num_slots=4,
        host_adapters=host_adapters,
        read_steps=1,
        write_steps=write_steps,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_slot_wait_s=0.5,
        checks=False,
    )
    requests = [engine.add(f"adapter-{index}", max_tokens=2) for index in range(250)]
    engine.run()
    for request in requests:
        engine.assert_exact(request)
    assert len(engine.slots.reads) == len(set(engine.slots.reads)) <= 250
    started = [engine.outcomes[request.request_id].started_s or 0.0 for request in requests[: -host_adapters - 8]]
    late = [after - before for before, after in itertools.pairwise(started) if after < before]
    assert min(late, default=0.0) > -16 * STEP_S, "served far out of their order"


@pytest.mark.parametrize("seed", range(10))
def test_any_traffic_of_slow_adapters_is_answered_exactly(seed: int) -> None:
    random = Random(seed)
    engine = SteppedScheduler(
        num_slots=random.choice([1, 2, 3]),
        host_adapters=random.choice([1, 2, 4]),
        read_steps=random.choice([1, 4]),
        write_steps=random.choice([0, 2]),
        num_blocks=random.choice([12, 40]),
        max_slot_wait_s=random.choice([0.0, 0.4, 100.0]),
    )
    aborted = set()
    for _ in range(300):
        if random.random() < 0.4:
            engine.add(random.choice([None, *"uvwxyz"]), random.randint(1, 9), random.randint(1, 9))
        if random.random() < 0.05 and engine.live:
            request = random.choice(engine.live)
            aborted.add(request.request_id)
            engine.abort(request)
        if random.random() < 0.05:
            name = random.choice("uvwxyz")
            if engine.slots.table.find(name) is not None:
                engine.slots.table.retire(name)
        if random.random() < 0.05:
            name = random.choice("uvwxyz")
            if engine.slots.table.find(name) is not None:
                with contextlib.suppress(PinRefused):
                    random.choice([engine.slots.table.wanted.pin, engine.slots.table.wanted.unpin])(name)
        if random.random() < 0.05:
            name = random.choice("uvwxyz")
            if engine.slots.table.find(name) is not None:
                engine.slots.table.wanted.warm_up(name)
        if random.random() < 0.05:
            engine.slots.table.wanted.protect(random.sample("uvwxyz", 2))
        engine.step()
    engine.run(max_steps=4000)
    for outcome in engine.outcomes.values():
        if outcome.request.request_id not in aborted:
            engine.assert_exact(outcome.request)
