"""`make tune`: measure the kernels' tile sizes on this machine's GPU and keep the better ones in `kernels/tuned`.

For each step it first chooses the rows of a tile, over a whole layer, and whether launches overlap; then, site by site
and rank by rank, the tiles of the shrink and of what follows it. Candidates differ from the default in one part each;
the best of each part together are the last candidate. A candidate is compared with the reference before it is timed, in
a graph of launches on weights that no cache holds. Only what is faster than the default by 3 % is kept. The file is
written after every layer, so that what is done when the time is up stays; a later run begins with what is missing.

`--check` runs all of it but the compiling, under Triton's interpreter, with tiny shapes and a stand-in for time.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernels import reference
from kernels.support import can_launch_dependently
from kernels.tuning import device_name, row_tile
from kernels.tuning_table import FOLDER, Entry, Point, path_of, power_of_two, read, step_point, trial, versions, write
from tests.gpu.clock import Clock
from tests.gpu.operations import require_close
from tests.gpu.parts import TINY
from tests.gpu.places import (
    Entries,
    Place,
    Tile,
    Weights,
    candidates,
    combined,
    compile_place,
    launch_sizes,
    launches,
    places,
)
from tests.gpu.stage import CudaStage, InterpretedStage, Stage
from tests.kernels import interpreter
from tests.kernels.sites import LLAMA_3_8B, Site, Step

STEPS = tuple(Step(*step) for step in ((8, 8), (64, 64), (64, 8), (1, 1), (2048, 8), (256, 64), (16, 16), (512, 8)))
RANKS = (16, 64, 8, 32, 128)

MIN_GAIN = 0.03
COLD_BYTES = 256 << 20
ROW_TILES = (8, 16, 32, 64)


class Bench:
    """Measures places under entries of a table.

    Attributes:
        wrong: Candidates whose results were wrong, which no choice of tile may make them.
    """

    def __init__(self, stage: Stage, cold_bytes: int = COLD_BYTES, repeats: int = 7) -> None:
        self.stage = stage
        self.device = device_name(stage.device)
        self.wrong: list[str] = []
        self._cold_bytes, self._repeats = cold_bytes, repeats

    def weights(self, place: Place, block_m: int) -> Weights:
        """What the place is measured on."""
        return Weights.make(self.stage, place, block_m, self._cold_bytes)

    def us(self, place: Place, weights: Weights, entries: Entries) -> float | None:
        """Microseconds of both launches together, or None where they do not run, or not right."""
        block_m, tiles = weights.routing.block_m, weights.routing.tiles
        assert tiles is not None
        with trial(self.device, entries):
            if not self._is_right(place, weights):
                return None
            pairs = [
                launches(place, weights.x, a_stack, b_stack, weights.y, tiles, block_m)
                for a_stack, b_stack in weights.stacks
            ]

        def run() -> None:
            for shrink, second, _ in pairs:
                shrink.run()
                second.run()

        (us,) = self.stage.times_us([self.stage.record(run)], self._repeats)
        return us / len(pairs)

    def _is_right(self, place: Place, weights: Weights) -> bool:
        (a_stack, b_stack), y, routing = weights.stacks[0], weights.y, weights.routing
        assert routing.tiles is not None
        before = y.clone()
        if place.is_gated:
            expected = reference.sgmv_swiglu(weights.x, a_stack, b_stack, y, routing, "silu")
        else:
            expected = before.clone()
            reference.sgmv(weights.x, a_stack, b_stack, expected, routing, place.site.slices)
        shrink, second, result = launches(place, weights.x, a_stack, b_stack, y, routing.tiles, routing.block_m)
        try:
            shrink.run()
            second.run()
        except Exception as error:
            # More shared memory or registers than the device has: no choice for this place.
            print(json.dumps({"skipped": str(place), "error": f"{type(error).__name__}: {error}"[:200]}), flush=True)
            return False
        try:
            require_close(result, expected, roundings=4)
        except AssertionError as error:
            self.wrong.append(f"{place} {launch_sizes(shrink)} {launch_sizes(second)}: {error}")
            print(json.dumps({"wrong": self.wrong[-1]}), flush=True)
            return False
        finally:
            y.copy_(before)
        return True


@dataclass
class Tuner:
    """Fills a table.

    Attributes:
        bench: What measures.
        clock: When to stop.
        entries: The table so far.
        compiler: Processes that compile ahead; None under the interpreter.
        measured: Points of this run, those for which the default is best included.
    """

    bench: Bench
    clock: Clock
    entries: Entries
    compiler: Executor | None
    measured: set[Point] = field(default_factory=set)
    _compiled: dict[str, Future[None]] = field(default_factory=dict)

    def rows(self, sites: Sequence[Site], step: Step, rank: int, row_tiles: Sequence[int] = ROW_TILES) -> None:
        """Choose the rows of a tile for a step: the fastest layer."""
        layer = places(sites, step, rank)
        slots = layer[0].timed.num_slots
        point = step_point("rows", step.num_rows, slots)
        if self._is_done(point) or not self.clock.has(2, f"rows {step}"):
            return
        default = row_tile(step.num_rows, slots)
        sizes = [default, *(size for size in row_tiles if size != default and size <= 2 * power_of_two(step.num_rows))]
        self._compile([(place, size, self.entries) for size in sizes for place in layer])
        times: list[tuple[Tile, float]] = []
        for size in sizes:
            parts = [self.bench.us(place, self.bench.weights(place, size), self.entries) for place in layer]
            if None not in parts:
                times.append(({"block_m": size}, sum(filter(None, parts))))
        self._keep(point, times)

    def launch(self, sites: Sequence[Site], step: Step, rank: int) -> None:
        """Choose whether launches overlap in a step: the faster layer."""
        layer = places(sites, step, rank)
        point, block_m = layer[0].launch_point, self._block_m(layer[0])
        if self._is_done(point) or not self.clock.has(2, f"launch {step}"):
            return
        tiles: list[Tile] = [{"dependent": 0}, {"dependent": 1}]
        self._compile([(place, block_m, self._with(point, tile)) for tile in tiles for place in layer])
        times: list[tuple[Tile, float]] = []
        for tile in tiles:
            entries = self._with(point, tile)
            parts = [self.bench.us(place, self.bench.weights(place, block_m), entries) for place in layer]
            if None not in parts:
                times.append((tile, sum(filter(None, parts))))
        self._keep(point, times)

    def place(self, place: Place) -> None:
        """Choose the tiles of both halves of a place."""
        block_m = self._block_m(place)
        if all(map(self._is_done, place.points(block_m))):
            return
        name = f"{place.site.name} {place.timed.name}"
        if not self.clock.has(1, name):
            return
        weights = self.bench.weights(place, block_m)
        for half, point in enumerate(place.points(block_m)):
            if self._is_done(point) or not self.clock.has(1, f"{point.kernel} {name}"):
                continue
            with trial(self.bench.device, self.entries):
                default = place.tiles(self.bench.device, block_m)[half]
            times: list[tuple[Tile, float]] = []
            tiles = candidates(point, default, place.site.in_features)
            self._compile([(place, block_m, self._with(point, tile)) for tile in tiles])
            for tile in tiles:
                if self.clock.left_s < 0:
                    break
                us = self.bench.us(place, weights, self._with(point, tile))
                if us is not None:
                    times.append((tile, us))
                elif tile is default:
                    break
            if times and (last := combined(times)) not in [tile for tile, _ in times]:
                us = self.bench.us(place, weights, self._with(point, last))
                times += [(last, us)] if us is not None else []
            self._keep(point, times)

    def ahead(self, place: Place) -> None:
        """Begin to compile what a place will need, as far as that is known."""
        block_m = self._block_m(place)
        with trial(self.bench.device, self.entries):
            defaults = place.tiles(self.bench.device, block_m)
        for point, default in zip(place.points(block_m), defaults, strict=True):
            for tile in candidates(point, default, place.site.in_features):
                self._submit(place, block_m, self._with(point, tile))

    def _block_m(self, place: Place) -> int:
        with trial(self.bench.device, self.entries):
            return row_tile(place.step.num_rows, place.timed.num_slots, self.bench.device)

    def _is_done(self, point: Point) -> bool:
        return point in self.entries or point in self.measured

    def _with(self, point: Point, tile: Tile) -> Entries:
        return {**self.entries, point: Entry(tile, 0.0, 0.0)}

    def _compile(self, jobs: Sequence[tuple[Place, int, Entries]]) -> None:
        for future in [self._submit(*job) for job in jobs]:
            if future is not None:
                future.exception()

    def _submit(self, place: Place, block_m: int, entries: Entries) -> "Future[None] | None":
        if self.compiler is None:
            return None
        points = (*place.points(block_m), place.launch_point)
        key = f"{place} {block_m} {[entries[point].tile for point in points if point in entries]}"
        if key not in self._compiled:
            try:
                self._compiled[key] = self.compiler.submit(compile_place, self.bench.device, place, block_m, entries)
            except BrokenExecutor:
                # They were ended from outside: then each launch is compiled when it is first run.
                self.compiler = None
                return None
        return self._compiled[key]

    def _keep(self, point: Point, times: Sequence[tuple[Tile, float]]) -> None:
        """Keep the fastest if it beats the default, which is the first, by enough."""
        if not times:
            return
        self.measured.add(point)
        (_, default_us), (tile, us) = times[0], min(times, key=lambda pair: pair[1])
        is_kept = us < (1 - MIN_GAIN) * default_us
        if is_kept:
            self.entries[point] = Entry(tile, us, default_us)
        line = {"point": point._asdict(), "tile": tile, "us": round(us, 2), "default_us": round(default_us, 2)}
        print(json.dumps({**line, "of": len(times), "kept": is_kept}), flush=True)


def tune(
    tuner: Tuner, sites: Sequence[Site], steps: Sequence[Step], ranks: Sequence[int], path: Path, *, is_dependable: bool
) -> None:
    """Fill the table of the tuner's device, layer by layer, and write it after each.

    `is_dependable`: whether the device's launches can overlap.
    """
    for step in steps:
        tuner.rows(sites, step, ranks[0])
        if is_dependable:
            tuner.launch(sites, step, ranks[0])
    layers = [places(sites, step, rank) for rank, step in itertools.product(ranks, steps)]
    for layer, following in zip(layers, [*layers[1:], []], strict=True):
        if not tuner.clock.has(1, layer[0].timed.name):
            continue
        for place in (*layer, *following):
            tuner.ahead(place)
        for place in layer:
            tuner.place(place)
        write(path, tuner.bench.device, tuner.entries, versions())
    write(path, tuner.bench.device, tuner.entries, versions())


@contextmanager
def compiling(workers: int) -> Iterator[Executor]:
    """Processes that compile; what they have not begun when it ends they never begin."""
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def main(arguments: Sequence[str]) -> int:
    """Tune, or rehearse it; the status is 1 where a candidate was wrong, 2 where it cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="when to stop (default: 8)")
    parser.add_argument("--fresh", action="store_true", help="measure again what the file has")
    parser.add_argument("--check", action="store_true", help="under Triton's interpreter, on the CPU, without times")
    options = parser.parse_args(arguments)
    if options.check != interpreter.is_active():
        fault = "--check needs TRITON_INTERPRET=1" if options.check else "TRITON_INTERPRET is set: unset it"
        print(f"tune: {fault}", file=sys.stderr)
        return 2
    if options.check:
        return rehearse()
    if not torch.cuda.is_available():
        print(
            "tune: torch finds no CUDA device, and only a GPU's own times are of use; --check runs without one",
            file=sys.stderr,
        )
        return 2
    bench = Bench(CudaStage())
    path = path_of(bench.device, FOLDER)
    entries = {} if options.fresh else dict(read(path, bench.device).entries)
    with compiling(max(1, (os.cpu_count() or 2) - 1)) as compiler:
        tuner = Tuner(bench, Clock(60 * options.minutes), entries, compiler)
        tune(tuner, LLAMA_3_8B.layer, STEPS, RANKS, path, is_dependable=can_launch_dependently(bench.stage.device))
    summary = {"file": str(path), "entries": len(tuner.entries), "measured": len(tuner.measured)}
    print(json.dumps({**summary, "dropped": len(tuner.clock.dropped), "wrong": len(bench.wrong)}), flush=True)
    return 1 if bench.wrong else 0


def rehearse() -> int:
    """All of it at tiny shapes; the programs of a launch stand in for its time, and the file goes to its own folder."""
    interpreter.install()
    bench = Bench(InterpretedStage(), cold_bytes=1, repeats=1)
    step, rank = Step(2, 2), 8
    with tempfile.TemporaryDirectory() as folder:
        path = path_of(bench.device, Path(folder))
        tuner = Tuner(bench, Clock(600), {}, None)
        tune(tuner, (TINY.qkv, TINY.gate_up), [step], [rank], path, is_dependable=True)
        kept = read(path, bench.device).entries
    if kept != tuner.entries or not kept:
        print(f"tune: wrote {len(tuner.entries)} entries and read {len(kept)} others", file=sys.stderr)
        return 1
    print(json.dumps({"entries": len(kept), "measured": len(tuner.measured), "wrong": len(bench.wrong)}), flush=True)
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
