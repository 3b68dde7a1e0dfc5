"""The scheduler with real blocks and real slots, on a clock of its own and a model of one line."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_core.adapters import AdapterTable
from lora_core.engine.blocks import BlockPool
from lora_core.engine.request import Request, ScheduledBatch
from lora_core.engine.scheduler import Scheduler
from lora_core.messages import SamplingParams
from lora_core.types import AdapterRef

VOCAB = 251
STEP_S = 0.1


class Slots(AdapterTable[str]):
    """The adapter table behind the manager's name for activation, counting pins."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.pins: Counter[AdapterRef] = Counter()

    def activate_adapter(self, ref: AdapterRef) -> int:
        return self.activate(ref).slot

    def pin(self, ref: AdapterRef) -> None:
        super().pin(ref)
        self.pins[ref] += 1

    def unpin(self, ref: AdapterRef) -> None:
        super().unpin(ref)
        self.pins[ref] -= 1


def next_token(text: list[int], adapter: AdapterRef | None) -> int:
    """A model: every token of the text, its place, and the adapter decide what follows."""
    salt = 0 if adapter is None else adapter.generation
    return (sum((place + 1) * token for place, token in enumerate(text)) + salt) % VOCAB


def answer(prompt: list[int], adapter: AdapterRef | None, max_tokens: int) -> list[int]:
    text = list(prompt)
    for _ in range(max_tokens):
        text.append(next_token(text, adapter))
    return text[len(prompt) :]


@dataclass
class Outcome:
    """What became of a request."""

    request: Request
    started_s: float | None = None
    finished_s: float | None = None


