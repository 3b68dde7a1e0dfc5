"""The queues of waiting requests, and the adapters that take turns in steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_core.engine.request import Request, ScheduledRow
from lora_core.engine.step_adapters import StepAdapters
from lora_core.engine.waiting import WaitingQueues
from lora_core.types import AdapterRef

A, B, C, D = (AdapterRef(name, generation) for generation, name in enumerate("abcd"))


def request(arrival: int, adapter: AdapterRef | None) -> Request:
    return Request(request_id=str(arrival), token_ids=[1], num_prompt_tokens=1, arrival=arrival, adapter=adapter)


def test_a_queue_is_in_order_of_arrival_and_queues_in_that_of_their_beginning() -> None:
    now_s = 0.0
    queues = WaitingQueues(lambda: now_s)
    requests = [request(arrival, adapter) for arrival, adapter in ((2, A), (3, None), (4, B), (5, A))]
    for one in requests:
        now_s += 1
        queues.add(one)
    back = request(1, A)
    queues.add(back)
    queues.check()
    assert len(queues) == 5
    assert queues.first(A) is back
    assert queues.oldest(5, ()) == [A, B]
    assert queues.oldest(1, {A}) == [B]
    queues.wait_anew(A, 4.0)
    assert queues.oldest(5, ()) == [B, A]
    assert (queues.since_s(A), queues.since_s(B)) == (4.0, 3.0)
    assert queues.drop(B) == [requests[2]]
    queues.remove(requests[3])
    queues.remove(back)
    queues.remove(requests[0])
    queues.check()
    assert A not in queues
    assert B not in queues
    assert list(queues) == [requests[1]]


@pytest.mark.parametrize("num_queues", [0, 1, 5, 7, 10])
def test_every_adapter_is_named_in_its_turn(num_queues: int) -> None:
    queues = WaitingQueues(lambda: 0.0)
    adapters = [AdapterRef(str(index), index) for index in range(num_queues)]
    for arrival, adapter in enumerate(adapters):
        queues.add(request(arrival, adapter))
    for _ in range(3):
        named = [adapter for _ in range(-(-num_queues // 5)) for adapter in queues.some(5)]
        assert sorted(named) == sorted(adapters)


@given(
    limit=st.integers(1, 4),
    running=st.lists(st.sets(st.sampled_from([A, B, C, D])), min_size=1, max_size=30),
)
def test_adapters_beyond_the_limit_take_turns_in_steps(limit: int, running: list[set[AdapterRef]]) -> None:
    turns = StepAdapters(limit)
    waited = dict.fromkeys((A, B, C, D), 0)
    for adapters in running:
        turns.choose(sorted(adapters))
        chosen = {adapter for adapter in adapters if turns.admits(adapter)}
        assert len(chosen) == min(limit, len(adapters))
        assert turns.admits(None)
        turns.ran([ScheduledRow(request(0, adapter), 1) for adapter in chosen])
        for adapter in waited:
            waited[adapter] = waited[adapter] + 1 if adapter in adapters and adapter not in chosen else 0
        assert max(waited.values()) <= 3


def test_adapters_that_come_and_go_keep_nobody_waiting() -> None:
    turns = StepAdapters(1)
    chosen = []
    for other in (A, B, C, A, B, C):
        turns.choose([other, D])
        chosen.append(D if turns.admits(D) else other)
        turns.ran([ScheduledRow(request(0, chosen[-1]), 1)])
    assert chosen == [A, D, C, D, B, D]


def test_without_a_limit_every_adapter_is_in_every_step() -> None:
    turns = StepAdapters(None)
    turns.choose([A])
    assert turns.admits(A)
    assert turns.admits(B)


def test_one_that_comes_during_a_step_takes_part_if_there_is_room() -> None:
    turns = StepAdapters(2)
    turns.choose([A])
    for adapter in (B, C):
        turns.add(adapter)
    assert [turns.admits(adapter) for adapter in (A, B, C)] == [True, True, False]
