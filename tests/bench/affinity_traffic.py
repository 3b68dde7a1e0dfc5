"""Requests at given times through one fleet, and what came of them."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from deployments.generation import GenerateCall, GenerateChunk
from lora_core.messages import SamplingParams
from tests.bench.affinity_fleet import WARM

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

Ask = Callable[[GenerateCall], AsyncIterator[GenerateChunk]]
"""Streams a call's answer."""


@dataclass(frozen=True)
class Arrival:
    """A request to come."""

    at_s: float
    adapter: str
    prompt: tuple[int, ...]


def zipf_arrivals(
    adapters: Sequence[str], *, exponent: float, per_s: float, seconds: float, prompt_tokens: int, vocab: int, seed: int
) -> list[Arrival]:
    """Requests at random times, of adapters whose popularity falls with a power of their place.

    The times are those of a Poisson process, given how many there are: of short trials at rising rates, each gets more
    requests than the one before.
    """
    draw = random.Random(seed)
    weights = [1 / place**exponent for place in range(1, len(adapters) + 1)]
    times = sorted(draw.uniform(0.0, seconds) for _ in range(round(per_s * seconds)))
    prompts = [tuple(draw.randrange(vocab) for _ in range(prompt_tokens)) for _ in times]
    return list(map(Arrival, times, draw.choices(adapters, weights, k=len(times)), prompts))


@dataclass
class Outcome:
    """What came of one request."""

    arrival: Arrival
    first_s: float | None = None
    """From when it was due to its first token; None where none came."""
    is_warm: bool = False
    """Whether its adapter was in a slot when it came to its replica."""
    replica_id: str = ""
    tokens: list[int] = field(default_factory=list)
    error: str = ""


async def send(ask: Ask, arrivals: Sequence[Arrival], num_tokens: int) -> list[Outcome]:
    """Send all requests when they are due, whatever has become of those before; returns when all have ended."""
    began_s = time.perf_counter()

    async def one(number: int, arrival: Arrival) -> Outcome:
        await asyncio.sleep(began_s + arrival.at_s - time.perf_counter())
        outcome = Outcome(arrival)
        call = GenerateCall(
            request_id=str(number),
            lora_name=arrival.adapter,
            prompt_token_ids=list(arrival.prompt),
            sampling=GREEDY,
            max_tokens=num_tokens,
            # A chunk for each token would keep the machine busy, not the fleet.
            streamed=False,
        )
        try:
            async for chunk in ask(call):
                if outcome.first_s is None:
                    outcome.first_s = time.perf_counter() - began_s - arrival.at_s
                    outcome.is_warm = chunk.text == WARM
                    outcome.replica_id = "" if chunk.snapshot is None else chunk.snapshot.replica_id
                outcome.tokens += chunk.token_ids
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
        return outcome

    return list(await asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(arrivals))))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What came of all requests; times to the first token in milliseconds."""

    requests: int
    failed: int
    goodput_per_s: float
    """Requests a second whose first token came in time."""
    in_time: float
    """Their share of all requests."""
    p50_ms: float
    p99_ms: float
    warm_p50_ms: float
    warm_p99_ms: float
    cold_p50_ms: float
    cold_p99_ms: float
    slot_hits: float
    """Share of the requests that found their adapter in a slot."""
    max_over_mean: float
    """Requests of the busiest replica, over the mean."""


def summary(outcomes: Sequence[Outcome], *, seconds: float, in_time_s: float, num_replicas: int) -> Summary:
    """Add up the outcomes of a time."""
    answered = [outcome for outcome in outcomes if outcome.first_s is not None and not outcome.error]
    waits = {kind: _sorted_ms(o for o in answered if o.is_warm is kind) for kind in (True, False)}
    everything = sorted(waits[True] + waits[False])
    num_in_time = sum(wait_ms <= 1e3 * in_time_s for wait_ms in everything)
    by_replica = Counter(outcome.replica_id for outcome in answered)
    return Summary(
        requests=len(outcomes),
        failed=len(outcomes) - len(answered),
        goodput_per_s=num_in_time / seconds,
        in_time=num_in_time / max(1, len(outcomes)),
        p50_ms=quantile(everything, 0.5),
        p99_ms=quantile(everything, 0.99),
        warm_p50_ms=quantile(waits[True], 0.5),
        warm_p99_ms=quantile(waits[True], 0.99),
        cold_p50_ms=quantile(waits[False], 0.5),
        cold_p99_ms=quantile(waits[False], 0.99),
        slot_hits=len(waits[True]) / max(1, len(answered)),
        max_over_mean=max(by_replica.values(), default=0) * num_replicas / max(1, len(answered)),
    )


def quantile(rising: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed; 0 of none."""
    return rising[min(len(rising) - 1, int(share * len(rising)))] if rising else 0.0


def _sorted_ms(outcomes: Iterable[Outcome]) -> list[float]:
    return sorted(1e3 * outcome.first_s for outcome in outcomes if outcome.first_s is not None)
