"""compute-sanitizer over every operation at small shapes: where it is, what it runs, and what its report says."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

TOOLS = ("memcheck", "racecheck")

_SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}


@dataclass(frozen=True)
class Verdict:
    """What a tool found: `faults` is None where it did not get to a finding, and `lines` then say why."""

    tool: str
    faults: int | None
    lines: tuple[str, ...]


def find() -> str | None:
    """Path of compute-sanitizer: on PATH, in a CUDA toolkit, or in a package beside torch; None if it is nowhere."""
    if found := shutil.which("compute-sanitizer"):
        return found
    for path in _candidates():
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return None


def _candidates() -> Iterator[Path]:
    toolkits = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    toolkits += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    for toolkit in toolkits:
        yield toolkit / "bin" / "compute-sanitizer"
        yield toolkit / "compute-sanitizer" / "compute-sanitizer"
    for folder in map(Path, sys.path):
        yield from folder.glob("nvidia/*/bin/compute-sanitizer")
        yield from folder.glob("nvidia/*/compute-sanitizer/compute-sanitizer")
        yield from folder.glob("nvidia/*/compute-sanitizer")


def command(sanitizer: str, tool: str, program: list[str]) -> list[str]:
    """The command line that runs a program under a tool."""
    return [sanitizer, "--tool", tool, "--target-processes", "application-only", "--print-limit", "20", *program]


ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Every tensor is then an allocation of its own, and an access past its end is seen."""


def verdict(tool: str, output: str, is_finished: bool) -> Verdict:
    """Read a tool's report. Without its summary nothing was found out, whatever the status of the program was."""
    marked = tuple(line for line in output.splitlines() if line.startswith("========="))
    summary = _SUMMARY[tool].search(output)
    if not is_finished or summary is None:
        last = tuple(output.strip().splitlines()[-5:])
        reason = "no summary" if is_finished else "not finished in its time"
        return Verdict(tool, None, (reason, *marked[:5], *last))
    return Verdict(tool, int(summary[1]), marked[:40])


def run_launches() -> int:
    """What is run under a tool: each operation once a dtype and row tile. Results are compared elsewhere."""
    import torch

    from kernels import sgmv
    from tests.gpu import operations
    from tests.kernels.paged_cases import make_paged_case
    from tests.kernels.test_embedding import embed_case
    from tests.kernels.test_gain import gain_case

    runs: list[Callable[[], object]] = []
    for dtype in (torch.bfloat16, torch.float32):
        for block_m in (8, 64):
            case = operations.small_case(dtype, block_m, "zipf:1.5")
            counted = operations.with_counters(case)
            runs.append(case.result)
            runs.append(partial(sgmv, case.x, case.a_stack, case.b_stack, case.y.clone(), counted, case.slices))
            runs.append(partial(operations.gate_of, dtype, block_m, False))
            runs.append(partial(operations.gate_of, dtype, block_m, True))
        runs.append(embed_case([(2, 3), (0, 9)], ranks=[12, 0, 5], dtype=dtype, block_m=8).result)
        runs.append(gain_case([(2, 3), (0, 9)], ranks=[3, 1, 2], dtype=dtype, block_m=8).result)
        sequences = [(700, 1), (0, 20), (40, 3)]
        runs.append(make_paged_case(sequences, group=4, dtype=dtype, window=400, softcap=20.0).result)
        runs.append(make_paged_case(sequences, group=4, dtype=dtype).result)
    for run in runs:
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return len(runs)
