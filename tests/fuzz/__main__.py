"""`make fuzz STEPS=...`: random operations and mixed batches on one engine, every token compared with a quiet run.

Ends with one JSON line: what was done, and `differences`, which must be 0.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

import transformers

from tests.fuzz.drive import Difference, Fuzz
from tests.fuzz.world import QuietRuns, World

STEPS_A_RUN = 20_000
"""A new engine, with another seed, after so many steps."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS_A_RUN)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes that share the model, see docs/tensor_parallel.md"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # PEFT's advice on tied heads, transformers' on its own attributes
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.disable(logging.WARNING)  # of adapters whose files are gone, as is meant
    started = time.monotonic()
    totals: dict[str, int] = {}
    differences = 0
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        quiet = QuietRuns(world)
        for run, done in enumerate(range(0, arguments.steps, STEPS_A_RUN)):
            fuzz = Fuzz(world, quiet, seed=arguments.seed + run, num_ranks=arguments.ranks)
            try:
                fuzz.run(min(STEPS_A_RUN, arguments.steps - done))
            except Difference as difference:
                print(difference, file=sys.stderr)
                differences += 1
            for what, count in fuzz.counts.items():
                totals[what] = totals.get(what, 0) + count
            print(f"{totals['steps']} steps, {totals['tokens']} tokens, {differences} differences", file=sys.stderr)
    print(json.dumps({**totals, "differences": differences, "seconds": round(time.monotonic() - started, 1)}))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
