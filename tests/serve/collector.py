"""`Collector`: takes traces as an OpenTelemetry collector does, by OTLP over HTTP on loopback, and keeps them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Received(NamedTuple):
    """One span, as it came."""

    name: str
    trace: str
    id: str
    parent: str
    """Empty: it has none."""
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]
    process: str
    """Which process sent it."""


class Collector:
    """What has come so far."""

    def __init__(self, url: str, spans: list[Received]) -> None:
        self.url = url
        self.spans = spans

    def trace(self, trace: str, until: Callable[[set[str]], bool], timeout_s: float = 30) -> dict[str, Received]:
        """The spans of a trace by their names, as soon as `until` holds of the names."""
        deadline = time.monotonic() + timeout_s
        while not until({span.name for span in self.spans if span.trace == trace}):
            assert time.monotonic() < deadline, [span for span in self.spans if span.trace == trace]
            time.sleep(0.1)
        return {span.name: span for span in self.spans if span.trace == trace}


@contextmanager
def collector() -> Iterator[Collector]:
    """One that listens."""
    spans: list[Received] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            known = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            if known:
                spans.extend(read(body))
            self.send_response(200 if known else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Collector(f"http://127.0.0.1:{server.server_address[1]}", spans)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def read(body: bytes) -> Iterator[Received]:
    """The spans of one message."""
    message = ExportTraceServiceRequest.FromString(body)
    for of_process in message.resource_spans:
        process = _values(of_process.resource.attributes)["service.instance.id"]
        for scope in of_process.scope_spans:
            for span in scope.spans:
                yield _received(span, str(process))


def _received(span: Span, process: str) -> Received:
    return Received(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        attributes=_values(span.attributes),
        process=process,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
