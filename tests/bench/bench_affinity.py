"""`make bench-affinity`: what it is worth to send requests to the replicas that hold their adapters.

Real fleets under Ray Serve, of 2 and of 4 replicas with 16 adapter slots together, serve 64 adapters whose popularity
follows Zipf's law with exponent 1.0 (the ten most popular get 62 % of the requests). The base model is tiny; a step
takes as long as on a device, and a load as long as that of an adapter of Llama 3 of rank 8 to 64 at measured rates (8B:
42 to 336 MB; `--model 70b`: 0.2 to 1.7 GB). Host memory holds two fifths of them (`tests.bench.affinity_engine`).

- `ours`: this project's router, with its copies, warm-ups and protected slots;
- `pow2`: Ray Serve's power of two choices, which knows nothing of adapters;
- `multiplex`: Ray Serve's router for `@serve.multiplexed` models, which load one at a time on a replica;
- `hrw`: rendezvous hashing of the adapter's name alone.

At a rate that all of them can do they differ little, and at one that none can all are late. So each is asked for the
highest rate that it sustains, at which 95 % of the first tokens come within `--in-time` seconds of when their requests
were due, by the same search (`tests.bench.affinity_limit`) over the same arrivals: goodput is what it answers in time
at that rate. Then each gets the highest rate that stock multiplexing sustains, for longer, and times to the first token
are compared. Answers come in few chunks, so that processors are not what saturates; how busy the machine was is in each
line: where it is busy throughout, the figures are the machine's.

What limits a fleet depends on the answers. With short ones, of 8 tokens, it is the loads, and what waits for them. Long
ones keep their adapters in slots: with `--answer-tokens 32` as many adapters are at work as there are slots at about 27
requests a second, whichever replicas they are on, and no router can help that.

Prints a JSON line for each trial and each fleet, and one at the end with the goals. Before anything is timed, answers
are compared with PEFT's. About half an hour on two cores.
"""

import argparse
import asyncio
import dataclasses
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deployments.local_cluster import ENVIRONMENT, LocalCluster

# Ray reads its environment when it is imported.
os.environ.update(ENVIRONMENT)

import psutil
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.engine_handle import EngineHandle
from deployments.generation import GenerateCall, GenerateChunk, Refusal
from lora_core.workload import SlotCounts
from tests.bench.affinity_engine import BYTES_PER_RANK, MODEL_VARIABLE
from tests.bench.affinity_fleet import ARMS, MULTIPLEX, OURS, POW2, deploy
from tests.bench.affinity_limit import sustained
from tests.bench.affinity_traffic import Arrival, Ask, Summary, send, summary, zipf_arrivals
from tests.bench.random_adapter import write_adapter
from tests.bench.result import report, require
from tests.factories import reference_tokens, tiny_llama

NUM_ADAPTERS, NUM_SLOTS = 64, 16
RANKS = (8, 16, 32, 64)
EXPONENT = 1.0
VOCAB, PROMPT_TOKENS, CHECKED_TOKENS = 512, 24, 32
HOST_SHARE = 0.4
"""Of all adapters, by size, that a replica's host memory holds."""
FIRST_PER_S, MOST_PER_S = 8.0, 100.0
"""Requests a second that are tried first, and at most."""
IN_TIME = 0.95
"""Of the requests, that a fleet answers in time which sustains their rate."""
LEAST_GOODPUT, MOST_P99 = 1.5, 0.5


def app_settings(base: Path, adapters: Mapping[str, Path], num_replicas: int, host_memory_bytes: int) -> dict[str, Any]:
    """What each replica is started with."""
    return {
        "model": str(base),
        "engine": {
            "dtype": "float32",
            "device": "cpu",
            "num_threads": 1,
            "kv_cache_tokens": 16_384,
            "max_num_seqs": 32,
        },
        "lora_config": {
            "enable_lora": True,
            "max_num_loras": NUM_SLOTS // num_replicas,
            "max_lora_rank": max(RANKS),
            "host_memory_bytes": host_memory_bytes,
            "lora_paths": [f"{name}={path}" for name, path in adapters.items()],
        },
    }


class Fleet:
    """One deployed fleet, as the benchmark asks it."""

    def __init__(self, arm: str, handle: DeploymentHandle, num_replicas: int) -> None:
        self.arm = arm
        self.num_replicas = num_replicas
        self._handle = handle
        self._ours = EngineHandle(handle)

    @property
    def ask(self) -> Ask:
        """How its requests are sent."""
        return self._ours.generate if self.arm == OURS else self._plainly

    async def _plainly(self, call: GenerateCall) -> AsyncIterator[GenerateChunk]:
        adapter = "" if self.arm == POW2 else call.lora_name
        options = self._handle.options(stream=True, multiplexed_model_id=adapter or "")
        async for chunk in options.generate.remote(call):
            if isinstance(chunk, Refusal):
                raise chunk.error()
            yield chunk

    async def slot_counts(self) -> list[SlotCounts]:
        """Of each replica."""
        return list(await self._handle.broadcast("slot_counts").results_async(timeout_s=30))


