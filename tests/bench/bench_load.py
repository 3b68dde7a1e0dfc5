"""`make bench-load`: what it costs to load an adapter and to give it a slot, everything in one run of a few minutes.

Prints one JSON line per point, each with what was compared, its goal and whether it was met. Answers are checked before
and after each timing: a point whose answers are wrong is reported and not timed. Adapters change all linear layers and
are fp32, as is the base; two bases are used: SmolLM2-135M (30 layers, hidden 576), and a random Llama whose adapter of
rank 256 has 496 MB (22 layers, hidden 1024, 1.3 GB).

    host_to_slot   The adapter's bytes per second into a slot, over the rate of copying 256 MiB within memory. Floor:
                   each byte is read once and written once, in strips of `rank` numbers for B where the slot is wider:
                   `strips_ratio` is that of bare copies of those shapes, the most that the layout allows.
    disk_to_slot   The file's bytes per second from the system's cache into a slot, over the rate at which one thread
                   reads that file into memory new to the process, in pages as large as an adapter's (`reread_ratio`:
                   into memory that it has). Floor: the file is read to where it stays, hashed, looked at for NaN, and
                   copied to the slot. Hashing takes as long as reading, so that one thread comes to a ratio of 0.35;
                   `threads` side by side load in less, and the slot is written by one.
    per_adapter    Both together for everyday ranks, over reading the file and copying it once.
    stream_gap     A base-model stream of an engine process, read through its client; meanwhile the adapter is loaded
                   on the loader's thread and used by a request. Floor of the step that uses it: the base's 1.3 GB and
                   the adapter's 0.5 GB are read, 1.37 times the usual gap; with a prompt of 8 tokens it computes 1.9
                   times as long. `rival_ratio` is that of the stream beside a process that only copies memory: what
                   sharing the machine with any busy thread costs.
    step_cost      Processor time of the steps of a base-model stream while the adapter loads beside them, which other
                   processes do not change, and how often a step had to wait for a lock.
    load_cycles    Resident memory over load, answer, unload; after a warm-up it should stay as it is.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from cluster.demo.base_model import prepare
from tests.bench.load_cycles import load_cycles
from tests.bench.load_rates import Machine, Rig, disk_to_slot, host_to_slot
from tests.bench.random_adapter import write_adapter
from tests.bench.result import CheckFailed, report
from tests.bench.step_cost import step_cost
from tests.bench.stream_gap import stream_gap
from tests.factories import tiny_llama

SMALL, SMALL_RANKS = "smollm2-135m", (8, 16, 64)
WIDE, WIDE_RANK = "random-334m", 256
MEASURES = ("host_to_slot", "disk_to_slot", "per_adapter", "stream_gap", "step_cost", "load_cycles")


def wide_base(folder: Path) -> Path:
    """A base whose adapters of rank 256 have 496 MB in fp32."""
    return tiny_llama(
        folder, layers=22, hidden=1024, heads=16, kv_heads=4, intermediate=4096, vocab=512,
        max_position_embeddings=4096, initializer_range=0.03,
    )  # fmt: skip


class Bench:
    """The points that were asked for, and how many of them were wrong."""

    def __init__(self, only: list[str], repeats: int, cycles: int, folder: Path) -> None:
        self._only, self._repeats, self._cycles, self._folder = only, repeats, cycles, folder
        self.num_wrong = 0

    def run(self) -> None:
        """Measure all points."""
        self._small(prepare(report=lambda line: print(line, file=sys.stderr)))
        if {"host_to_slot", "disk_to_slot", "stream_gap", "step_cost"} & set(self._only):
            self._wide(wide_base(self._folder / "wide"))

    def _small(self, base: Path) -> None:
        folders = {
            (rank, seed): write_adapter(base, self._folder / f"r{rank}-{seed}", rank, seed=seed)
            for rank in SMALL_RANKS
            for seed in (0, 1)
        }
        # First, while this process has started no threads and the machine has memory to spare.
        ends = (SMALL_RANKS[0], SMALL_RANKS[-1])
        self._point("load_cycles", load_cycles, base, SMALL, [folders[rank, 0] for rank in ends], ends, self._cycles)
        if not {"host_to_slot", "per_adapter"} & set(self._only):
            return
        rig, machine = Rig(base, SMALL, max(SMALL_RANKS)), Machine()
        for rank in SMALL_RANKS:
            self._point("host_to_slot", host_to_slot, rig, machine, [folders[rank, 0], folders[rank, 1]], rank)
        for rank in SMALL_RANKS:
            self._point("per_adapter", disk_to_slot, rig, machine, folders[rank, 0], rank, measure="per_adapter")

    def _wide(self, base: Path) -> None:
        folders = [write_adapter(base, self._folder / f"wide-{seed}", WIDE_RANK, seed=seed) for seed in (0, 1)]
        if {"host_to_slot", "disk_to_slot", "step_cost"} & set(self._only):
            rig, machine = Rig(base, WIDE, WIDE_RANK), Machine()
            self._point("host_to_slot", host_to_slot, rig, machine, folders, WIDE_RANK)
            self._point("disk_to_slot", disk_to_slot, rig, machine, folders[0], WIDE_RANK, measure="disk_to_slot")
            self._point("step_cost", step_cost, rig, folders[0], WIDE_RANK, self._repeats)
            del rig, machine
        self._point("stream_gap", stream_gap, base, WIDE, folders[0], WIDE_RANK, self._repeats)

    def _point(self, point: str, run: Callable[..., None], *args: object, **options: object) -> None:
        if point not in self._only:
            return
        try:
            run(*args, **options)
        except CheckFailed as error:
            self.num_wrong += 1
            report(point, compared="answers", goal="right answers", met=False, error=str(error))


def main() -> int:
    """Run the benchmark; the status is 1 if a point's answers were wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--repeats", type=int, default=5, help="loads beside the running stream")
    parser.add_argument("--cycles", type=int, default=500, help="load/unload cycles after the warm-up")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # By default the signal would leave the temporary folder, of some gigabytes, and the processes behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.only, arguments.repeats, arguments.cycles, Path(folder))
        bench.run()
    return 1 if bench.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
