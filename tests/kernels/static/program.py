"""The static judge: compiles in processes of its own, prints tables, and sums up."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any, NamedTuple

import triton

from tests.kernels.peers import load_peers
from tests.kernels.sites import DECODE_FEW, DECODE_MANY, LLAMA_3_8B, PREFILL, Step
from tests.kernels.static.configurations import Configuration
from tests.kernels.static.judge import Verdict, judge
from tests.kernels.static.layer import LayerCost, layer_costs
from tests.kernels.static.peer_rows import peer_layer
from tests.kernels.static.shipped import shipped
from tests.kernels.static.table import LEGEND, cost_table, kernel_table
from tests.kernels.static.targets import ALL_TARGETS, SM_90, TARGETS, Target

NUM_PROCESSES = 2

RANK = 16
"""The rank at which layers are compared, for a Llama-3-8B."""

MOST_LAUNCHES = {"two": 7, "one": 4, "all": 4}
MOST_PROGRAMS = 15_000
"""What our LoRA may add to a layer, at `DECODE_MANY`."""


class Job(NamedTuple):
    """One configuration to compile: for which target, and the how-manieth of which list."""

    target: str
    source: str
    position: int


def run(names: Sequence[str], *, everything: bool) -> int:
    """Judge the named targets, or those of `TARGETS`; 1 where a rule is broken."""
    targets = [_target(name) for name in names] or list(TARGETS)
    source = "everything" if everything else "shipped"
    jobs = [Job(target.name, source, place) for target in targets for place in range(len(_listed(target.name, source)))]
    peers, absent = load_peers()
    peer_jobs = [Job(SM_90.name, "peers", place) for place in range(len(_listed(SM_90.name, "peers")) if peers else 0)]
    print(f"triton {triton.__version__}\n{LEGEND}")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        results = pool.map(_judged, [*jobs, *peer_jobs])
        verdicts = list(_printed(results, len(jobs)))
        if peer_jobs:
            print("\nOther projects' kernels, as their own launch functions run them:", end="")
            list(_printed(results, len(peer_jobs)))
    for line in absent:
        print(f"\nno rows of {line}")
    failures = [failure for verdict in verdicts for failure in verdict.failures]
    costs = {target.name: layer_costs(LLAMA_3_8B, DECODE_MANY, RANK, target) for target in targets}
    failures += [fault for name, ways in costs.items() for fault in _excesses(name, ways)]
    _print_costs(targets)
    for failure in failures:
        print(f"FAILED {failure}")
    print(json.dumps(_summary(verdicts, costs, failures)))
    return 1 if failures else 0


@cache
def _listed(target_name: str, source: str) -> list[Configuration]:
    """A list of configurations, the same in every process."""
    target = _target(target_name)
    if source == "peers":
        return [
            configuration
            for step in (DECODE_MANY, PREFILL)
            for peer in load_peers()[0]
            for configuration in peer_layer(peer, LLAMA_3_8B, step, RANK)[1]
        ]
    return shipped(target, everything=source == "everything")


def _judged(job: Job) -> Verdict:
    return judge(_listed(job.target, job.source)[job.position], _target(job.target))


def _target(name: str) -> Target:
    return next(target for target in ALL_TARGETS if target.name == name)


def _printed(results: Iterator[Verdict], number: int) -> Iterator[Verdict]:
    """The next verdicts, each printed as soon as it is there."""
    taken = []

    def take() -> Iterator[Verdict]:
        for _ in range(number):
            taken.append(next(results))
            yield taken[-1]

    for line in kernel_table(take()):
        print(line, flush=True)
    return iter(taken)


def _excesses(target: str, ways: dict[str, LayerCost]) -> Iterator[str]:
    for name, cost in ways.items():
        if cost.launches > MOST_LAUNCHES[name]:
            yield f"{target} {cost.name}: {cost.launches} launches a layer, more than {MOST_LAUNCHES[name]}"
        if cost.programs > MOST_PROGRAMS:
            yield f"{target} {cost.name}: {cost.programs} programs a layer, more than {MOST_PROGRAMS}"


def _print_costs(targets: Sequence[Target]) -> None:
    def of_peers(step: Step) -> list[LayerCost]:
        return [peer_layer(peer, LLAMA_3_8B, step, RANK)[0] for peer in load_peers()[0]]

    for step in (DECODE_FEW, DECODE_MANY, PREFILL):
        for target in targets:
            print(f"\nWhat LoRA adds to a layer of {LLAMA_3_8B.name}, r={RANK} {step}, {target.name}:")
            costs = [*layer_costs(LLAMA_3_8B, step, RANK, target).values()]
            for line in cost_table([*costs, *(of_peers(step) if target is SM_90 else [])]):
                print(line)


def _summary(
    verdicts: Sequence[Verdict], costs: dict[str, dict[str, LayerCost]], failures: Sequence[str]
) -> dict[str, Any]:
    return {
        "configs": len(verdicts),
        "spills": sum(bool(verdict.code.spills or verdict.code.stack_bytes) for verdict in verdicts),
        "without_tensor_core": sum(verdict.lacks_matrix for verdict in verdicts),
        "launches_per_layer": max(ways["two"].launches for ways in costs.values()),
        "ctas_per_layer": max(ways["two"].programs for ways in costs.values()),
        "launches_per_layer_fused": max(ways["one"].launches for ways in costs.values()),
        "ctas_per_layer_fused": max(ways["one"].programs for ways in costs.values()),
        "launches_per_layer_all_fused": max(ways["all"].launches for ways in costs.values()),
        "register_products": sum(verdict.code.register_products for verdict in verdicts),
        "targets": {name: sum(verdict.target == name for verdict in verdicts) for name in costs},
        "triton": triton.__version__,
        "failures": list(failures),
    }
