"""Reads what a kernel compiled to: registers, spills, shared memory, and instructions by kind."""

import collections
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton.backends import nvidia

from tests.kernels.static.loops import count_pipelined_register_products, count_register_products
from tests.kernels.static.targets import Target

# The wheel's own disassembler knows what the wheel's own assembler writes.
_CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"

_CUDA_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+(?:\.\w+)*)", re.MULTILINE)
_HIP_INSTRUCTION = re.compile(r"^\t((?:s|v|ds|global|buffer|flat|scratch)_\w+)", re.MULTILINE)


@dataclass(frozen=True)
class MachineCode:
    """What one kernel compiled to.

    Attributes:
        registers: 32-bit registers of a thread (vector registers on AMD).
        spills: Instructions that save or restore a register in memory, and on AMD registers so saved.
        stack_bytes: Memory of a thread beside its registers.
        shared_bytes: Shared memory (LDS) of a program.
        programs_per_multiprocessor: Programs that one multiprocessor (compute unit) holds at once.
        matrix: Matrix instructions.
        wide_loads: 128-bit loads from device memory, tensor copies included.
        wide_stores: 128-bit stores to device memory.
        narrow_accesses: 2-byte loads and stores of device memory.
        instructions: All instructions.
        barriers: Barriers of a whole program.
        register_products: Warpgroup products whose left side is in registers.
        pipelined_register_products: Those that may run on in a later iteration of a loop.
    """

    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    programs_per_multiprocessor: int
    matrix: int
    wide_loads: int
    wide_stores: int
    narrow_accesses: int
    instructions: int
    barriers: int
    register_products: int
    pipelined_register_products: int


def read(compiled: Any, target: Target) -> MachineCode:
    """Read the compiled kernel that Triton's `warmup` returned for a target."""
    return _read_hip(compiled, target) if target.backend == "hip" else _read_cuda(compiled, target)


def _read_cuda(compiled: Any, target: Target) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if not usage:
        raise RuntimeError(f"{_CUOBJDUMP.name} reports no registers: {text[:200]!r}")
    registers, shared, ptx = int(usage[1]), compiled.metadata.shared, compiled.asm["ptx"]
    operations = collections.Counter(_CUDA_INSTRUCTION.findall(text))
    return MachineCode(
        registers=registers,
        spills=_count(operations, r"LDL|STL"),
        stack_bytes=int(usage[2]),
        shared_bytes=shared,
        programs_per_multiprocessor=target.programs_per_multiprocessor(
            registers, compiled.metadata.num_warps, shared, getattr(compiled.metadata, "tmem_size", 0) or 0
        ),
        matrix=_count(operations, r"HMMA|HGMMA|UTC\w*MMA"),
        wide_loads=_count(operations, r"LDG\..*128|LDGSTS.*\.128|UTMALDG"),
        wide_stores=_count(operations, r"STG\..*128|UTMASTG"),
        narrow_accesses=_count(operations, r"(LDG|STG).*\.[US]16"),
        instructions=sum(operations.values()),
        barriers=_count(operations, r"BAR\b"),
        register_products=count_register_products(ptx),
        pipelined_register_products=count_pipelined_register_products(ptx),
    )


def _read_hip(compiled: Any, target: Target) -> MachineCode:
    text = compiled.asm["amdgcn"]
    operations = collections.Counter(_HIP_INSTRUCTION.findall(text))

    def noted(key: str) -> int:
        found = re.search(rf"^\s*-?\s*\.{key}:\s+(\d+)", text, re.MULTILINE)
        if not found:
            raise RuntimeError(f"the assembly's metadata has no {key}")
        return int(found[1])

    registers = noted("vgpr_count")
    shared = max(noted("group_segment_fixed_size"), compiled.metadata.shared)
    return MachineCode(
        registers=registers,
        # Scalar registers are saved in lanes of a vector register, not in memory.
        spills=noted("vgpr_spill_count") + _count(operations, r"scratch_"),
        stack_bytes=noted("private_segment_fixed_size"),
        shared_bytes=shared,
        programs_per_multiprocessor=target.programs_per_multiprocessor(registers, compiled.metadata.num_warps, shared),
        matrix=_count(operations, r"v_mfma|v_smfma|v_wmma"),
        wide_loads=_count(operations, r"(global|buffer|flat)_load_dwordx4"),
        wide_stores=_count(operations, r"(global|buffer|flat)_store_dwordx4"),
        narrow_accesses=_count(operations, r"(global|buffer|flat)_(load|store)_\w*short"),
        instructions=sum(operations.values()),
        barriers=_count(operations, r"s_barrier"),
        register_products=0,
        pipelined_register_products=0,
    )


def _count(operations: Mapping[str, int], pattern: str) -> int:
    return sum(number for operation, number in operations.items() if re.match(pattern, operation))
