"""How fast adapters get from disk to host memory and from there to a slot, against this machine's own rates."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.messages import GenerateRequest, SamplingParams
from lora_core.module_loader import thread_count
from lora_core.types import LoRAStatus
from lora_core.weight_files import WEIGHTS_FILE
from tests.bench.random_adapter import linear_shapes, weight_bytes
from tests.bench.result import report, require

COPY_BYTES = 256 * 2**20
REPEATS = 5
GOAL = 0.7
PROMPT = [5, 17, 101, 23, 77, 64, 8, 99]


def best_s(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Shortest of several runs, in seconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


class Machine:
    """This machine's own rates, in bytes per second, measured again for each point."""

    def __init__(self) -> None:
        self._source = torch.ones(COPY_BYTES, dtype=torch.uint8)
        self._target = torch.zeros(COPY_BYTES, dtype=torch.uint8)

    def memcpy(self) -> float:
        """Copying within memory, larger than any cache."""
        return COPY_BYTES / best_s(lambda: self._target.copy_(self._source))

    def strips(self, base: Path, rank: int, max_rank: int) -> float:
        """Seconds that bare copies of an adapter of `base` take into tensors shaped as slots are: what is possible."""
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(AutoConfig.from_pretrained(base).num_hidden_layers):
            for out_features, in_features in linear_shapes(base).values():
                moves.append((torch.zeros(max_rank, in_features)[:rank], torch.ones(rank, in_features)))
                moves.append((torch.zeros(out_features, max_rank)[:, :rank], torch.ones(out_features, rank)))
        targets, sources = (list(tensors) for tensors in zip(*moves, strict=True))
        return best_s(lambda: torch._foreach_copy_(targets, sources), 2 * REPEATS)

    def cached_read(self, path: Path) -> tuple[float, float]:
        """Reading a file that the system has in memory: into memory that is kept, and over and over the same."""
        size = path.stat().st_size
        kept: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

        def read(buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
            with path.open("rb", buffering=0) as file:
                view, done = buffer.data, 0
                while done < size:
                    done += file.readinto(view[done:])

        def read_anew() -> None:
            kept[:] = [np.empty(size, dtype=np.uint8)]
            read(kept[0])

        read_anew()
        return size / best_s(read_anew), size / best_s(lambda: read(kept[0]))


class Rig:
    """An engine with one slot, and adapters that are read, loaded and used by name."""

    def __init__(self, base: Path, label: str, max_lora_rank: int) -> None:
        self.base, self.label, self.max_lora_rank = base, label, max_lora_rank
        lora = LoRAConfig(enable_lora=True, max_lora_rank=max_lora_rank, max_num_loras=1)
        engine = EngineConfig(
            model=base, dtype="float32", device="cpu", num_threads=1, max_model_len=256, kv_cache_tokens=512
        )
        self.engine = LLMEngine(engine, lora)
        self.manager = self.engine.manager

    def load(self, name: str, folder: Path) -> dict[str, float]:
        """Load an adapter; returns the seconds each phase took, as far as the load tells."""
        response = self.manager.load_adapter(f"{name}={folder}")
        require(response.status is LoRAStatus.SUCCESS, f"{folder} was not loaded: {response.message}")
        return {} if response.report is None else response.report.phases_s

    def answer(self, name: str | None) -> list[int]:
        """A greedy answer through an adapter, or the base model's."""
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        self.engine.add_request(GenerateRequest("answer", PROMPT, sampling, name))
        tokens: list[int] = []
        while self.engine.has_work():
            for delta in self.engine.step():
                require(delta.error is None, str(delta.error))
                tokens += delta.token_ids
        return tokens


def host_to_slot(rig: Rig, machine: Machine, folders: Sequence[Path], rank: int) -> None:
    """Time writing adapters of one rank into the slot, each in place of the other."""
    names = [f"swap{index}" for index in range(len(folders))]
    for name, folder in zip(names, folders, strict=True):
        rig.load(name, folder)
    answers = [rig.answer(name) for name in names]
    require(rig.answer(None) not in answers and answers[0] != answers[1], "the adapters change nothing")
    require([rig.answer(name) for name in names] == answers, "an adapter's answer changed after a swap")
    before = machine.memcpy()
    seconds = best_s(lambda: [rig.manager.activate_adapter(name) for name in names], 2 * REPEATS) / len(names)
    require([rig.answer(name) for name in names] == answers, "an adapter's answer changed after swaps")
    num_bytes = rig.manager.loras[names[0]].num_bytes
    memcpy = max(before, machine.memcpy())
    for name in names:
        rig.manager.unload_adapter(name)
    strips_s = machine.strips(rig.base, rank, rig.max_lora_rank)
    ratio = num_bytes / seconds / memcpy
    report(
        "host_to_slot", base=rig.label, rank=rank, max_lora_rank=rig.max_lora_rank, adapter_mb=num_bytes / 1e6,
        ms=seconds * 1e3, gb_s=num_bytes / seconds / 1e9, memcpy_gb_s=memcpy / 1e9, ratio=ratio,
        strips_ms=strips_s * 1e3, strips_ratio=num_bytes / strips_s / memcpy,
        compared=f"bytes per second into the slot, two adapters in turn, with copying {COPY_BYTES >> 20} MiB in memory",
        goal=f"ratio >= {GOAL}", met=ratio >= GOAL,
    )  # fmt: skip


def disk_to_slot(rig: Rig, machine: Machine, folder: Path, rank: int, *, measure: str) -> None:
    """Time loading an adapter and writing it into the slot, its file in the system's cache."""
    rig.load("first", folder)
    expected = rig.answer("first")
    require(expected != rig.answer(None), "the adapter changes nothing")
    rig.manager.unload_adapter("first")
    path, num_bytes = folder / WEIGHTS_FILE, weight_bytes(folder)
    reads = machine.cached_read(path)
    memcpy = machine.memcpy()
    runs = []
    for index in range(REPEATS):
        name = f"load{index}"
        began, cpu = time.perf_counter(), time.process_time()
        phases = rig.load(name, folder)
        loaded = time.perf_counter()
        rig.manager.activate_adapter(name)
        ended, cpu_s = time.perf_counter(), time.process_time() - cpu
        runs.append((ended - began, loaded - began, ended - loaded, cpu_s, phases))
        require(rig.answer(name) == expected, "an adapter's answer depends on when it was loaded")
        rig.manager.unload_adapter(name)
    kept, again = (max(pair) for pair in zip(reads, machine.cached_read(path), strict=True))
    memcpy = max(memcpy, machine.memcpy())
    total_s, load_s, slot_s, _, phases = min(runs, key=lambda run: run[0])
    cpu_s = min(run[3] for run in runs)
    phases_ms = {name: round(1e3 * spent, 2) for name, spent in phases.items()}
    figures = {
        "base": rig.label, "rank": rank, "file_mb": num_bytes / 1e6, "ms": total_s * 1e3, "load_ms": load_s * 1e3,
        "slot_ms": slot_s * 1e3, "cpu_ms": cpu_s * 1e3, "phases_ms": phases_ms,
        "read_ms": num_bytes / kept * 1e3, "copy_ms": num_bytes / memcpy * 1e3,
    }  # fmt: skip
    if measure == "per_adapter":
        floor_s = num_bytes / kept + num_bytes / memcpy
        report(
            measure, **figures, ratio=floor_s / total_s,
            compared="load and slot with reading the file into new memory and copying it once, on one thread",
            goal=f"(read_ms + copy_ms) / ms >= {GOAL}", met=floor_s / total_s >= GOAL,
        )  # fmt: skip
        return
    ratio = num_bytes / total_s / kept
    report(
        measure, **figures, gb_s=num_bytes / total_s / 1e9, read_gb_s=kept / 1e9, reread_gb_s=again / 1e9,
        ratio=ratio, reread_ratio=num_bytes / total_s / again, threads=thread_count(num_bytes // 4),
        compared="the file's bytes per second into the slot with reading it into new memory, on one thread",
        goal=f"ratio >= {GOAL}", met=ratio >= GOAL,
    )  # fmt: skip