async def check(fleet: Fleet, base: Path, adapters: Mapping[str, Path]) -> None:
    """Refuse a fleet whose answers are not PEFT's."""
    prompt = tuple(range(1, PROMPT_TOKENS + 1))
    some = list(adapters)[:: len(adapters) // 3]
    outcomes = await send(fleet.ask, [Arrival(0.0, name, prompt) for name in some], CHECKED_TOKENS)
    for name, outcome in zip(some, outcomes, strict=True):
        expected = reference_tokens(base, adapters[name], list(prompt), CHECKED_TOKENS)
        require(outcome.tokens == expected, f"{fleet.arm}: {name} answers {outcome.tokens} ({outcome.error})")


@dataclasses.dataclass(frozen=True)
class Found:
    """What came of one fleet."""

    at_limit: Summary | None
    """At the highest rate that it sustains; None where it sustained none."""
    limit_per_s: float
    compared: Summary
    """At the rate at which all are compared."""
    compared_per_s: float


class Measurement:
    """One fleet under one rate after another.

    Args:
        fleet: As deployed.
        adapters: Names, the most popular first.
        options: The command's.
    """

    def __init__(self, fleet: Fleet, adapters: Sequence[str], options: argparse.Namespace) -> None:
        self._fleet, self._adapters, self._options = fleet, adapters, options
        self._sustained: dict[float, Summary] = {}

    async def run(self, compared_per_s: float | None) -> Found:
        """Search the highest rate, then measure at the one given, or else at that."""
        await self.trial(FIRST_PER_S, self._options.warm_up)
        limit = await sustained(self._holds, FIRST_PER_S, MOST_PER_S)
        rate = compared_per_s or limit or FIRST_PER_S
        # What the search left behind, a fleet gets over first.
        await self.trial(rate, self._options.warm_up)
        compared = await self.trial(rate, self._options.seconds)
        return Found(self._sustained.get(limit), limit, compared, rate)

    async def _holds(self, per_s: float) -> bool:
        found = await self.trial(per_s, self._options.trial)
        if found.in_time >= IN_TIME:
            self._sustained[per_s] = found
        return found.in_time >= IN_TIME

    async def trial(self, per_s: float, seconds: float) -> Summary:
        """Send requests at a rate, wait for their ends, and print what came of them."""
        # The same for every fleet, and other ones at each rate.
        seed = 1_000_000 * self._options.seed + round(1000 * per_s)
        arrivals = zipf_arrivals(
            self._adapters, exponent=EXPONENT, per_s=per_s, seconds=seconds, prompt_tokens=PROMPT_TOKENS, vocab=VOCAB,
            seed=seed,
        )  # fmt: skip
        before = await self._fleet.slot_counts()
        psutil.cpu_percent()
        outcomes = await send(self._fleet.ask, arrivals, self._options.answer_tokens)
        machine_busy = psutil.cpu_percent() / 100
        await asyncio.sleep(1.0)
        after = await self._fleet.slot_counts()
        fleet = self._fleet
        found = summary(outcomes, seconds=seconds, in_time_s=self._options.in_time, num_replicas=fleet.num_replicas)
        report(
            "affinity", arm=fleet.arm, replicas=fleet.num_replicas, per_s=per_s, seconds=seconds,
            **dataclasses.asdict(found), **_loads(before, after), machine_busy=machine_busy,
            faults=sorted({outcome.error for outcome in outcomes if outcome.error})[:3],
            compared="the same arrivals through each fleet", goal="see the last line", met=None,
        )  # fmt: skip
        return found


def _loads(before: Sequence[SlotCounts], after: Sequence[SlotCounts]) -> dict[str, int]:
    """Slots written between two times, by where the adapters were, and adapters that lost one."""

    def total(counts: Sequence[SlotCounts], tier: str) -> int:
        return sum(each.num_loads.get(tier, 0) for each in counts)

    evictions = sum(each.num_evictions for each in after) - sum(each.num_evictions for each in before)
    return {
        "loads_host": total(after, "host") - total(before, "host"),
        "loads_disk": total(after, "disk") - total(before, "disk"),
        "evictions": evictions,
    }


def run_arm(
    arm: str, num_replicas: int, world: "World", options: argparse.Namespace, compared_per_s: float | None
) -> Found:
    """Deploy a fleet, check it, measure it, and take it down."""
    settings = app_settings(world.base, world.adapters, num_replicas, world.host_memory_bytes)
    fleet = Fleet(arm, deploy(arm, settings, num_replicas), num_replicas)

    async def work() -> Found:
        await check(fleet, world.base, world.adapters)
        return await Measurement(fleet, list(world.adapters), options).run(compared_per_s)

    try:
        found = asyncio.run(work())
    finally:
        serve.delete(arm)
    compared, at_limit = found.compared, found.at_limit
    report(
        "affinity_fleet", arm=arm, replicas=num_replicas, slots=NUM_SLOTS, adapters=len(world.adapters),
        model=options.model, answer_tokens=options.answer_tokens, sustained_per_s=found.limit_per_s,
        goodput_per_s=0.0 if at_limit is None else at_limit.goodput_per_s,
        is_most_tried=found.limit_per_s * 1.5 > MOST_PER_S, compared_per_s=found.compared_per_s,
        p50_ms=compared.p50_ms, p99_ms=compared.p99_ms, slot_hits=compared.slot_hits,
        compared="the highest rate each fleet sustains, and each at the one that stock multiplexing does",
        goal="see the last line", met=None,
    )  # fmt: skip
    return found


@dataclasses.dataclass(frozen=True)
class World:
    """What all fleets serve."""

    base: Path
    adapters: dict[str, Path]
    host_memory_bytes: int

    @classmethod
    def make(cls, folder: Path, seed: int) -> "World":
        """A tiny base model, and adapters of several ranks."""
        base = tiny_llama(folder / "base", vocab=VOCAB)
        # By their names hashing puts them elsewhere for each seed.
        ranks = {f"a{seed}-{index:02}": RANKS[index % len(RANKS)] for index in range(NUM_ADAPTERS)}
        adapters = {
            name: write_adapter(base, folder / name, rank, seed=index)
            for index, (name, rank) in enumerate(ranks.items())
        }
        sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in adapters.values()]
        return cls(base, adapters, int(HOST_SHARE * sum(sizes)))


