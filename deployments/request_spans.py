"""`TracedRequests` and `traced_attempt`: the spans of a request in the ingress."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments import request_id
from deployments.generation import GenerateCall, GenerateChunk
from deployments.tracing import TRACEPARENT, TRACESTATE, context_of, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

Answer = Callable[[GenerateCall], AsyncGenerator[GenerateChunk, None]]

UNTRACED = ("/health", "/metrics")
"""Asked again and again by machines."""


class TracedRequests:
    """An ASGI middleware: a span for each HTTP request, from its first byte to its answer's last.

    It belongs to the span that the request's `traceparent` names, if it has one.
    """

    def __init__(self, app: ASGIApp, *, tracer: "Tracer") -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind

        headers = Headers(scope=scope)
        context = context_of(headers.get(TRACEPARENT, ""), headers.get(TRACESTATE, ""))
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        with self._tracer.start_as_current_span(
            scope["method"], context, SpanKind.SERVER, attributes, record_exception=False
        ) as span:
            await self._app(scope, receive, _watched(send, span, scope))


def _watched(send: Send, span: "Span", scope: Scope) -> Send:
    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            _describe(span, scope, message["status"])
        await send(message)

    return watched


def _describe(span: "Span", scope: Scope, status: int) -> None:
    from opentelemetry.trace import Status, StatusCode

    # A path that no route has is the client's to choose, and no name to group by.
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    with request_id.bound(scope):
        span.set_attribute("lora_fleet.request_id", request_id.current())
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


def traced_attempt(tracer: "Tracer | None", call: GenerateCall, answer: Answer) -> AsyncGenerator[GenerateChunk, None]:
    """What `answer` gives for one try of a call, with a span from the choice of a replica to the answer's end.

    Without a tracer it is just that.
    """
    return answer(call) if tracer is None else _traced(tracer, call, answer)


async def _traced(tracer: "Tracer", call: GenerateCall, answer: Answer) -> AsyncGenerator[GenerateChunk, None]:
    from opentelemetry.trace import SpanKind, Status, StatusCode

    attributes: dict[str, Any] = {"lora_fleet.call_id": call.request_id, "lora_fleet.adapter": call.lora_name or ""}
    # It never is the current span: an answer may be read to its end by another task than asked for it.
    span = tracer.start_span("attempt", kind=SpanKind.CLIENT, attributes=attributes)
    try:
        async with aclosing(answer(msgspec.structs.replace(call, traceparent=traceparent_of(span)))) as chunks:
            async for chunk in chunks:
                if chunk.snapshot is not None:
                    span.set_attribute("lora_fleet.replica", chunk.snapshot.replica_id)
                    span.add_event("first chunk")
                yield chunk
    except Exception as error:
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        raise
    finally:
        span.end()
