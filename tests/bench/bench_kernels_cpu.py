"""`make bench-kernels-cpu`: the CPU's SGMV against its peers, for each LoRA site and whole step of SmolLM2-135M.

One thread, one run; processor time, so that other work on the machine counts little; weights come from memory, as in a
step that reads 30 layers. Prints one JSON line per point: microseconds of each of a layer's four sites and of a step
of 30 layers, for `kernels.sgmv` and each peer in the form that is fastest there:

    loop          mm and addmm_ per group and projection
    gather        each row's weights gathered, padded to the largest rank, then einsum (vLLM's way on the CPU)
    grouped_mm    torch.nn.functional.grouped_mm

Weights are there in the form a method wants, fp32, bf16 or block-diagonal; `kernels.sgmv` has them as slots are, in the
activations' data type.

Every method's result is compared with the reference first; a wrong one is named and not timed. The floor is the live
weights in the activations' data type read once at the machine's rate, or all products at its rate of them, and two
dispatches a site.
`--check` compares a few small points and times nothing.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import reference
from tests.bench.interleaved import Cache, Cost, Task, best_seconds, take_turns
from tests.bench.lora_methods import Method, Ours, Step, peers
from tests.bench.lora_points import DTYPES, Batch, Point, all_points, small_points
from tests.bench.lora_weights import SMOLLM2_LAYERS, SMOLLM2_SITES, Site, Weights, slot_bytes
from tests.bench.result import report

TINY_SITES = (Site("qkv", 32, (32, 16, 16)), Site("down", 64, (32,)))

COLD_BYTES = 160 << 20
"""Weights of the distinct layers, together: several times what caches hold."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Largest error, as a part of the largest result: peers in bf16 round two or three times."""

MANY_ROWS = 512

GOAL = 1.05
SCREENING_S, TIMING_S = 0.4, 1.0


class Machine(NamedTuple):
    """What one thread does at best: bytes read and products in a second, and seconds of a dispatch."""

    stream_rate: float
    product_rate: dict[torch.dtype, float]
    dispatch_s: float

    @classmethod
    def measure(cls, cache: Cache) -> "Machine":
        """Measure this one."""
        left, right = torch.ones(1, 1), torch.ones(1, 1)
        dispatch_s = best_seconds(lambda: [torch.mm(left, right) for _ in range(1000)]) / 1000
        return cls(cache.stream_rate(), {dtype: _product_rate(dtype) for dtype in DTYPES}, dispatch_s)

    def floor_us(self, point: Point, weights: Weights) -> float:
        """Least time of one layer."""
        num_live = weights.num_live(point.slots())
        read_s = num_live * point.dtype.itemsize / self.stream_rate
        multiply_s = num_live / point.adapters * point.rows / max(self.product_rate.values())
        return 1e6 * (max(read_s, multiply_s) + 2 * len(weights.sites) * self.dispatch_s)


def wrong_methods(methods: Iterable[Method], batch: Batch, step: Step, weights: Weights) -> dict[str, float]:
    """Methods whose result differs from the reference's, or that touch a base row, and their largest error."""
    wrong = {}
    for site, (shape, x, y) in enumerate(zip(weights.sites, batch.x, batch.y, strict=True)):
        expected, end = y.to(torch.float32, copy=True), step.routing.end
        a, b = weights.fp32[0][site]
        reference.sgmv(x.float(), a, b, expected, step.routing, shape.slices)
        allowed = TOLERANCE[step.dtype] * float(expected.abs().max())
        for method in methods:
            found = y.clone()
            method.prepare(step)
            method.add(x, found, 0, site)
            error = float((found.float() - expected).abs().max())
            if not error <= allowed or not torch.equal(found[end:], y[end:]):
                wrong[name(method)] = error
    return wrong


def name(method: Method) -> str:
    """A method's family and form."""
    return f"{method.family} ({method.form})"


def run(point: Point, weights: Weights, methods: Sequence[Method], cache: Cache, machine: Machine) -> dict[str, float]:
    """Check and time a point and report it; returns ours over the fastest peer, by site and for the step."""
    step, batch = point.step(), Batch(point, weights.sites)
    if point.rows >= MANY_ROWS:
        # Which of its forms gathers the fewer bytes needs no measurement, and one takes seconds.
        slower = {str(dtype).removeprefix("torch.") for dtype in DTYPES if dtype.itemsize > point.dtype.itemsize}
        methods = [method for method in methods if method.family != "gather" or method.form not in slower]
    wrong = wrong_methods(methods, batch, step, weights)
    right = [method for method in methods if name(method) not in wrong]
    tasks = [_task(method, batch, step, weights) for method in right]
    screened = take_turns(tasks, cache, SCREENING_S, max_turns=4)
    fastest = min(cost.layer_us for cost in screened)
    best: dict[str, int] = {}
    for index, method in enumerate(right):
        if method.family not in best or screened[index].layer_us < screened[best[method.family]].layer_us:
            best[method.family] = index
    # What is far behind needs no second look.
    leaders = {family: index for family, index in best.items() if screened[index].layer_us < 4 * fastest}
    costs = {family: screened[index] for family, index in best.items()}
    again = take_turns([tasks[index] for index in leaders.values()], cache, TIMING_S)
    costs.update(zip(leaders, again, strict=True))
    return _report(point, weights, machine, costs, {family: right[index].form for family, index in best.items()}, wrong)


