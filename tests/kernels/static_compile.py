"""Compile the Triton kernels for a GPU that is not here, and judge what the assembler made of them.

Run as `python -m tests.kernels.static_compile`, in a process of its own without TRITON_INTERPRET. It prints a row for
each kernel and, last, one JSON line `{"kernels": [...], "failures": [...]}`; it exits with 1 if there are failures.

A stand-in driver names the target, and each kernel is warmed up with the arguments its launch would get, so that the
code judged is the code that runs: same tiles, same specialisation. The wheel's own assembler and disassembler are used.
"""

import collections
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.launch import Launch
from kernels.sgmv_launch import expand_launch, gather_launch, scale_launch, shrink_launch
from kernels.tuning import num_tiles, row_tile

ARCHITECTURE = 90
MAX_SHARED_BYTES = 232448
SHARED_BYTES_PER_SM = 233472
REGISTERS_PER_SM = 65536

_BINARIES = Path(nvidia.__file__).parent / "bin"
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+(?:\.\w+)*)", re.MULTILINE)

# A warpgroup product whose left side, after the accumulators, is a list of registers and not a descriptor.
_REGISTER_PRODUCT = re.compile(r"wgmma\.mma_async[^{]*\{[^}]*\},\s*\{")


@dataclass(frozen=True)
class Site:
    """A fused projection of a model: its input width and the widths of its outputs."""

    model: str
    name: str
    in_features: int
    slices: tuple[int, ...]


LLAMA_3_8B = (
    Site("llama-3-8b", "qkv", 4096, (4096, 1024, 1024)),
    Site("llama-3-8b", "o", 4096, (4096,)),
    Site("llama-3-8b", "gate_up", 4096, (14336, 14336)),
    Site("llama-3-8b", "down", 14336, (4096,)),
)
SMOLLM2 = (
    Site("smollm2-135m", "qkv", 576, (576, 192, 192)),
    Site("smollm2-135m", "gate_up", 576, (1536, 1536)),
)


@dataclass(frozen=True)
class Report:
    """What one kernel compiled to."""

    kernel: str
    programs: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    programs_per_sm: int
    instructions: int
    matrix: int
    wide_loads: int
    narrow_accesses: int
    spills: int
    barriers: int
    register_products: int

    def failures(self) -> list[str]:
        """The rules this kernel breaks."""
        rules = {
            "spills registers": self.spills or self.stack_bytes,
            f"uses more than {MAX_SHARED_BYTES} bytes of shared memory": self.shared_bytes > MAX_SHARED_BYTES,
            # Exact fp32 products have no matrix instruction, and these kernels have no product.
            "has no matrix instruction": not (
                self.matrix or " fp32 " in self.kernel or self.kernel.startswith(("gather", "scale"))
            ),
            # A tile's rows of A are as short as its rank.
            "has no 128-bit load": not self.wide_loads and not self.kernel.startswith("gather"),
            "loads or stores 2 bytes at a time": self.narrow_accesses,
            # Assemblers before CUDA 13.3 get that wrong where it is pipelined, as the shrink's loop is.
            "multiplies registers inside a loop": self.kernel.startswith("shrink") and self.register_products,
        }
        return [f"{self.kernel} {rule}" for rule, broken in rules.items() if broken]


class StandInDriver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

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


