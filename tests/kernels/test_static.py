"""What the Triton kernels compile to for a Hopper GPU; needs triton's compiler and no GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def test_kernels_compile_to_matrix_instructions_without_spills(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.kernels.static_compile"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.strip(), result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    record_property("kernels", summary["kernels"])
    assert summary["failures"] == []
    assert result.returncode == 0, result.stderr
    assert len(summary["kernels"]) >= 30
    # The prefill expand multiplies registers, outside a loop: the rule against it inside one does see them.
    assert any(kernel["register_products"] for kernel in summary["kernels"])
