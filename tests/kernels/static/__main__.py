"""Compile the shipped kernels for GPUs that are not here, and judge what the assemblers made of them.

Run as `python -m tests.kernels.static [--all] [target ...]`. It prints a row for each kernel and target, what LoRA adds
to a layer, and last one JSON line; it exits with 1 where a kernel breaks a rule. Peers' kernels are compiled too where
they are found (see `tests.kernels.peers`), and not judged. `--all` compiles every configuration, which takes long.
"""

import os
import sys
import tempfile


def main(arguments: list[str]) -> int:
    """Compile, print and judge, with a compiler cache of its own."""
    # Before Triton is imported, which then decides for good whether kernels are compiled or interpreted.
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory(prefix="triton-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        from tests.kernels.static.program import run

        return run([name for name in arguments if name != "--all"], everything="--all" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
