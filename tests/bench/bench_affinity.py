"""`make bench-affinity`: what it is worth to send requests to the replicas that hold their adapters.

Real fleets under Ray Serve, of 2 and of 4 replicas with 16 adapter slots together, serve 64 adapters whose popularity
follows Zipf's law with exponent 1.0 (the ten most popular get 62 % of the requests). The base model is tiny; a load
takes as long as that of an adapter of Llama-3-70B of rank 8 to 64 (0.2 to 1.7 GB) at measured rates, and host memory
holds two fifths of them (`tests.bench.affinity_engine`). The same arrivals go through

- `ours`: this project's router, with its copies, warm-ups and protected slots;
- `pow2`: Ray Serve's power of two choices, which knows nothing of adapters;
- `multiplex`: Ray Serve's router for `@serve.multiplexed` models, which load one at a time on a replica;
- `hrw`: rendezvous hashing of the adapter's name alone.

Prints a JSON line for each fleet, and one at the end with the goals. Goodput counts the requests whose first token came
within `--in-time` seconds of when they were due. Before anything is timed, answers are compared with PEFT's.
"""

import argparse
import asyncio
import dataclasses
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from deployments.local_cluster import ENVIRONMENT, LocalCluster

# Ray reads its environment when it is imported.
os.environ.update(ENVIRONMENT)

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.engine_handle import EngineHandle
from deployments.generation import GenerateCall, GenerateChunk, Refusal
from lora_core.workload import SlotCounts
from tests.bench.affinity_fleet import ARMS, MULTIPLEX, OURS, POW2, deploy
from tests.bench.affinity_traffic import Arrival, Ask, Summary, send, summary, zipf_arrivals
from tests.bench.random_adapter import write_adapter
from tests.bench.result import report, require
from tests.factories import reference_tokens, tiny_llama

NUM_ADAPTERS, NUM_SLOTS = 64, 16
RANKS = (8, 16, 32, 64)
EXPONENT = 1.0
VOCAB, PROMPT_TOKENS, ANSWER_TOKENS = 512, 24, 8
HOST_SHARE = 0.4
"""Of all adapters, by size, that a replica's host memory holds."""
PER_S = {2: 24.0, 4: 48.0}
"""Requests a second, by the number of replicas: more loads than stock routing can do, fewer than ours needs."""
LEAST_GOODPUT, MOST_P99 = 1.5, 0.5


