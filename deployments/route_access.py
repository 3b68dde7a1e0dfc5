"""Which keys open which routes. A route that is not named here opens to the fleet's operator alone."""

import enum
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.routing import Match
from starlette.types import Scope

from cluster.callers import Caller


class Access(enum.Enum):
    """What a route asks for."""

    ANYONE = "no key"
    ANY_KEY = "any key"
    OWN_ADAPTERS = "an operator's key, the tenant's or the fleet's"
    FLEET = "the fleet's operator key"

    def is_given_to(self, caller: Caller) -> bool:
        """Whether a caller may come in here."""
        if self is Access.ANYONE or caller.is_fleet_operator:
            return True
        if caller.tenant is None or self is Access.FLEET:
            return False
        return caller.is_operator or self is Access.ANY_KEY


DECLARED: dict[tuple[str, str], Access] = {
    ("GET", "/health"): Access.ANYONE,
    ("HEAD", "/health"): Access.ANYONE,
    # What the server can be asked for is no secret: it is in the project's own documentation.
    ("GET", "/openapi.json"): Access.ANYONE,
    ("HEAD", "/openapi.json"): Access.ANYONE,
    ("GET", "/docs"): Access.ANYONE,
    ("HEAD", "/docs"): Access.ANYONE,
    # Nor is the page: what it shows comes from a route that is the fleet's operator's.
    ("GET", "/fleet"): Access.ANYONE,
    ("HEAD", "/fleet"): Access.ANYONE,
    ("GET", "/v1/models"): Access.ANY_KEY,
    ("GET", "/v1/models/{model_id:path}"): Access.ANY_KEY,
    ("POST", "/v1/chat/completions"): Access.ANY_KEY,
    ("POST", "/v1/completions"): Access.ANY_KEY,
    ("POST", "/tokenize"): Access.ANY_KEY,
    ("POST", "/detokenize"): Access.ANY_KEY,
    ("POST", "/v1/load_lora_adapter"): Access.OWN_ADAPTERS,
    ("POST", "/v1/unload_lora_adapter"): Access.OWN_ADAPTERS,
    ("POST", "/v1/pin_lora_adapter"): Access.OWN_ADAPTERS,
    ("POST", "/v1/unpin_lora_adapter"): Access.OWN_ADAPTERS,
}
"""By method, and path as the route was declared."""


class Found(NamedTuple):
    """The route that an application answers a request with."""

    access: Access
    exists: bool = True
    """False: no route has this path, or what has it is not for this method."""


def find_route(app: Starlette, scope: Scope) -> Found:
    """The route that will answer, found as the application finds it."""
    for route in app.routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            # What is no plain route, as a mounted application, has no path that could be declared.
            declared = (scope["method"], str(getattr(route, "path", "")))
            return Found(DECLARED.get(declared, Access.FLEET))
    return Found(Access.FLEET, exists=False)
