"""What the Triton kernels compile to for GPUs that are not here; needs Triton's compiler and no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.static.loops import count_pipelined_register_products, count_register_products

LEADING_KEYS = ["configs", "spills", "without_tensor_core", "launches_per_layer", "ctas_per_layer"]


def run_compiler(module: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a module in a process where Triton compiles, with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", module],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_shipped_kernels_keep_the_rules_on_every_target(tmp_path: Path) -> None:
    result = run_compiler("tests.kernels.static", tmp_path)
    assert result.stdout.strip(), result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["failures"] == []
    assert result.returncode == 0, result.stderr
    assert list(summary)[:5] == LEADING_KEYS
    assert (summary["spills"], summary["without_tensor_core"]) == (0, 0)
    assert summary["launches_per_layer"] <= 7
    assert summary["launches_per_layer_fused"] <= 4
    assert summary["ctas_per_layer"] < 15_000
    assert sorted(summary["targets"]) == ["gfx942", "sm_100", "sm_80", "sm_90"]
    assert all(number >= 50 for number in summary["targets"].values())
    # Prefills multiply registers, outside pipelined loops: the rule against them inside does see them.
    assert summary["register_products"]


def test_the_judge_sees_each_rule_broken(tmp_path: Path) -> None:
    result = run_compiler("tests.kernels.static.offenders", tmp_path)
    assert result.returncode == 0, result.stderr
    for target, broken in json.loads(result.stdout).items():
        for name, rule in {
            "shared memory": "shared memory, more than",
            "no matrix instruction": "no matrix instruction",
            "2-byte access": "2 bytes at a time",
            **({"pipelined register product": "pipelined loop", "spill": "spills"} if target == "sm_90" else {}),
        }.items():
            assert any(rule in found for found in broken[name]), (target, name, broken[name])
        assert broken["register product"] == [], target


PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2}, {%r3,%r4,%r5,%r6}, %rd1, 1, 1, 1, 0;"
SHARED_PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2}, %rd2, %rd1, 1, 1, 1, 0, 0;"
COPY = "cp.async.cg.shared.global [ %r9 + 0 ], [ %rd2 + 0 ], 0x10, %r10;"
WAIT, WAIT_FOR_ALL = "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 0;"
AGAIN = "@%p1 bra $L__BB0_1;"


@pytest.mark.parametrize(
    ("statements", "found"),
    [
        ([PRODUCT, WAIT_FOR_ALL], 0),
        ([COPY, PRODUCT, WAIT_FOR_ALL], 0),
        (["$L__BB0_1:", PRODUCT, WAIT_FOR_ALL, AGAIN], 0),
        (["$L__BB0_1:", PRODUCT, WAIT, AGAIN], 1),
        (["$L__BB0_1:", PRODUCT, WAIT_FOR_ALL, COPY, AGAIN], 1),
        (["$L__BB0_1:", SHARED_PRODUCT, WAIT, COPY, AGAIN, PRODUCT, WAIT_FOR_ALL], 0),
        # Unrolled: no loop is left, and the first product is still not waited for.
        ([PRODUCT, WAIT, PRODUCT, WAIT_FOR_ALL], 1),
        # A branch within the loop: the product is in another block than the copy.
        (["$L__BB0_1:", COPY, "@%p2 bra $L__BB0_2;", PRODUCT, WAIT_FOR_ALL, "$L__BB0_2:", AGAIN], 1),
        # A pipelined loop inside one that is not, which has the product.
        (
            ["$L__BB0_1:", "$L__BB0_2:", SHARED_PRODUCT, COPY, "@%p2 bra $L__BB0_2;", PRODUCT, WAIT_FOR_ALL, AGAIN],
            0,
        ),
        # Only a jump forwards: no loop.
        (["@%p1 bra $L__BB0_1;", COPY, "$L__BB0_1:", PRODUCT, WAIT_FOR_ALL], 0),
    ],
)
def test_register_products_in_pipelined_loops_are_found(statements: list[str], found: int) -> None:
    ptx = "\n".join([*statements, "ret;"])
    assert count_pipelined_register_products(ptx) == found
    assert count_register_products(ptx) == statements.count(PRODUCT)
