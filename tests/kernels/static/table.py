"""Verdicts and costs as tables to read."""

from collections.abc import Iterable, Iterator

from tests.kernels.static.judge import Verdict
from tests.kernels.static.layer import LayerCost

LEGEND = """\
CTAs: programs of the launch. regs: registers of a thread. spill: instructions that save or reload registers, and bytes
of stack. shared: bytes of shared memory of a program. CTA/SM: programs that a multiprocessor holds. matrix: matrix
instructions. 128-bit: loads and stores of 16 bytes. 2-byte: loads and stores of 2. instr: all instructions. bar:
barriers."""

_HEAD = (
    f"{'kernel':41s} {'where and at what shapes':46s} {'CTAs':>6s} {'regs':>4s} {'spill':>7s} {'shared':>6s} "
    f"{'CTA/SM':>6s} {'matrix':>6s} {'128-bit':>8s} {'2-byte':>6s} {'instr':>6s} {'bar':>3s}"
)


def kernel_table(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """A line for each verdict, under a head for each target."""
    target = ""
    for verdict in verdicts:
        if verdict.target != target:
            target = verdict.target
            yield f"\n{target}\n{_HEAD}"
        code = verdict.code
        yield (
            f"{verdict.kernel:41s} {verdict.shape:46s} {verdict.programs:6d} {code.registers:4d} "
            f"{f'{code.spills}/{code.stack_bytes}':>7s} {code.shared_bytes:6d} {code.programs_per_multiprocessor:6d} "
            f"{code.matrix:6d} {f'{code.wide_loads}/{code.wide_stores}':>8s} {code.narrow_accesses:6d} "
            f"{code.instructions:6d} {code.barriers:3d}"
        )


def cost_table(costs: Iterable[LayerCost]) -> Iterator[str]:
    """A line for what each way to run a layer's LoRA takes."""
    for cost in costs:
        yield f"  {cost.name:42s} {cost.launches:3d} launches {cost.programs:8,d} CTAs"
