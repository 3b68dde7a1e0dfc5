"""The id of the HTTP request that is being answered: in the log, in every error's body, and in its answer's header.

Ray Serve's proxy takes a client's `X-Request-Id`, or makes one up, and writes it into the answer's headers itself.
"""

import uuid
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers

HEADER = "x-request-id"
SCOPE_KEY = "lora_fleet.request_id"

SHOWN_ID = 64
"""Characters of a client's id that the ids of what it causes begin with."""

_current: ContextVar[str] = ContextVar("request_id", default="")


def current() -> str:
    """The id; empty where no HTTP request is being answered."""
    return _current.get()


@contextmanager
def bound(scope: MutableMapping[str, Any]) -> Iterator[None]:
    """Make the id of a request the current one within the block; it has the same one each time."""
    found = scope.get(SCOPE_KEY) or Headers(scope=scope).get(HEADER) or uuid.uuid4().hex
    token = _current.set(scope.setdefault(SCOPE_KEY, found))
    try:
        yield
    finally:
        _current.reset(token)


def new_call_id() -> str:
    """An id for one call to a replica: its own, and beginning with that of the HTTP request it is made for."""
    own = uuid.uuid4().hex
    begin = "".join(character for character in current()[:SHOWN_ID] if character.isalnum() or character in "-_.")
    return f"{begin}.{own[:16]}" if begin else own


def stamped(body: dict[str, Any]) -> dict[str, Any]:
    """An error's body with the current id, where there is one."""
    return {**body, "request_id": current()} if current() else body
