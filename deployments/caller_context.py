"""Who the HTTP request that is being answered is made for."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cluster.callers import FLEET_OPERATOR, Caller

_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def current_caller() -> Caller:
    """The caller of the request; outside one, as in calls from other Ray actors, the fleet's operator.

    Whoever can call actors of the cluster can run code on its machines: no key would hold them.
    """
    return _caller.get() or FLEET_OPERATOR


@contextmanager
def acting_as(caller: Caller) -> Iterator[None]:
    """Answer for this caller within the block."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)