def _report(
    point: Point,
    weights: Weights,
    machine: Machine,
    costs: dict[str, Cost],
    forms: dict[str, str],
    wrong: dict[str, float],
) -> dict[str, float]:
    floor_us = machine.floor_us(point, weights)
    sites = {
        site.name: {family: round(cost.operations_us[index], 1) for family, cost in costs.items()}
        for index, site in enumerate(weights.sites)
    }
    steps: dict[str, float] = {family: round(cost.step_us(SMOLLM2_LAYERS), 0) for family, cost in costs.items()}
    ratios = {label: _ratio(times) for label, times in (sites | {"step": steps}).items()}
    met = "ours" in costs and all(ratio <= GOAL for ratio in ratios.values())
    report(
        "sgmv_cpu", **point.figures(), distinct_layers=weights.num_layers, floor_layer_us=floor_us,
        ours_over_floor=costs["ours"].layer_us / floor_us if "ours" in costs else None, sites_us=sites, step_us=steps,
        forms=forms, wrong=wrong, ratios=ratios,
        compared="ours over the fastest peer, at each site and for a step of 30 layers", goal=f"ratios <= {GOAL}",
        met=met,
    )  # fmt: skip
    return ratios


def _ratio(times: dict[str, float]) -> float:
    peer = min((value for family, value in times.items() if family != "ours"), default=math.inf)
    return round(times["ours"] / peer, 3) if "ours" in times else math.inf


def _task(method: Method, batch: Batch, step: Step, weights: Weights) -> Task:
    def operation(site: int, x: Tensor, y: Tensor) -> Callable[[int], None]:
        return lambda layer: method.add(x, y, layer, site)

    operations = [operation(site, x, y) for site, (x, y) in enumerate(zip(batch.x, batch.y, strict=True))]
    return Task(lambda: method.prepare(step), operations, weights.num_layers)


def _product_rate(dtype: torch.dtype) -> float:
    left, right = torch.ones(512, 576, dtype=dtype), torch.ones(576, 576, dtype=dtype)
    return left.numel() * right.shape[1] / best_seconds(lambda: torch.mm(left, right))


def bench(points: Iterable[Point]) -> None:
    """Run the points, weights made once for those that share them."""
    began, cache = time.perf_counter(), Cache()
    machine = Machine.measure(cache)
    results = []
    for (rank, slot_ranks), shared in groupby(points, lambda point: (point.rank, point.slot_ranks)):
        size = slot_bytes(SMOLLM2_SITES, rank) * len(slot_ranks)
        weights = Weights(SMOLLM2_SITES, rank, slot_ranks, max(2, min(SMOLLM2_LAYERS, -(-COLD_BYTES // size))))
        for dtype, of_type in groupby(shared, lambda point: point.dtype):
            methods = [Ours(weights), *peers(weights, dtype)]
            results += [run(point, weights, methods, cache, machine) for point in of_type]
    report(
        "sgmv_cpu_summary", points=len(results), points_met=sum(max(ratios.values()) <= GOAL for ratios in results),
        steps_met=sum(ratios["step"] <= GOAL for ratios in results), worst_step=max(r["step"] for r in results),
        sites=sum(len(ratios) - 1 for ratios in results),
        sites_met=sum(ratio <= GOAL for ratios in results for label, ratio in ratios.items() if label != "step"),
        seconds=time.perf_counter() - began,
        stream_gb_s=machine.stream_rate / 1e9, dispatch_us=machine.dispatch_s * 1e6,
        products_per_ns={str(dtype): round(rate / 1e9, 1) for dtype, rate in machine.product_rate.items()},
        compared="ours over the fastest peer, at each site and for a step of 30 layers", goal="every point",
        met=all(ratio <= GOAL for ratios in results for ratio in ratios.values()),
    )  # fmt: skip


def check() -> dict[str, dict[str, float]]:
    """Compare all methods on small points; returns what is wrong, by point."""
    found = {}
    for point in small_points():
        weights = Weights(TINY_SITES, point.rank, point.slot_ranks, 1)
        methods = [Ours(weights), *peers(weights, point.dtype)]
        wrong = wrong_methods(methods, Batch(point, TINY_SITES), point.step(), weights)
        if wrong:
            found[json.dumps(point.figures())] = wrong
    return found


def main() -> int:
    """Run the benchmark, or only its check; the status of the check is 1 if a method is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare all methods on small points, time nothing")
    parser.add_argument("--rows", type=int, nargs="+", help="only points of so many rows with an adapter")
    parser.add_argument("--ranks", type=int, nargs="+", help="only points of these padded ranks")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], help="only these data types")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        if arguments.check:
            wrong = check()
            print(json.dumps({"measure": "sgmv_cpu_check", "wrong": wrong, "met": not wrong}))
            return 1 if wrong else 0
        bench(
            point
            for point in all_points()
            if (not arguments.rows or point.rows in arguments.rows)
            and (not arguments.ranks or point.rank in arguments.ranks)
            and (not arguments.dtypes or str(point.dtype).removeprefix("torch.") in arguments.dtypes)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
