"""What the kernels' tests share."""

import os
from collections.abc import Iterator

import pytest
import triton

from tests.kernels.scratch import poisoned_empty


@pytest.fixture(scope="session", autouse=True)
def expected_triton() -> None:
    """Where a version of Triton is asked for, the tests run on that one and no other."""
    expected = os.environ.get("EXPECTED_TRITON", triton.__version__)
    assert triton.__version__ == expected, f"triton is {triton.__version__}, EXPECTED_TRITON asks for {expected}"


@pytest.fixture
def poisoned_scratch() -> Iterator[None]:
    """Memory from torch.empty holds NaN, so that reading what was never written shows."""
    with poisoned_empty():
        yield
