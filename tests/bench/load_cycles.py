"""Resident memory of a process that loads, uses and unloads adapters over and over."""

import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from lora_core.types import LoRAStatus
from tests.bench.load_rates import Rig
from tests.bench.result import report, require

WARM_UP_CYCLES = 50
WINDOW = 25
GOAL_PERCENT = 1.0


def resident_bytes() -> int:
    """This process's resident memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cycle(base: Path, folders: Sequence[Path], max_lora_rank: int, cycles: int) -> list[int]:
    """Resident bytes after each of `WARM_UP_CYCLES + cycles` rounds of load, an answer, unload."""
    torch.set_num_threads(1)
    rig = Rig(base, "", max_lora_rank)
    answers: dict[Path, list[int]] = {}
    resident = []
    # Loads come from a thread of their own, as the loader's do.
    with ThreadPoolExecutor(1) as loader:
        for index in range(WARM_UP_CYCLES + cycles):
            name, folder = f"a{index}", folders[index % len(folders)]
            loader.submit(rig.load, name, folder).result()
            tokens = rig.answer(name)
            require(answers.setdefault(folder, tokens) == tokens, f"another answer in cycle {index}")
            response = rig.manager.unload_adapter(name)
            require(response.status is LoRAStatus.SUCCESS, str(response.message))
            require(not rig.manager.is_lora(name), "an unloaded adapter is still there")
            resident.append(resident_bytes())
    return resident


def load_cycles(base: Path, label: str, folders: Sequence[Path], ranks: Sequence[int], cycles: int) -> None:
    """Measure in a process of its own, and report how much its memory grew after the warm-up."""
    with get_context("spawn").Pool(1) as pool:
        resident = pool.apply(cycle, (base, folders, max(ranks), cycles))
    measured = resident[WARM_UP_CYCLES:]
    first, last = statistics.median(measured[:WINDOW]), statistics.median(measured[-WINDOW:])
    growth = 100 * (last / first - 1)
    report(
        "load_cycles", base=label, ranks=list(ranks), cycles=cycles, first_mb=first / 1e6, last_mb=last / 1e6,
        max_mb=max(measured) / 1e6, growth_percent=growth,
        compared=f"median resident memory of the last {WINDOW} cycles with that of the first {WINDOW} after warming up",
        goal=f"growth_percent <= {GOAL_PERCENT}", met=growth <= GOAL_PERCENT,
    )  # fmt: skip
