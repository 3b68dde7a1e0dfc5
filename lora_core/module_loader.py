"""An adapter's modules, read and converted by a few threads that leave the step loop its time."""

import os
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch

from lora_core.adapter_layout import ModulePlan
from lora_core.adapter_tensors import TensorLoader
from lora_core.adapter_weights import AdapterWeights
from lora_core.canary import is_noop
from lora_core.module_weights import BaseModules, ModuleWeights
from lora_core.single_thread import single_threaded

_MAX_THREADS = 4
_BYTES_PER_THREAD = 2**24
_NICENESS = 5


class LoadedModules(NamedTuple):
    """What filling modules took and showed.

    Attributes:
        noop_modules: Modules whose output is the base's, in the order of their plans.
        phases_s: Seconds of work on "read", "check", "convert" and "canary", added up over the threads.
    """

    noop_modules: tuple[str, ...]
    phases_s: Mapping[str, float]


def load_modules(
    weights: AdapterWeights, plans: Sequence[ModulePlan], modules: Mapping[str, ModuleWeights], base: BaseModules | None
) -> LoadedModules:
    """Fill each module with its tensors, and try it on the base's canary.

    Args:
        weights: The adapter's open files.
        plans: What the modules are made of.
        modules: The tensors to fill, by module.
        base: The base model, for DoRA and the canary.

    Raises:
        InvalidAdapter: as `TensorLoader.fill`, for the first module in the plans' order that cannot be loaded.
    """
    work = _Work(weights, plans, modules, base)
    num_threads = thread_count(sum(plan.rank * sum(plan.shape) for plan in plans))
    with ThreadPoolExecutor(num_threads, "load-adapter", _yield_to_the_step_loop) as pool:
        clocks = [worker.result() for worker in [pool.submit(work.run) for _ in range(num_threads)]]
    if work.errors:
        raise work.errors[min(work.errors)]
    phases_s = {phase: sum(clock[phase] for clock in clocks) for phase in clocks[0]}
    return LoadedModules(tuple(plan.module for plan in plans if plan.module in work.noops), phases_s)


class _Work:
    """Modules still to be filled, which threads take one by one."""

    def __init__(
        self,
        weights: AdapterWeights,
        plans: Sequence[ModulePlan],
        modules: Mapping[str, ModuleWeights],
        base: BaseModules | None,
    ) -> None:
        self.noops: set[str] = set()
        self.errors: dict[int, Exception] = {}
        self._weights = weights
        self._modules = modules
        self._base = base
        self._left = deque(enumerate(plans))

    def run(self) -> Mapping[str, float]:
        """Fill modules until none is left; seconds by phase."""
        loader = TensorLoader(self._weights, self._base)
        with single_threaded(), torch.no_grad():
            while True:
                try:
                    index, plan = self._left.popleft()
                except IndexError:
                    return loader.clock.phases_s
                try:
                    self._fill(loader, plan)
                except Exception as error:
                    # All modules before this one are in work: the first in order that fails is always the same one.
                    self.errors[index] = error
                    self._left.clear()

    def _fill(self, loader: TensorLoader, plan: ModulePlan) -> None:
        module = self._modules[plan.module]
        loader.fill(plan, module)
        loader.clock.lap("check")
        # Now, while the tensors are in the processor's cache.
        if is_noop(plan.module, module, self._base, is_embedding=plan.is_embedding):
            self.noops.add(plan.module)
        loader.clock.lap("canary")


def thread_count(num_elements: int) -> int:
    """How many threads an adapter of so many values is worth: one for a small one, a few where there are cores.

    A core is left to the step loop: on two cores a second thread here doubled a stream's usual gap (`bench_load`).
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MAX_THREADS, affinity - 1, 2 * num_elements // _BYTES_PER_THREAD))


def _yield_to_the_step_loop() -> None:
    """Let threads that compute tokens go first where there are too few cores for all."""
    # Only on Linux does each thread have a priority of its own.
    if sys.platform == "linux":
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
