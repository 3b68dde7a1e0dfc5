"""The environment variables that a process with an engine should start with."""

import os
from pathlib import Path

LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch then asks for large pages for tensors of 2 MB and more, the KV cache and the base's weights among them."""

_KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def process_environment(num_threads: int | None = None) -> dict[str, str]:
    """Variables to set beside this process's own; torch reads them as it starts.

    Large pages are asked for where the kernel gives them to those who ask (`[madvise]`, as most distributions have it):
    a decode step on the CPU reads all weights and the whole history, and finds their addresses in a fraction of the
    time. Who has set the variable keeps it.

    Args:
        num_threads: Threads that torch computes with; None leaves them to it.
    """
    found = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    if LARGE_PAGES not in os.environ and _kernel_gives_large_pages():
        found[LARGE_PAGES] = "1"
    return found


def _kernel_gives_large_pages() -> bool:
    try:
        return "[never]" not in _KERNEL.read_text()
    except OSError:
        return False
