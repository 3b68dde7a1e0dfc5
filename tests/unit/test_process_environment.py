"""What an engine's process is started with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_core.engine import process_environment as module
from lora_core.engine.process_environment import LARGE_PAGES, process_environment


@pytest.mark.parametrize(
    ("kernel", "given", "expected"),
    [
        ("always [madvise] never", None, {LARGE_PAGES: "1"}),
        ("[always] madvise never", None, {LARGE_PAGES: "1"}),
        ("always madvise [never]", None, {}),
        (None, None, {}),
        ("always [madvise] never", "0", {}),
    ],
)
def test_large_pages_are_asked_for_where_there_are_any(
    kernel: str | None,
    given: str | None,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "enabled"
    if kernel is not None:
        path.write_text(kernel)
    monkeypatch.setattr(module, "_KERNEL", path)
    monkeypatch.delenv(LARGE_PAGES, raising=False)
    if given is not None:
        monkeypatch.setenv(LARGE_PAGES, given)
    assert process_environment() == expected
    assert process_environment(3) == {**expected, "OMP_NUM_THREADS": "3"}


def test_torch_takes_large_pages() -> None:
    """A tensor of 64 MB is in them in part at least: others may have taken many."""
    variables = process_environment(1)
    if LARGE_PAGES not in variables:
        pytest.skip("this kernel has no large pages")
    program = (
        "import torch; t = torch.ones(1 << 24); "
        "print(next(line.split()[1] for line in open('/proc/self/smaps_rollup') if 'AnonHuge' in line))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) >= 2 << 10
