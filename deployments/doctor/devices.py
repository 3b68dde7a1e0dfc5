"""The processors an engine may run on, and the compilers that make kernels for them."""

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from deployments.doctor.finding import Finding, fault, ok, warning
from kernels.native import COMPILERS
from kernels.sgmv_native import sgmv_function
from kernels.support import triton_fault
from lora_core.engine.memory_sizes import free_bytes
from lora_core.memory_plan import gib


def device_findings() -> Iterator[Finding]:
    """The CPU, each GPU, Triton, and the C compiler."""
    yield _cpu()
    gpus = list(_gpus())
    yield from gpus or [ok("gpu", "none that torch sees; engines run on the CPU")]
    yield _triton(bool(gpus))
    yield _compiler(bool(gpus))


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    text = f"{_processor()}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}"
    text += f", {gib(free_bytes(torch.device('cpu')))} of memory free"
    if quota is not None and quota < cores:
        return warning(
            "cpu",
            f"{text}; its control group allows {quota:g} of the cores",
            f"set engine.num_threads to {max(1, int(quota))} at most",
        )
    return ok("cpu", text)


def _gpus() -> Iterator[Finding]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        free, total = torch.cuda.mem_get_info(device)
        text = f"{torch.cuda.get_device_name(device)}, {gib(free)} of {gib(total)} free"
        reason = triton_fault(device)
        if reason is None:
            yield ok(f"gpu {index}", text)
        else:
            yield warning(f"gpu {index}", f"{text}; it runs plain torch, slowly: {reason}", "use a GPU of a later kind")


def _triton(is_needed: bool) -> Finding:
    if importlib.util.find_spec("triton") is None:
        if is_needed:
            return warning("triton", "not installed", "install the version of it that this torch names")
        return ok("triton", "not installed, and not needed without a GPU")
    return ok("triton", metadata.version("triton"))


def _compiler(has_gpu: bool) -> Finding:
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        remedy = "install gcc or clang"
        text = f"none (looked for {', '.join(COMPILERS)})"
        if has_gpu:
            return fault("C compiler", f"{text}; Triton needs one", remedy)
        return warning("C compiler", f"{text}; adapters run in plain torch on the CPU, more slowly", remedy)
    if sgmv_function() is None:
        return warning(
            "C compiler",
            f"{found}, and the kernels it makes are not used (the log says why)",
            "install the C library's headers, or another compiler",
        )
    return ok("C compiler", f"{found}; kernels for this CPU are compiled and right")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _cpu_quota() -> float | None:
    """Cores' worth of time that the control group of this process may take; None: no limit, or none that is known."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
