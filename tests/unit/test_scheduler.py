"""The scheduler's budgets of tokens, seats and blocks; adapter slots are in test_scheduler_slots."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lora_core.engine.request import ScheduledBatch
from tests.unit.stepped_scheduler import SteppedScheduler


def lengths(batch: ScheduledBatch) -> list[tuple[str, int]]:
    return [(row.request.request_id, row.num_tokens) for row in batch.rows]


def test_a_long_prompt_goes_in_chunks_beside_requests_that_decode() -> None:
    engine = SteppedScheduler(max_num_batched_tokens=8)
    short = engine.add(None, prompt=2, max_tokens=6)
    long = engine.add(None, prompt=20, max_tokens=2)
    late = engine.add(None, prompt=3, max_tokens=1)
    batches = [lengths(engine.step()) for _ in range(4)]
    assert batches == [
        [("r0", 2), ("r1", 6)],
        [("r0", 1), ("r1", 7)],
        [("r0", 1), ("r1", 7)],
        [("r0", 1), ("r1", 1), ("r2", 3)],
    ]
    engine.run()
    for request in (short, long, late):
        engine.assert_exact(request)


def test_a_newer_decode_is_not_held_up_by_an_older_prompt() -> None:
    engine = SteppedScheduler(max_num_batched_tokens=8)
    engine.add(None, prompt=10, max_tokens=2)
    engine.add(None, prompt=3, max_tokens=9)
    engine.add(None, prompt=30, max_tokens=2)
    for _ in range(2):
        engine.step()
    # Both older ones decode now, and every token they leave goes to the prompt.
    assert lengths(engine.step()) == [("r0", 1), ("r1", 1), ("r2", 6)]


def test_seats_and_tokens_both_bound_what_runs() -> None:
    engine = SteppedScheduler(max_num_seqs=3, max_num_batched_tokens=16)
    requests = [engine.add(None, prompt=1) for _ in range(5)]
    engine.step()
    assert [engine.running(r) for r in requests] == [True] * 3 + [False] * 2
    narrow = SteppedScheduler(max_num_seqs=8, max_num_batched_tokens=2)
    requests = [narrow.add(None, prompt=1, max_tokens=5) for _ in range(4)]
    for _ in range(3):
        assert lengths(narrow.step()) == [("r0", 1), ("r1", 1)]
    narrow.run()


def test_the_newest_running_request_gives_its_blocks_to_older_ones() -> None:
    engine = SteppedScheduler(num_blocks=6, block_size=4, max_num_batched_tokens=32)
    first = engine.add(None, prompt=8, max_tokens=14)
    second = engine.add(None, prompt=8, max_tokens=14)
    preempted = []
    while engine.live:
        was_running = engine.running(second)
        engine.step()
        assert engine.running(first) or first not in engine.live, "the oldest request was preempted"
        if was_running and not engine.running(second) and second in engine.live:
            preempted.append(len(second.token_ids))
    assert preempted, "six blocks cannot hold both"
    for request in (first, second):
        engine.assert_exact(request)
    # Preempted once, it waits until it fits, instead of running and losing its work again and again.
    assert len(preempted) == 1


def test_preemption_gives_the_slot_back_too() -> None:
    engine = SteppedScheduler(num_slots=2, num_blocks=6, max_num_batched_tokens=32)
    engine.add("a", prompt=8, max_tokens=14)
    newer = engine.add("b", prompt=8, max_tokens=14)
    while engine.running(newer) or newer.num_output_tokens == 0:
        engine.step()
    assert not engine.slots.table.num_pins(engine.adapter("b"))
    engine.run()
    engine.assert_exact(newer)


def test_admission_leaves_running_requests_a_block_to_grow_into() -> None:
    engine = SteppedScheduler(num_blocks=24, block_size=4, max_num_seqs=16, max_num_batched_tokens=32)
    requests = [engine.add(None, prompt=4, max_tokens=16) for _ in range(32)]
    num_preempted = 0
    while engine.live:
        running = [request for request in requests if engine.running(request)]
        ran = {row.request.request_id for row in engine.step().rows}
        num_preempted += sum(request.request_id not in ran for request in running)
    for request in requests:
        engine.assert_exact(request)
    # Admitted into the last free block, the 32 would be preempted 33 times.
    assert num_preempted <= 16


def test_a_request_that_waits_for_blocks_is_not_overtaken() -> None:
    engine = SteppedScheduler(num_blocks=8, block_size=4)
    engine.add(None, prompt=16, max_tokens=3)
    large = engine.add(None, prompt=20, max_tokens=2)
    small = engine.add(None, prompt=2, max_tokens=2)
    while not engine.running(large):
        assert not engine.running(small)
        engine.step()
    engine.run()


def test_a_request_as_large_as_the_cache_runs_alone() -> None:
    engine = SteppedScheduler(num_blocks=5, block_size=4)
    others = [engine.add(None, prompt=5, max_tokens=5) for _ in range(2)]
    whole = engine.add(None, prompt=10, max_tokens=10)
    engine.run()
    for request in (*others, whole):
        engine.assert_exact(request)


ADAPTERS = st.sampled_from([None, *"uvwxyz"])
ACTIONS = st.one_of(
    st.tuples(st.just("add"), ADAPTERS, st.integers(1, 14), st.integers(1, 9)),
    st.tuples(st.just("abort"), st.integers(0, 50)),
    st.tuples(st.just("step"), st.integers(1, 4)),
)


@settings(deadline=None, max_examples=150)
@given(
    actions=st.lists(ACTIONS, max_size=50),
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 20),
    max_slot_wait_s=st.sampled_from([0.0, 0.35, 1000.0]),
)
def test_any_traffic_is_answered_exactly_and_leaves_nothing_behind(
    actions: list[tuple[object, ...]],
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_slot_wait_s: float,
) -> None:
    engine = SteppedScheduler(
        num_slots=2,
        # From the least that holds one largest request.
        num_blocks=-(-23 // block_size) + spare_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_slot_wait_s=max_slot_wait_s,
    )
    aborted: set[str] = set()
    for action in actions:
        match action:
            case ("add", str() | None as name, int(prompt), int(max_tokens)):
                engine.add(name, prompt, max_tokens)
            case ("abort", int(index)) if engine.live:
                request = engine.live[index % len(engine.live)]
                aborted.add(request.request_id)
                engine.abort(request)
            case ("step", int(count)):
                for _ in range(count):
                    engine.step()
    engine.run()
    for outcome in engine.outcomes.values():
        if outcome.request.request_id not in aborted:
            engine.assert_exact(outcome.request)