def app_settings(base: Path, adapters: Mapping[str, Path], num_replicas: int, host_memory_bytes: int) -> dict[str, Any]:
    """What each replica is started with."""
    return {
        "model": str(base),
        "engine": {"dtype": "float32", "device": "cpu", "num_threads": 1, "kv_cache_tokens": 16_384},
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
    outcomes = await send(fleet.ask, [Arrival(0.0, name, prompt) for name in some], ANSWER_TOKENS)
    for name, outcome in zip(some, outcomes, strict=True):
        expected = reference_tokens(base, adapters[name], list(prompt), ANSWER_TOKENS)
        require(outcome.tokens == expected, f"{fleet.arm}: {name} answers {outcome.tokens} ({outcome.error})")


async def measure(
    fleet: Fleet, arrivals: list[Arrival], *, warm_up_s: float, seconds: float, in_time_s: float
) -> tuple[Summary, list[SlotCounts], list[str]]:
    """Send all; what came of those after the first `warm_up_s`, of the slots in all, and what went wrong."""
    outcomes = await send(fleet.ask, arrivals, ANSWER_TOKENS)
    await asyncio.sleep(1.0)
    counts = await fleet.slot_counts()
    later = [outcome for outcome in outcomes if outcome.arrival.at_s >= warm_up_s]
    faults = sorted({outcome.error for outcome in later if outcome.error})
    return summary(later, seconds=seconds, in_time_s=in_time_s, num_replicas=fleet.num_replicas), counts, faults


def run_arm(arm: str, num_replicas: int, world: "World", options: argparse.Namespace) -> Summary:
    """Deploy a fleet, check it, measure it, and take it down."""
    settings = app_settings(world.base, world.adapters, num_replicas, world.host_memory_bytes)
    fleet = Fleet(arm, deploy(arm, settings, num_replicas), num_replicas)
    arrivals = zipf_arrivals(
        list(world.adapters), exponent=EXPONENT, per_s=options.load * PER_S[num_replicas],
        seconds=options.warm_up + options.seconds, prompt_tokens=PROMPT_TOKENS, vocab=VOCAB, seed=options.seed,
    )  # fmt: skip

    async def work() -> tuple[Summary, list[SlotCounts], list[str]]:
        await check(fleet, world.base, world.adapters)
        return await measure(
            fleet, arrivals, warm_up_s=options.warm_up, seconds=options.seconds, in_time_s=options.in_time
        )

    try:
        found, counts, faults = asyncio.run(work())
    finally:
        serve.delete(arm)
    report(
        "affinity", arm=arm, replicas=num_replicas, slots=NUM_SLOTS, adapters=len(world.adapters),
        per_s=options.load * PER_S[num_replicas], **dataclasses.asdict(found),
        loads_host=sum(each.num_loads.get("host", 0) for each in counts),
        loads_disk=sum(each.num_loads.get("disk", 0) for each in counts),
        evictions=sum(each.num_evictions for each in counts), faults=faults[:3],
        compared="the same arrivals through each fleet", goal="see the last line", met=None,
    )  # fmt: skip
    return found


@dataclasses.dataclass(frozen=True)
class World:
    """What all fleets serve."""

    base: Path
    adapters: dict[str, Path]
    host_memory_bytes: int

    @classmethod
    def make(cls, folder: Path) -> "World":
        """A tiny base model, and adapters of several ranks."""
        base = tiny_llama(folder / "base", vocab=VOCAB)
        ranks = {f"a{index:02}": RANKS[index % len(RANKS)] for index in range(NUM_ADAPTERS)}
        adapters = {
            name: write_adapter(base, folder / name, rank, seed=index)
            for index, (name, rank) in enumerate(ranks.items())
        }
        sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in adapters.values()]
        return cls(base, adapters, int(HOST_SHARE * sum(sizes)))


def compare(found: Mapping[tuple[str, int], Summary]) -> bool:
    """Print the last line; whether the goals are met."""
    ratios = {}
    for num_replicas in sorted({count for _, count in found}):
        ours, stock = found[OURS, num_replicas], found[MULTIPLEX, num_replicas]
        ratios[f"goodput_ratio_{num_replicas}"] = ours.goodput_per_s / max(stock.goodput_per_s, 1e-9)
        ratios[f"p99_ratio_{num_replicas}"] = ours.p99_ms / max(stock.p99_ms, 1e-9)
    goodputs = [ratio for name, ratio in ratios.items() if name.startswith("goodput")]
    p99s = [ratio for name, ratio in ratios.items() if name.startswith("p99")]
    met = min(goodputs) >= LEAST_GOODPUT and max(p99s) <= MOST_P99
    report(
        "affinity_goals", **ratios, compared="ours with Ray Serve's stock multiplex routing",
        goal=f"goodput_ratio >= {LEAST_GOODPUT} and p99_ratio <= {MOST_P99}", met=met,
    )  # fmt: skip
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="measured for each fleet")
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds of the same traffic before that")
    parser.add_argument("--in-time", type=float, default=1.0, help="seconds to the first token that count as in time")
    parser.add_argument("--load", type=float, default=1.0, help="factor on the requests a second")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4], choices=sorted(PER_S))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found: dict[tuple[str, int], Summary] = {}
    with tempfile.TemporaryDirectory() as name, LocalCluster(num_cpus=8) as cluster:
        world = World.make(Path(name))
        root = str(Path(__file__).parents[2])
        ray.init(
            cluster.address, namespace="serve", log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": root}}
        )
        try:
            serve.start(proxy_location="Disabled")
            for num_replicas in options.replicas:
                for arm in options.arms:
                    found[arm, num_replicas] = run_arm(arm, num_replicas, world, options)
            serve.shutdown()
        finally:
            ray.shutdown()
    return 0 if not {OURS, MULTIPLEX} <= set(options.arms) or compare(found) else 1


if __name__ == "__main__":
    sys.exit(main())