@dataclass
class Engine:
    """Steps the scheduler, keeps a KV cache of (token, generation) by block, and reads answers only from there."""

    num_slots: int = 2
    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    max_slot_wait_s: float = 2.0
    checks: bool = True
    now_s: float = 0.0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    history: list[ScheduledBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = Slots(self.num_slots)
        self.blocks = BlockPool(self.num_blocks, self.block_size)
        self.scheduler = Scheduler(
            self.blocks,
            self.slots,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_slot_wait_s=self.max_slot_wait_s,
            clock=lambda: self.now_s,
        )
        self.cache: dict[tuple[int, int], tuple[int, AdapterRef | None]] = {}
        self.live: list[Request] = []

    def adapter(self, name: str) -> AdapterRef:
        found = self.slots.find(name)
        return self.slots.add(name, name) if found is None else found[0]

    def add(self, name: str | None, prompt: int = 3, max_tokens: int = 4) -> Request:
        arrival = len(self.outcomes)
        request = Request(
            request_id=f"r{arrival}",
            token_ids=[(arrival * 7 + place) % VOCAB for place in range(prompt)],
            num_prompt_tokens=prompt,
            arrival=arrival,
            sampling=SamplingParams(max_tokens=max_tokens),
            adapter=None if name is None else self.adapter(name),
        )
        self.outcomes[request.request_id] = Outcome(request)
        self.live.append(request)
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request)
        self.live.remove(request)
        self.check()

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self.history.append(batch)
        self.check()
        assert batch.num_tokens <= self.max_num_batched_tokens
        assert len(batch.rows) <= self.max_num_seqs
        assert len({row.request.request_id for row in batch.rows}) == len(batch.rows)
        assert all(row.num_tokens > 0 for row in batch.rows)
        assert len({row.adapter for row in batch.rows} - {None}) <= self.num_slots
        self.now_s += STEP_S
        for row in batch.rows:
            self._run(row.request, row.num_tokens, row.samples)
        self.check()
        return batch

    def _run(self, request: Request, num_tokens: int, samples: bool) -> None:
        outcome = self.outcomes[request.request_id]
        if outcome.started_s is None:
            outcome.started_s = self.now_s - STEP_S
        for place in range(request.num_computed, request.num_computed + num_tokens):
            self.cache[self._cell(request, place)] = (request.token_ids[place], request.adapter)
        request.num_computed += num_tokens
        if samples:
            read = [self.cache[self._cell(request, place)] for place in range(request.num_computed)]
            assert {adapter for _, adapter in read} == {request.adapter}
            request.token_ids.append(next_token([token for token, _ in read], request.adapter))
            if request.finish_reason(frozenset()) is not None:
                outcome.finished_s = self.now_s
                self.scheduler.finish(request)
                self.live.remove(request)

    def _cell(self, request: Request, place: int) -> tuple[int, int]:
        return request.block_table[place // self.block_size], place % self.block_size

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.live:
                break
            self.step()
        assert not self.live, f"{len(self.live)} requests are not done after {max_steps} steps"
        assert self.blocks.num_free == self.num_blocks
        assert not +self.slots.pins
        assert self.scheduler.schedule().rows == []

    def check(self) -> None:
        if not self.checks:
            return
        self.scheduler.check()
        self.slots.check()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        running = Counter(r.adapter for r in self.live if r.adapter is not None and r.block_table)
        assert running == +self.slots.pins

    def assert_exact(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.token_ids[len(prompt) :] == answer(prompt, request.adapter, request.sampling.max_tokens)

    def running(self, request: Request) -> bool:
        return bool(request.block_table)


def lengths(batch: ScheduledBatch) -> list[tuple[str, int]]:
    return [(row.request.request_id, row.num_tokens) for row in batch.rows]


# Tokens and blocks


def test_a_long_prompt_goes_in_chunks_beside_requests_that_decode() -> None:
    engine = Engine(max_num_batched_tokens=8)
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
    engine = Engine(max_num_batched_tokens=8)
    engine.add(None, prompt=10, max_tokens=2)
    engine.add(None, prompt=3, max_tokens=9)
    engine.add(None, prompt=30, max_tokens=2)
    for _ in range(2):
        engine.step()
    # Both older ones decode now, and every token they leave goes to the prompt.
    assert lengths(engine.step()) == [("r0", 1), ("r1", 1), ("r2", 6)]


def test_seats_and_tokens_both_bound_what_runs() -> None:
    engine = Engine(max_num_seqs=3, max_num_batched_tokens=16)
    requests = [engine.add(None, prompt=1) for _ in range(5)]
    engine.step()
    assert [engine.running(r) for r in requests] == [True] * 3 + [False] * 2
    narrow = Engine(max_num_seqs=8, max_num_batched_tokens=2)
    requests = [narrow.add(None, prompt=1, max_tokens=5) for _ in range(4)]
    for _ in range(3):
        assert lengths(narrow.step()) == [("r0", 1), ("r1", 1)]
    narrow.run()


def test_the_newest_running_request_gives_its_blocks_to_older_ones() -> None:
    engine = Engine(num_blocks=6, block_size=4, max_num_batched_tokens=32)
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
    engine = Engine(num_slots=2, num_blocks=6, max_num_batched_tokens=32)
    engine.add("a", prompt=8, max_tokens=14)
    newer = engine.add("b", prompt=8, max_tokens=14)
    while engine.running(newer) or newer.num_output_tokens == 0:
        engine.step()
    assert not engine.slots.pins[engine.adapter("b")]
    engine.run()
    engine.assert_exact(newer)


def test_admission_leaves_running_requests_a_block_to_grow_into() -> None:
    engine = Engine(num_blocks=24, block_size=4, max_num_seqs=16, max_num_batched_tokens=32)
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
    engine = Engine(num_blocks=8, block_size=4)
    engine.add(None, prompt=16, max_tokens=3)
    large = engine.add(None, prompt=20, max_tokens=2)
    small = engine.add(None, prompt=2, max_tokens=2)
    while not engine.running(large):
        assert not engine.running(small)
        engine.step()
    engine.run()


def test_a_request_as_large_as_the_cache_runs_alone() -> None:
    engine = Engine(num_blocks=5, block_size=4)
    others = [engine.add(None, prompt=5, max_tokens=5) for _ in range(2)]
    whole = engine.add(None, prompt=10, max_tokens=10)
    engine.run()
    for request in (*others, whole):
        engine.assert_exact(request)


# Slots


def test_base_and_resident_requests_pass_one_that_lacks_a_slot() -> None:
    engine = Engine(num_slots=1, max_num_seqs=8)
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
    engine = Engine(num_slots=1, max_slot_wait_s=1000.0)
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
    engine = Engine(num_slots=1, max_slot_wait_s=1000.0, max_num_seqs=2)
    first = engine.add("a", max_tokens=3)
    engine.step()
    waiter, back = engine.add("b"), engine.add("a", max_tokens=3)
    # Two seats: "a" may follow itself while it runs, which is what starves "b" without a bound.
    engine.run()
    outcome = engine.outcomes
    assert outcome[back.request_id].started_s < outcome[first.request_id].finished_s  # type: ignore[operator]
    assert outcome[waiter.request_id].started_s >= outcome[back.request_id].finished_s  # type: ignore[operator]


def saturate(engine: Engine, depths: dict[str, int], steps: int, max_tokens: Sequence[int] = (10,)) -> Counter[str]:
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


@pytest.mark.parametrize("max_slot_wait_s", [0.0, 1.0, 3.0])
def test_one_request_gets_the_only_slot_within_its_bound_under_steady_load(max_slot_wait_s: float) -> None:
    engine = Engine(num_slots=1, max_slot_wait_s=max_slot_wait_s)
    saturate(engine, {"a": 6}, steps=20)
    waiter = engine.add("b")
    arrived_s = engine.now_s
    saturate(engine, {"a": 6}, steps=80)
    started_s = engine.outcomes[waiter.request_id].started_s
    assert started_s is not None
    # The bound, and then the longest request of "a": ten tokens, a step each, admitted in the bound's last step.
    assert started_s - arrived_s <= max_slot_wait_s + 12 * STEP_S
    assert started_s - arrived_s >= max_slot_wait_s
    engine.assert_exact(waiter)
    engine.run()


def test_two_adapters_share_one_slot_fairly() -> None:
    engine = Engine(num_slots=1, max_slot_wait_s=1.0)
    done = saturate(engine, {"a": 6, "b": 6}, steps=600)
    assert min(done.values()) > 0.7 * max(done.values())
    slots = [{row.adapter.name for row in batch.rows if row.adapter is not None} for batch in engine.history]
    turns = sum(now != before and bool(now) for before, now in itertools.pairwise(slots))
    # 60 s of 1 s waits and 1 s drains: about thirty turns, not one a step.
    assert 15 <= turns <= 60
    engine.run()


@pytest.mark.parametrize("num_slots", [2, 3])
def test_no_adapter_keeps_its_slot_while_others_take_turns(num_slots: int) -> None:
    engine = Engine(num_slots=num_slots, max_slot_wait_s=2.0, max_num_seqs=8)
    done = saturate(engine, dict.fromkeys("abcde", 6), steps=1500, max_tokens=range(2, 31))
    assert set(done) == set("abcde")
    assert min(done.values()) > 0.6 * max(done.values())
    engine.run()


def test_an_adapter_with_much_traffic_takes_turns_with_those_that_have_little() -> None:
    engine = Engine(num_slots=2, max_slot_wait_s=0.5)
    done = saturate(engine, {"a": 12, "b": 3, "c": 3, "d": 3}, steps=1500, max_tokens=range(2, 31))
    # Four times the traffic of each of the others: about four times the answers, and not all there is.
    assert min(done.values()) > 0.2 * done["a"]
    engine.run()


def test_a_steady_adapter_is_not_starved_by_a_stream_of_newcomers() -> None:
    engine = Engine(num_slots=1, max_slot_wait_s=0.5)
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
    engine = Engine(num_slots=2, max_slot_wait_s=1.0)
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
    engine = Engine(num_slots=2, max_slot_wait_s=1.0)
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
    engine = Engine(num_slots=1, max_slot_wait_s=1.0)
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
    engine = Engine(num_slots=2, max_slot_wait_s=1.0, max_num_seqs=3)
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


def test_each_wait_for_a_slot_is_measured_anew() -> None:
    engine = Engine(num_slots=1)
    engine.add("a", max_tokens=6)
    waiter = engine.add("b")
    engine.step()
    assert waiter.passed_over_s == 0.0
    while not engine.running(waiter):
        engine.step()
    assert waiter.passed_over_s is None


def test_no_newcomer_takes_the_slot_that_was_set_aside_for_another() -> None:
    engine = Engine(num_slots=1, max_slot_wait_s=1.0, num_blocks=12, block_size=4, max_num_batched_tokens=64)
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
    engine = Engine(num_slots=4, max_num_seqs=16, max_num_batched_tokens=64, max_slot_wait_s=0.5, checks=False)
    requests = [engine.add(f"adapter-{index}", max_tokens=2) for index in range(1000)]
    engine.run(max_steps=1000)
    for request in requests:
        engine.assert_exact(request)


def test_aborts_free_blocks_and_pins_at_once_waiting_or_running() -> None:
    engine = Engine(num_slots=1)
    running, waiting = engine.add("a", max_tokens=9), engine.add("b")
    engine.step()
    engine.abort(waiting)
    engine.abort(running)
    assert engine.blocks.num_free == engine.num_blocks
    assert engine.step().rows == []


ADAPTERS = st.sampled_from([None, *"uvwxyz"])
ACTIONS = st.one_of(
    st.tuples(st.just("add"), ADAPTERS, st.integers(1, 14), st.integers(1, 9)),
    st.tuples(st.just("abort"), st.integers(0, 50)),
    st.tuples(st.just("step"), st.integers(1, 4)),
)


@settings(deadline=None, max_examples=4000)
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
    engine = Engine(
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
