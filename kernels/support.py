"""Which devices the Triton kernels run on, and why others do without; and which data types a CPU multiplies."""

import importlib.util
import logging
from functools import cache

import torch

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = (8, 0)
"""Ampere: the first with bf16 matrix instructions and asynchronous copies."""

_DEPENDENT_CAPABILITY = (9, 0)

_HIP_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
"""CDNA 2 to 4: each is a target of the static judge. Attention spills on RDNA (gfx11, gfx12)."""


@cache
def triton_fault(device: torch.device) -> str | None:
    """Why the Triton kernels do not run on a device that is not the CPU; None where they do."""
    if device.type != "cuda":
        return f"there are no kernels for devices of type {device.type!r}, only for cuda (NVIDIA and AMD)"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install the one that this version of torch names"
    if torch.version.hip:
        return hip_fault(torch.cuda.get_device_properties(device).gcnArchName)
    return cuda_fault(torch.cuda.get_device_capability(device))


def cuda_fault(capability: tuple[int, int]) -> str | None:
    """Why the kernels do not run on NVIDIA GPUs of a compute capability; None where they do."""
    if capability >= _MIN_CAPABILITY:
        return None
    found, expected = (".".join(map(str, version)) for version in (capability, _MIN_CAPABILITY))
    return f"its compute capability is {found}, the kernels need {expected} or later"


def hip_fault(architecture: str) -> str | None:
    """Why the kernels do not run on AMD GPUs of an architecture such as `gfx942:sramecc+`; None where they do."""
    if architecture.startswith(_HIP_ARCHITECTURES):
        return None
    return f"its architecture is {architecture.partition(':')[0]}, the kernels need {', '.join(_HIP_ARCHITECTURES)}"


@cache
def can_launch_dependently(device: torch.device) -> bool:
    """Whether a kernel on the device can start before the one it depends on has ended."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= _DEPENDENT_CAPABILITY


@cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of a data type at the CPU's rate, and not value by value.

    The latter it does with bf16 on x86 without AVX-512, and with fp16 on most; many rows take seven times as long as
    in fp32 there.
    """
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype not in checks:
        return True
    try:
        # Private to torch.
        return bool(getattr(torch.ops.mkldnn, checks[dtype])())
    except (AttributeError, RuntimeError):
        return False


@cache
def warn_of_fallback(device: torch.device, fault: str) -> None:
    """Say, once in the life of the process, that a device goes without Triton kernels."""
    logger.warning("adapters and attention on %s run in plain torch, which is slow: %s", device, fault)