def compare(found: Mapping[tuple[str, int], Found]) -> bool:
    """Print the last line; whether the goals are met."""
    ratios = {}
    for num_replicas in sorted({count for _, count in found}):
        ours, stock = found[OURS, num_replicas], found[MULTIPLEX, num_replicas]
        goodputs = [0.0 if one.at_limit is None else one.at_limit.goodput_per_s for one in (ours, stock)]
        ratios[f"goodput_ratio_{num_replicas}"] = goodputs[0] / max(goodputs[1], 1e-9)
        ratios[f"p99_ratio_{num_replicas}"] = ours.compared.p99_ms / max(stock.compared.p99_ms, 1e-9)
    least_goodput = min(ratio for name, ratio in ratios.items() if name.startswith("goodput"))
    most_p99 = max(ratio for name, ratio in ratios.items() if name.startswith("p99"))
    met = least_goodput >= LEAST_GOODPUT and most_p99 <= MOST_P99
    report(
        "affinity_goals", **ratios, compared="ours with Ray Serve's stock multiplex routing",
        goal=f"goodput_ratio >= {LEAST_GOODPUT} and p99_ratio <= {MOST_P99}", met=met,
    )  # fmt: skip
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=BYTES_PER_RANK, help="whose adapters are stood for")
    parser.add_argument("--answer-tokens", type=int, default=8, help="tokens of an answer, of 30 ms each")
    parser.add_argument("--trial", type=float, default=16.0, help="seconds for which a rate is tried")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds at the rate at which all are compared")
    parser.add_argument("--warm-up", type=float, default=8.0, help="seconds of traffic before anything counts")
    parser.add_argument("--in-time", type=float, default=1.0, help="seconds to the first token that count as in time")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4], choices=[1, 2, 4, 8])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found: dict[tuple[str, int], Found] = {}
    variables = {"PYTHONPATH": str(Path(__file__).parents[2]), MODEL_VARIABLE: options.model}
    with tempfile.TemporaryDirectory() as name, LocalCluster(num_cpus=8) as cluster:
        world = World.make(Path(name), options.seed)
        ray.init(cluster.address, namespace="serve", log_to_driver=False, runtime_env={"env_vars": variables})
        try:
            serve.start(proxy_location="Disabled")
            for num_replicas in options.replicas:
                # Stock multiplexing says at which rate all are compared.
                compared_per_s = None
                for arm in sorted(options.arms, key=lambda arm: arm != MULTIPLEX):
                    found[arm, num_replicas] = one = run_arm(arm, num_replicas, world, options, compared_per_s)
                    if arm == MULTIPLEX:
                        compared_per_s = one.compared_per_s
            serve.shutdown()
        finally:
            ray.shutdown()
    return 0 if not {OURS, MULTIPLEX} <= set(options.arms) or compare(found) else 1


if __name__ == "__main__":
    sys.exit(main())
