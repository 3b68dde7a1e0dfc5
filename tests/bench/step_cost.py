"""What steps cost and wait for while an adapter loads beside them, told apart from what else the machine does."""

import gc
import resource
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lora_core.messages import GenerateRequest, SamplingParams
from tests.bench.load_rates import PROMPT, Rig
from tests.bench.random_adapter import weight_bytes
from tests.bench.result import report, require

QUIET_STEPS = 6
GOAL = 1.25
"""Two threads share the memory's rate, so that a step that reads 1.3 GB takes longer beside any other."""


class Step(NamedTuple):
    """One step of the thread that computes tokens.

    Attributes:
        wall_ms: From its begin to its end, the time other processes had the processor included.
        cpu_ms: Time it had the processor.
        waits: How often it gave the processor up by itself: for the interpreter's lock, or one of the system's.
        preempted: How often the system took the processor away.
    """

    wall_ms: float
    cpu_ms: float
    waits: int
    preempted: int


class Stepper:
    """A rig that computes one endless base-model stream."""

    def __init__(self, rig: Rig, max_tokens: int) -> None:
        """Begin the stream."""
        self._engine = rig.engine
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self._engine.add_request(GenerateRequest("stream", PROMPT, sampling))
        for _ in range(4):
            self.step()

    def step(self) -> Step:
        """The next token."""
        before, wall, cpu = resource.getrusage(resource.RUSAGE_THREAD), time.perf_counter(), time.thread_time()
        deltas = self._engine.step()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        after = resource.getrusage(resource.RUSAGE_THREAD)
        require([len(delta.token_ids) for delta in deltas] == [1], "a step without the stream's token")
        waits, preempted = after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw
        return Step(wall * 1e3, cpu * 1e3, waits, preempted)

    def close(self) -> None:
        """End the stream."""
        self._engine.abort("stream")


def step_cost(rig: Rig, folder: Path, rank: int, repeats: int) -> None:
    """Load an adapter on another thread, as often as asked, and report the steps with and without it."""
    rig.load("warm", folder)
    rig.manager.unload_adapter("warm")
    # As the engine's process does it before it serves.
    gc.collect()
    gc.freeze()
    stepper = Stepper(rig, 240)
    usual: list[Step] = []
    loading: list[Step] = []
    try:
        with ThreadPoolExecutor(1) as loader:
            for index in range(repeats):
                usual += [stepper.step() for _ in range(QUIET_STEPS)]
                load = loader.submit(rig.load, f"beside{index}", folder)
                while not load.done():
                    loading.append(stepper.step())
                load.result()
                rig.manager.unload_adapter(f"beside{index}")
                stepper.step()
    finally:
        stepper.close()
        gc.unfreeze()
    median = statistics.median(step.cpu_ms for step in usual)
    ratio = statistics.median(step.cpu_ms for step in loading) / median
    report(
        "step_cost", base=rig.label, rank=rank, file_mb=weight_bytes(folder) / 1e6, repeats=repeats,
        usual=_summary(usual), loading=_summary(loading), ratio=ratio,
        max_ratio=max(step.cpu_ms for step in loading) / median,
        compared="processor time of a stream's median step while the adapter loads with that of one without it",
        goal=f"ratio < {GOAL}", met=ratio < GOAL,
    )  # fmt: skip


def _summary(steps: list[Step]) -> dict[str, object]:
    columns = zip(Step._fields, zip(*steps, strict=True), strict=True)
    return {"count": len(steps)} | {
        name: {"median": round(statistics.median(column), 1), "max": round(max(column), 1)} for name, column in columns
    }
