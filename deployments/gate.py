"""`Gate`: what every HTTP request passes first. It gets an id, its key is looked at, and its size is bounded."""

import ipaddress
from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.callers import FLEET_OPERATOR, NOBODY, Caller
from cluster.quotas import TenantQuotas
from deployments import exact_replica, http_errors, request_id
from deployments.caller_context import acting_as
from deployments.key_store import KeyStore
from deployments.route_access import Access, find_route
from lora_core.errors import KeyRefused, NotPermitted

SHOWN_CODING = 40
"""Characters of a body's coding that its refusal repeats."""

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Gate:
    """An ASGI middleware.

    Without keys it lets in who is on the server's own machine, and nobody else, as the fleet's operator. With keys each
    route asks for one (`deployments.route_access`), and a tenant's requests are counted.

    Args:
        app: What is behind it.
        keys: The server's.
        quotas: Of its tenants.
        max_body_bytes: Largest body that is read.
    """

    def __init__(self, app: ASGIApp, *, keys: KeyStore, quotas: TenantQuotas, max_body_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._quotas = quotas
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # There are no WebSockets here.
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["method"] == "POST" and scope["path"].endswith("/"):
            # Many clients are configured so, and a redirect would send some of them elsewhere behind a proxy. What is
            # read by name keeps it: a name may end so.
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        with ExitStack() as stack:
            stack.enter_context(request_id.bound(scope))
            answer: ASGIApp
            try:
                caller = self._admit(scope)
                stack.enter_context(self._quotas.request(caller.tenant))
                stack.enter_context(exact_replica.bound(scope, caller))
                self._check_body(Headers(scope=scope))
            except Exception as error:
                answer = http_errors.error_response(error)
            else:
                answer = self._app
                stack.enter_context(acting_as(caller))
            await answer(scope, self._bounded(receive), send)

    def _admit(self, scope: Scope) -> Caller:
        """Who it is that may come in.

        Raises:
            KeyRefused: there is no key, or nobody has it.
            NotPermitted: the route is not for its bearer, or there are no keys and the request comes from elsewhere.
            HTTPException: there is no such route. The fleet's operator is told so by the application itself.
        """
        if self._keys.is_empty:
            if not _is_local(scope):
                raise NotPermitted(
                    "this server has no keys, and answers only to the machine it runs on; its operator can give it "
                    "keys (access.keys_file, or the variable LORA_FLEET_KEYS)"
                )
            return FLEET_OPERATOR
        key = _bearer_key(Headers(scope=scope))
        caller = None if key is None else self._keys.caller(key)
        route = find_route(scope["app"], scope)
        if route.access is Access.ANYONE:
            return caller or NOBODY
        if caller is None:
            raise KeyRefused(
                "this key is nobody's; ask the operator of this server for one"
                if key is not None
                else "a key is needed, as `Authorization: Bearer KEY`; the operator of this server gives them out"
            )
        if not route.exists and not caller.is_fleet_operator:
            raise HTTPException(404, "there is nothing at this path for this method")
        if not route.access.is_given_to(caller):
            raise NotPermitted(f"this key does not open this route, which needs {route.access.value}")
        return caller

    def _check_body(self, headers: Headers) -> None:
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            # What it unpacks to has no bound.
            raise HTTPException(
                415,
                f"the body is sent with Content-Encoding: {coding[:SHOWN_CODING]!r}, which this server does not read; "
                "send it as it is",
                {"Accept-Encoding": "identity"},
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_body_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """Read no more than may be: a body may come in parts, and its length not be told or be wrong."""
        num_bytes = 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                # Whoever reads the body hands on this kind of exception alone, and it is answered in the envelope.
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> HTTPException:
        return HTTPException(
            413,
            f"the body has more than {self._max_body_bytes} bytes (access.max_body_bytes, which the operator of this "
            "server can raise)",
        )


def _bearer_key(headers: Headers) -> str | None:
    """The one key of a request; None where there is none, or more than one."""
    given = headers.getlist("authorization")
    if len(given) != 1:
        return None
    scheme, _, key = given[0].partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def _is_local(scope: Scope) -> bool:
    """Whether a request comes from this machine, and was meant for it.

    A web page can have its name lead to 127.0.0.1 and make its reader's browser ask there: then the name asked for is
    not one of this machine.
    """
    client = scope.get("client")
    host = Headers(scope=scope).get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback and name.lower() in LOCAL_NAMES
