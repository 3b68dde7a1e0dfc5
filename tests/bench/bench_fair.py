"""`make bench-fair`: how long adapters wait for slots that others use, and what it costs those others.

Prints one JSON line for each measure, of this engine with a random base model on one thread:

- `one_slot`: adapter `hot` always has many requests, adapter `other` asks once a second, and there is one slot. The
  time to the first token of `other` is compared with the bound, `max_slot_wait_s`; the rate of all tokens with that of
  an engine that lets `hot` keep the slot. Both engines run by turns, so that the machine's other work meets both.
- `slots_short`: requests at one rate, spread over 8 adapters on 8 slots, and over 16 on 8, by turns too.
- `schedule_cost`: choosing a step's rows while thousands of requests wait (`tests.bench.schedule_cost`).

Before anything is timed, an answer is compared with that of an engine that does nothing else.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.bench.fair_client import PROMPT_TOKENS, RANK, VOCAB, FairClient
from tests.bench.random_adapter import write_adapter
from tests.bench.result import report, require
from tests.bench.schedule_cost import schedule_cost
from tests.factories import tiny_llama

BOUND_S, FOR_EVER_S = 2.0, 1e6
HOT_REQUESTS, HOT_TOKENS, OTHER_TOKENS = 16, 64, 8
LEAST_RATE, MOST_TTFT = 0.85, 3.0
NUM_SLOTS, ANSWER_TOKENS = 8, 24
LOAD_SHARE = 0.5
"""Of the requests that 8 adapters on 8 slots get answered in a second, how many come in `slots_short`."""
PROMPT = list(range(1, PROMPT_TOKENS + 1))


def _saturate(client: FairClient, seconds: float) -> tuple[float, float]:
    """Many requests of `hot`, one a second of `other`; tokens a second of wall time, and of processor time."""
    began_s, num_tokens, busy_s, num_asked = time.perf_counter(), client.num_tokens, client.busy_s, 0
    while (passed_s := time.perf_counter() - began_s) < seconds:
        for _ in range(HOT_REQUESTS - client.num_unfinished("hot")):
            client.ask("hot", HOT_TOKENS)
        if passed_s >= num_asked:
            client.ask("other", OTHER_TOKENS)
            num_asked += 1
        client.step()
    num_tokens = client.num_tokens - num_tokens
    rates = num_tokens / (time.perf_counter() - began_s), num_tokens / (client.busy_s - busy_s)
    # Not timed: nobody's requests wait while another engine runs.
    client.finish()
    return rates


def one_slot(base: Path, adapters: Mapping[str, Path], seconds: float, rounds: int) -> None:
    """Two adapters on one slot."""
    hot, other, *_ = adapters.values()
    named = {"hot": hot, "other": other}
    expected = FairClient(base, named, slots=2, max_slot_wait_s=FOR_EVER_S).answer("other", OTHER_TOKENS, PROMPT)
    fair = FairClient(base, named, slots=1, max_slot_wait_s=BOUND_S)
    unfair = FairClient(base, named, slots=1, max_slot_wait_s=FOR_EVER_S)
    for _ in range(HOT_REQUESTS):
        fair.ask("hot", HOT_TOKENS)
    require(fair.answer("other", OTHER_TOKENS, PROMPT) == expected, "an answer differs beside a busy adapter")
    for client in (fair, unfair):
        client.finish()
        client.finished.clear()
    wall: dict[FairClient, list[float]] = {fair: [], unfair: []}
    busy: dict[FairClient, list[float]] = {fair: [], unfair: []}
    for _ in range(rounds):
        for client in (fair, unfair):
            of_wall, of_busy = _saturate(client, seconds)
            wall[client].append(of_wall)
            busy[client].append(of_busy)
    waits = fair.first_token_s("other")
    p99_s = waits[min(len(waits) - 1, int(0.99 * len(waits)))]
    share = statistics.mean(busy[fair]) / statistics.mean(busy[unfair])
    report(
        "one_slot", bound_s=BOUND_S, asked=len(waits), median_s=statistics.median(waits), p99_s=p99_s, max_s=waits[-1],
        fair_tokens_per_s=statistics.mean(wall[fair]), unfair_tokens_per_s=statistics.mean(wall[unfair]),
        rate_share=share, rate_share_wall=statistics.mean(wall[fair]) / statistics.mean(wall[unfair]),
        put_back=fair.engine.preemption_counts[1],
        compared="first tokens of `other` with the bound; tokens per second of processor time with an unfair engine's",
        goal=f"p99_s <= {BOUND_S} and rate_share >= {LEAST_RATE}", met=p99_s <= BOUND_S and share >= LEAST_RATE,
    )  # fmt: skip


def _arrive(client: FairClient, names: list[str], rate: float, seconds: float, seed: int) -> None:
    """Requests at random times, `rate` a second on average, each of a random adapter; returns when all have ended."""
    draw = random.Random(seed)
    began_s = time.perf_counter()
    due_s = began_s + draw.expovariate(rate)
    while due_s < began_s + seconds or client.unfinished:
        while due_s < min(time.perf_counter(), began_s + seconds):
            client.ask(draw.choice(names), ANSWER_TOKENS, asked_s=due_s)
            due_s += draw.expovariate(rate)
        if client.unfinished:
            client.step()
        else:
            time.sleep(max(0.0, due_s - time.perf_counter()))


def _most_per_s(client: FairClient, names: list[str]) -> float:
    """Requests that the engine answers in a second when they are never too few."""
    for index in range(4 * NUM_SLOTS):
        client.ask(names[index % NUM_SLOTS], ANSWER_TOKENS)
    began_s = time.perf_counter()
    client.finish()
    return 4 * NUM_SLOTS / (time.perf_counter() - began_s)


def slots_short(base: Path, adapters: Mapping[str, Path], seconds: float, rounds: int) -> None:
    """Twice as many adapters as slots, at the same rate of requests."""
    names = list(adapters)
    few = FairClient(base, dict(list(adapters.items())[:NUM_SLOTS]), slots=NUM_SLOTS, max_slot_wait_s=BOUND_S)
    many = FairClient(base, adapters, slots=NUM_SLOTS, max_slot_wait_s=BOUND_S)
    for name in names[:NUM_SLOTS]:
        is_same = few.answer(name, ANSWER_TOKENS, PROMPT) == many.answer(name, ANSWER_TOKENS, PROMPT)
        require(is_same, f"{name} answers otherwise with more adapters loaded")
    _most_per_s(few, names)
    rate = LOAD_SHARE * _most_per_s(few, names)
    few.finished.clear()
    many.finished.clear()
    for index in range(rounds):
        _arrive(few, names[:NUM_SLOTS], rate, seconds, seed=index)
        _arrive(many, names, rate, seconds, seed=index)
    of_few, of_many = few.first_token_s(), many.first_token_s()
    ratio = statistics.median(of_many) / statistics.median(of_few)
    report(
        "slots_short", slots=NUM_SLOTS, adapters=len(names), requests=len(of_many), requests_per_s=rate,
        median_ms=1e3 * statistics.median(of_many), p99_ms=1e3 * of_many[int(0.99 * len(of_many))],
        median_ms_8=1e3 * statistics.median(of_few), p99_ms_8=1e3 * of_few[int(0.99 * len(of_few))],
        ratio=ratio, slot_writes=many.engine.manager.num_slot_writes,
        compared="median time to the first token with 16 adapters, and with 8, on 8 slots at the same rate",
        goal=f"ratio <= {MOST_TTFT}", met=ratio <= MOST_TTFT,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of one turn of one engine")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = tiny_llama(
            folder / "base", layers=6, hidden=256, heads=8, kv_heads=4, intermediate=768, vocab=VOCAB,
            initializer_range=0.05,
        )  # fmt: skip
        adapters = {f"a{index}": write_adapter(base, folder / f"a{index}", RANK, seed=index) for index in range(16)}
        one_slot(base, adapters, arguments.seconds, arguments.rounds)
        slots_short(base, adapters, arguments.seconds, arguments.rounds)
    for num_adapters in (50, 500, 5000):
        schedule_cost(num_adapters, 2 * num_adapters)
    return 0


if __name__ == "__main__":
    sys.exit(main())
