"""Traces of requests: who makes spans, and how they travel as a W3C `traceparent`.

Nothing of OpenTelemetry is imported before a configuration asks for traces.
"""

from typing import TYPE_CHECKING

from cluster.schema import TracingSettings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

SERVICE_NAME = "lora-fleet"

SEND_EVERY_MS = 1000
"""Spans wait so long to be sent together: what a process that is killed has not sent is lost."""

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"


def tracer_of(settings: TracingSettings, process: str) -> "Tracer | None":
    """What makes the spans of this process, and sends them in the background; None where nothing is traced.

    OpenTelemetry's own environment variables add to it, such as `OTEL_EXPORTER_OTLP_HEADERS` for a collector's key and
    `OTEL_RESOURCE_ATTRIBUTES`.

    Args:
        settings: Where to send them, and of how many requests.
        process: Tells this process from its fellows.
    """
    if settings.otlp_endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    # Not OpenTelemetry's global one, which is Ray's to set.
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        resource=Resource.create({"service.name": SERVICE_NAME, "service.instance.id": process}),
    )
    exporter = OTLPSpanExporter(f"{settings.otlp_endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=SEND_EVERY_MS))
    return provider.get_tracer("deployments")


def traceparent_of(span: "Span") -> str:
    """A span as its children in other processes name it; empty where it is not recorded, and nor are they."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    if span.get_span_context().trace_flags.sampled:
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier.get(TRACEPARENT, "")


def context_of(traceparent: str, tracestate: str = "") -> "Context":
    """The context in which a `traceparent` has its children; an empty one where it is none."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent, TRACESTATE: tracestate}, Context())
