"""The one replica that is to answer an HTTP request, where an operator looks for the one at fault."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import Scope

from cluster.callers import Caller
from lora_core.errors import NotPermitted

HEADER = "x-lora-fleet-replica"

_wanted: ContextVar[str] = ContextVar("exact_replica", default="")


def current() -> str:
    """Id of the replica asked for, as GET /v1/fleet names it; empty: whichever is placed best."""
    return _wanted.get()


@contextmanager
def bound(scope: Scope, caller: Caller) -> Iterator[None]:
    """Have a request answered by the replica it names, within the block.

    Raises:
        NotPermitted: it names one, and its caller is not the fleet's operator.
    """
    wanted = Headers(scope=scope).get(HEADER, "")
    if wanted and not caller.is_fleet_operator:
        raise NotPermitted(f"only the fleet's operator may choose a replica ({HEADER}); leave that header out")
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)
