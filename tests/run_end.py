"""How a run of the tests ends: with its status, and without taking any library apart.

Ray leaves native threads behind each time that it is shut down in a process, here more than ten times. What they use is
destroyed under them where a process exits as usual: one run died so of a segmentation fault, after its last line.
"""

import atexit
import os
import sys

import pytest

_status: list[int] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Note how the run has ended."""
    _status[:] = [int(session.exitstatus)]


def _leave() -> None:
    """End the process as Ray ends its workers; only after a run of tests."""
    if _status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[0])


# What is registered first is called last: by then the libraries' own functions have been called.
atexit.register(_leave)
