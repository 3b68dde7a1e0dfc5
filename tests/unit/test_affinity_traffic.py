"""The traffic of `make bench-affinity`: when requests come, and how what came of them is added up."""

import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from deployments.generation import GenerateCall, GenerateChunk, SlotSnapshot
from tests.bench.affinity_engine import Line, real_bytes, sleep_until
from tests.bench.affinity_limit import sustained
from tests.bench.affinity_traffic import Arrival, quantile, send, summary, zipf_arrivals

NAMES = [f"a{index}" for index in range(64)]


def arrivals(seed: int = 1, seconds: float = 400.0) -> list[Arrival]:
    return zipf_arrivals(NAMES, exponent=1.0, per_s=25.0, seconds=seconds, prompt_tokens=4, vocab=10, seed=seed)


def test_arrivals_are_zipf_at_the_rate_and_the_same_for_the_same_seed() -> None:
    found = arrivals()
    assert found == arrivals()
    assert found != arrivals(seed=2)
    assert [arrival.at_s for arrival in found] == sorted(arrival.at_s for arrival in found)
    assert len(found) / 400 == pytest.approx(25, rel=0.05)
    counts = [count for _, count in Counter(arrival.adapter for arrival in found).most_common()]
    # Of 64 with exponent 1: the first has 1 / H(64) = 21 %, the first ten 62 %.
    assert counts[0] / len(found) == pytest.approx(0.21, abs=0.02)
    assert sum(counts[:10]) / len(found) == pytest.approx(0.62, abs=0.03)


def test_an_adapter_is_as_large_as_the_one_it_stands_for() -> None:
    assert real_bytes(16, "8b") == pytest.approx(84e6, rel=0.01)
    assert real_bytes(16, "70b") == pytest.approx(414e6, rel=0.01)


def test_loads_at_once_take_turns() -> None:
    line = Line(1000.0)
    first, second = line.due_s(100), line.due_s(300)
    assert second - first == pytest.approx(0.3)
    sleep_until(first)
    assert time.monotonic() >= first


@pytest.mark.parametrize("limit", [2.0, 9.0, 12.0, 13.0, 25.0, 61.0])
async def test_the_highest_rate_that_holds_is_found_to_a_tenth(limit: float) -> None:
    tried = []

    async def holds(per_s: float) -> bool:
        tried.append(per_s)
        return per_s <= limit

    found = await sustained(holds, first=12.0, most=100.0)
    assert found in tried
    assert found <= limit < 1.11 * found
    assert len(tried) <= 8


async def test_a_fleet_that_holds_nothing_or_everything_ends_the_search() -> None:
    async def always(per_s: float) -> bool:
        assert per_s <= 100
        return True

    async def never(per_s: float) -> bool:
        return False

    assert await sustained(always, first=12.0, most=100.0) == pytest.approx(91.125)
    assert await sustained(never, first=12.0, most=100.0) == 0


async def test_outcomes_are_added_up_by_how_the_adapter_was_found() -> None:
    async def ask(call: GenerateCall) -> AsyncIterator[GenerateChunk]:
        assert call.lora_name is not None
        if call.lora_name == "lost":
            raise RuntimeError("lost")
        snapshot = SlotSnapshot(replica_id=f"on-{call.lora_name}", sequence=1, resident=())
        yield GenerateChunk(text="cold" if call.lora_name == "b" else "warm", token_ids=[1], snapshot=snapshot)
        yield GenerateChunk(text="", token_ids=[2, 3])

    asked = [Arrival(0.001 * index, name, (1, 2)) for index, name in enumerate(["a", "b", "lost", "a"])]
    outcomes = await send(ask, asked, 3)
    assert [outcome.tokens for outcome in outcomes] == [[1, 2, 3], [1, 2, 3], [], [1, 2, 3]]
    found = summary(outcomes, seconds=2.0, in_time_s=60.0, num_replicas=2)
    assert (found.requests, found.failed, found.goodput_per_s) == (4, 1, 1.5)
    assert found.in_time == 3 / 4
    assert found.slot_hits == pytest.approx(2 / 3)
    assert found.max_over_mean == pytest.approx(4 / 3)
    assert found.cold_p50_ms > 0
    assert summary(outcomes, seconds=2.0, in_time_s=0.0, num_replicas=2).goodput_per_s == 0


def test_quantiles() -> None:
    rising = [float(value) for value in range(100)]
    assert (quantile(rising, 0.5), quantile(rising, 0.99), quantile([], 0.5)) == (50.0, 99.0, 0.0)
