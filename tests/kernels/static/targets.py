"""GPUs that kernels are compiled for without being there, and what one of their multiprocessors holds."""

from dataclasses import dataclass, replace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.launch import Launch


@dataclass(frozen=True)
class Target:
    """A GPU architecture.

    Attributes:
        name: What the vendor calls it.
        device: A device of that architecture, as the tuning table names it.
        backend: Triton's backend: "cuda" or "hip".
        architecture: What the backend calls it.
        warp_size: Threads of a warp (or wavefront).
        max_shared_bytes: Most shared memory (LDS) one program may have.
        shared_bytes: Shared memory of a multiprocessor (compute unit).
        reserved_bytes: Shared memory the system takes of it for each program.
        registers: 32-bit registers of a multiprocessor.
        register_granule: Registers of a thread come in multiples of this.
        max_warps: Most warps a multiprocessor holds.
        max_programs: Most programs a multiprocessor holds.
        tensor_columns: Columns of tensor memory of a multiprocessor; 0 where there is none.
        can_launch_dependently: Whether a kernel can start before the one it depends on has ended.
    """

    name: str
    device: str
    backend: str
    architecture: int | str
    warp_size: int
    max_shared_bytes: int
    shared_bytes: int
    reserved_bytes: int
    registers: int
    register_granule: int
    max_warps: int
    max_programs: int
    tensor_columns: int = 0
    can_launch_dependently: bool = False

    def programs_per_multiprocessor(self, registers: int, num_warps: int, shared: int, columns: int = 0) -> int:
        """How many programs one multiprocessor holds, each with this many registers a thread and warps."""
        granules = -(-max(registers, 1) // self.register_granule)
        bounds = [
            self.registers // (granules * self.register_granule * self.warp_size * num_warps),
            self.max_warps // num_warps,
            self.max_programs,
        ]
        if shared:
            bounds.append(self.shared_bytes // (shared + self.reserved_bytes))
        if columns:
            bounds.append(self.tensor_columns // columns)
        return min(bounds)


SM_80 = Target("sm_80", "NVIDIA A100-SXM4-80GB", "cuda", 80, 32, 166912, 167936, 1024, 65536, 8, 64, 32)
SM_90 = Target(
    "sm_90", "NVIDIA H200", "cuda", 90, 32, 232448, 233472, 1024, 65536, 8, 64, 32, can_launch_dependently=True
)
SM_100 = Target(
    *("sm_100", "NVIDIA B200", "cuda", 100, 32, 232448, 233472, 1024, 65536, 8, 64, 32),
    tensor_columns=512,
    can_launch_dependently=True,
)
# A compute unit is four units of 512 vector registers of 64 lanes, each with eight wavefronts.
GFX942 = Target("gfx942", "AMD Instinct MI300X", "hip", "gfx942", 64, 65536, 65536, 0, 4 * 512 * 64, 8, 32, 32)

GFX90A = replace(GFX942, name="gfx90a", device="AMD Instinct MI250X", architecture="gfx90a")
GFX950 = replace(
    GFX942,
    name="gfx950",
    device="AMD Instinct MI350X",
    architecture="gfx950",
    max_shared_bytes=163840,
    shared_bytes=163840,
)

TARGETS = (SM_80, SM_90, SM_100, GFX942)
"""Those that are judged unless others are named."""

ALL_TARGETS = (*TARGETS, GFX90A, GFX950)


class StandInDriver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, target: Target) -> None:
        self.target = GPUTarget(target.backend, target.architecture, target.warp_size)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def map_python_to_cpp_type(self, name: str) -> str:
        return "void"


def compile_for(target: Target, launch: Launch) -> Any:
    """Compile a launch with the arguments it would get there: same constants, same specialisation."""
    driver.set_active(StandInDriver(target))
    launch.kernel.device_caches.clear()
    return launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.options)
