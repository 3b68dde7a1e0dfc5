"""The rules that compiled kernels must keep."""

from dataclasses import dataclass

from tests.kernels.static.configurations import Configuration
from tests.kernels.static.machine_code import MachineCode, read
from tests.kernels.static.targets import Target, compile_for


@dataclass(frozen=True)
class Verdict:
    """What one configuration compiled to for one target, and the rules it breaks there."""

    target: str
    kernel: str
    shape: str
    programs: int
    code: MachineCode
    lacks_matrix: bool
    failures: tuple[str, ...]


def judge(configuration: Configuration, target: Target) -> Verdict:
    """Compile a configuration for a target and hold it against the rules."""
    code = read(compile_for(target, configuration.launch), target)
    return Verdict(
        target=target.name,
        kernel=configuration.kernel,
        shape=configuration.shape,
        programs=configuration.launch.programs,
        code=code,
        lacks_matrix=configuration.has_product and not code.matrix,
        failures=tuple(
            f"{target.name} {configuration.kernel} {configuration.shape} {rule}"
            for rule in broken_rules(configuration, code, target)
        ),
    )


def broken_rules(configuration: Configuration, code: MachineCode, target: Target) -> list[str]:
    """The rules a compiled configuration breaks, each as what it does wrong."""
    rules = {
        f"spills registers ({code.spills} times)": code.spills,
        f"keeps {code.stack_bytes} bytes of a thread in memory": code.stack_bytes,
        f"takes {code.shared_bytes} bytes of shared memory, more than {target.max_shared_bytes}": (
            code.shared_bytes > target.max_shared_bytes
        ),
        "does not fit on a multiprocessor": not code.programs_per_multiprocessor,
        "has no matrix instruction": configuration.has_product and not code.matrix,
        "has no 128-bit load": configuration.has_wide_rows and not code.wide_loads,
        f"accesses 2 bytes at a time ({code.narrow_accesses} times)": code.narrow_accesses,
        "multiplies registers in a pipelined loop, which assemblers before CUDA 13.3 get wrong": (
            code.pipelined_register_products
        ),
    }
    return [rule for rule, broken in rules.items() if broken]
