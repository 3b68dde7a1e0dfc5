"""Compile the shipped kernels for GPUs that are not here, and judge what the assemblers made of them.

`python -m tests.kernels.static [--all] [target ...]` prints a row for each kernel and target, what LoRA adds
to a layer, and last one JSON line; it exits with 1 where a kernel breaks a rule. Peers' kernels are compiled too where
they are found (see `tests.kernels.peers`), and not judged.
"""

import argparse
import os
import sys
import tempfile


def main() -> int:
    """Compile, print and judge, with a compiler cache of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="compile every configuration, which takes long")
    parser.add_argument(
        "targets", nargs="*", metavar="target", help="such as gfx950; unless named, sm_80, sm_90, sm_100 and gfx942"
    )
    arguments = parser.parse_args()
    # Before Triton is imported, which then decides for good whether kernels are compiled or interpreted.
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory(prefix="triton-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        from tests.kernels.static.program import run
        from tests.kernels.static.targets import ALL_TARGETS

        known = [target.name for target in ALL_TARGETS]
        if unknown := set(arguments.targets).difference(known):
            parser.error(f"there is no target {', '.join(sorted(unknown))}; known are {', '.join(known)}")
        return run(arguments.targets, everything=arguments.all)


if __name__ == "__main__":
    sys.exit(main())
