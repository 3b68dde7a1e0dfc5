"""How a run of the tests ends: no thread of this project is left, and no library is taken apart.

Ray leaves native threads behind each time that it is shut down in a process, here more than ten times. What they use is
destroyed under them where a process exits as usual: one run died so of a segmentation fault, after its last line.
"""

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PATIENCE_S = 10.0
"""Longer than threads take to see that they are not needed any more."""

_ROOT = Path(__file__).parents[1]
_status: list[int] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a thread of this project outlives the tests."""
    # Threads may wait for what they serve to be gone, and that for the collector.
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while (left := sorted(_threads_left())) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        sys.stderr.write(f"\nthreads outlive the tests: {', '.join(left)}\n")
    _status[:] = [int(session.exitstatus)]


def _threads_left() -> Iterator[str]:
    """Names of the other threads that this project's code has started."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread is threading.current_thread():
            continue
        frame = frames.get(thread.ident or 0)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(_ROOT) and "site-packages" not in path.parts:
                yield thread.name
                break
            frame = frame.f_back


def _leave() -> None:
    """End the process as Ray ends its workers; only after a run of tests."""
    if _status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[0])


# What is registered first is called last: by then the libraries' own functions have been called.
atexit.register(_leave)
