"""All cases, in the order of the table."""

from tests.cases import (
    adapter_files,
    adapter_math,
    costs,
    damaged_files,
    engine_process,
    identity,
    over_http,
    parallel,
    queueing,
    specification,
)
from tests.cases.registry import CASES

__all__ = [
    "CASES",
    "adapter_files",
    "adapter_math",
    "costs",
    "damaged_files",
    "engine_process",
    "identity",
    "over_http",
    "parallel",
    "queueing",
    "specification",
]