def launches(site: Site, num_rows: int, num_slots: int, rank: int, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """The two launches of a site at a step's shapes, with tensors that have no memory."""
    block_m = row_tile(num_rows, num_slots)

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    out = sum(site.slices)
    tiles = meta(num_tiles(num_rows, num_slots, block_m), 4, dtype=torch.int32)
    a_stack = meta(num_slots, len(site.slices) * rank, site.in_features)
    planes, shrink = shrink_launch(
        meta(num_rows, site.in_features), a_stack, tiles, block_m, num_slots, len(site.slices)
    )
    expand = expand_launch(
        planes, meta(num_slots, out, rank), meta(num_rows, out), tiles, block_m, num_slots, list(site.slices)
    )
    name = "fp32" if dtype == torch.float32 else "bf16"
    shape = f"{site.model} {site.name} {name} r={rank} T={num_rows} slots={num_slots}"
    yield f"shrink {shape}", shrink
    yield f"expand {shape}", expand


def embedding_launches(
    hidden: int, vocabulary: int, num_rows: int, num_slots: int, rank: int
) -> Iterator[tuple[str, Launch]]:
    """The launches of an embedding, and those of a gain on its output, at a step's shapes in bf16."""
    block_m = row_tile(num_rows, num_slots)
    shape = f"embedding {vocabulary} bf16 r={rank} T={num_rows} slots={num_slots}"
    with torch.device("meta"):
        tiles = torch.empty(num_tiles(num_rows, num_slots, block_m), 4, dtype=torch.int32)
        ids = torch.empty(num_rows, dtype=torch.int64)
        a_stack = torch.empty(num_slots, vocabulary, rank, dtype=torch.bfloat16)
        b_stack = torch.empty(num_slots, hidden, rank, dtype=torch.bfloat16)
        y = torch.empty(num_rows, hidden, dtype=torch.bfloat16)
        bias, gain_stack = torch.empty(hidden, dtype=torch.bfloat16), torch.empty(num_slots, hidden)
    planes, gather = gather_launch(ids, a_stack, tiles, block_m)
    yield f"gather {shape}", gather
    yield f"expand {shape}", expand_launch(planes, b_stack, y, tiles, block_m, num_slots, [hidden])
    yield f"scale {shape} bias", scale_launch(y, gain_stack, bias, tiles, block_m)
    yield f"scale {shape}", scale_launch(y, gain_stack, None, tiles, block_m)


def compile_launch(name: str, launch: Launch) -> Report:
    """Compile one launch for the stand-in driver's target and read its machine code."""
    compiled = launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _disassemble("-res-usage", file.name)
        code = _disassemble("-sass", file.name)
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert resources, f"cuobjdump does not report registers: {usage!r}"
    registers, stack = int(resources[1]), int(resources[2])
    operations = collections.Counter(_INSTRUCTION.findall(code))

    def count(pattern: str) -> int:
        return sum(number for operation, number in operations.items() if re.match(pattern, operation))

    num_warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    registers_per_program = -(-registers // 8) * 8 * 32 * num_warps
    return Report(
        kernel=name,
        programs=launch.programs,
        registers=registers,
        stack_bytes=stack,
        shared_bytes=shared,
        programs_per_sm=min(REGISTERS_PER_SM // registers_per_program, SHARED_BYTES_PER_SM // (shared + 1024)),
        instructions=sum(operations.values()),
        matrix=count(r"H?GMMA|HMMA"),
        wide_loads=count(r"LDG\..*\.128|LDGSTS.*\.128"),
        narrow_accesses=count(r"(LDG|STG).*\.[US]16"),
        spills=count("LDL|STL"),
        barriers=count("BAR"),
        register_products=len(_REGISTER_PRODUCT.findall(compiled.asm["ptx"])),
    )


def reports() -> Iterator[Report]:
    """Every configuration that is judged: decode, mixed and prefill steps, small and large ranks."""
    qkv, output, gate_up, down = LLAMA_3_8B
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = [
        *((site, 8, 8, 16, bf16) for site in (qkv, down)),
        *((site, 64, 64, 16, bf16) for site in (output, gate_up)),
        (qkv, 2048, 8, 16, bf16),
        (qkv, 64, 8, 64, bf16),
        (gate_up, 2048, 8, 64, bf16),
        (qkv, 2048, 8, 256, bf16),
        *((site, 8, 8, 8, bf16) for site in SMOLLM2),
        (SMOLLM2[0], 512, 8, 8, fp32),
    ]
    embedding_cases = [(4096, 128256, 8, 8, 16), (4096, 128256, 2048, 8, 64), (576, 49152, 64, 64, 8)]
    for name, launch in itertools.chain(
        *(launches(*case) for case in cases), *(embedding_launches(*case) for case in embedding_cases)
    ):
        yield compile_launch(name, launch)


def row(report: Report) -> str:
    """A report as a line of a table."""
    return (
        f"{report.kernel:56s} grid {report.programs:6d}  regs {report.registers:3d}  shared {report.shared_bytes:6d}  "
        f"per SM {report.programs_per_sm:2d}  instr {report.instructions:5d}  mma {report.matrix:3d}  "
        f"128-bit {report.wide_loads:3d}  16-bit {report.narrow_accesses}  spills {report.spills}  "
        f"barriers {report.barriers}"
    )


def main() -> int:
    """Compile, print and judge every configuration."""
    driver.set_active(StandInDriver(ARCHITECTURE))
    all_reports, failures = [], []
    for report in reports():
        all_reports.append(asdict(report))
        failures.extend(report.failures())
        print(row(report), flush=True)
    summary = {"triton": triton.__version__, "architecture": ARCHITECTURE}
    print(json.dumps({**summary, "kernels": all_reports, "failures": failures}))
    return 1 if failures else 0


def _disassemble(option: str, path: str) -> str:
    command = [str(_BINARIES / "cuobjdump"), option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("TRITON_INTERPRET is set: unset it, the interpreter compiles nothing")
    sys.exit(main())
