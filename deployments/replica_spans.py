"""The spans of a call in a replica, and those of its requests in the replica's engine."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from deployments.generation import GenerateCall, GenerateChunk
from deployments.tracing import context_of
from lora_core.messages import Timeline

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer


def traced_answer(
    tracer: "Tracer | None", call: GenerateCall, replica_id: str, chunks: AsyncGenerator[GenerateChunk, None]
) -> AsyncGenerator[GenerateChunk, None]:
    """The same chunks, with a span around them, and in it what the engine tells of each of the call's answers:

    - `queue`: until its first step, and in it `slot`: until its adapter is in a slot, where it was in none;
    - `prefill`: from there to its first token;
    - `decode`: from there to its last one.

    Where the call is not traced it is just the chunks.
    """
    return chunks if tracer is None or not call.traceparent else _traced(tracer, call, replica_id, chunks)


async def _traced(
    tracer: "Tracer", call: GenerateCall, replica_id: str, chunks: AsyncGenerator[GenerateChunk, None]
) -> AsyncGenerator[GenerateChunk, None]:
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

    attributes = {"lora_fleet.adapter": call.lora_name or "", "lora_fleet.replica": replica_id}
    # Not the current span: the code between two chunks runs in the context of whoever asks for them.
    span = tracer.start_span("replica", context_of(call.traceparent), SpanKind.SERVER, attributes)
    engine = EngineSpans(tracer, set_span_in_context(span))
    last: dict[int, GenerateChunk] = {}
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                last[chunk.index] = chunk
                if chunk.timeline is not None:
                    engine.take(chunk.index, chunk.timeline)
                yield chunk
    except Exception as error:
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        raise
    finally:
        engine.end({index: chunk.completion_tokens for index, chunk in last.items()})
        for chunk in last.values():
            span.set_attribute("gen_ai.usage.input_tokens", chunk.prompt_tokens)
            span.set_attribute("lora_fleet.cached_tokens", chunk.cached_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", sum(chunk.completion_tokens for chunk in last.values()))
        span.end()


class EngineSpans:
    """Made of what an engine tells of its requests.

    Args:
        tracer: Makes them.
        context: Of the span they belong to.
    """

    def __init__(self, tracer: "Tracer", context: "Context") -> None:
        self._tracer = tracer
        self._context = context
        self._timelines: dict[int, Timeline] = {}

    def take(self, index: int, timeline: Timeline) -> None:
        """Note how far the request of an answer has come."""
        self._timelines[index] = timeline

    def end(self, num_tokens: dict[int, int]) -> None:
        """Make the spans of each answer, which has so many tokens."""
        for index, times in self._timelines.items():
            self._make(index, times, num_tokens.get(index, 0))

    def _make(self, index: int, times: Timeline, num_tokens: int) -> None:
        from opentelemetry.trace import set_span_in_context

        queue = self._tracer.start_span(
            "queue", self._context, attributes={"lora_fleet.answer": index}, start_time=times.came_ns
        )
        if times.slot_ns > times.came_ns:
            slot = self._tracer.start_span("slot", set_span_in_context(queue), start_time=times.came_ns)
            slot.end(times.slot_ns)
        queue.end(times.started_ns)
        self._span("prefill", index, times.started_ns, times.first_token_ns)
        # An answer that a stop string ends is not ended by its engine.
        if times.last_token_ns:
            self._span("decode", index, times.first_token_ns, times.last_token_ns, num_tokens)

    def _span(self, name: str, index: int, start_ns: int, end_ns: int, num_tokens: int = 1) -> None:
        attributes = {"lora_fleet.answer": index, "lora_fleet.tokens": num_tokens}
        self._tracer.start_span(name, self._context, attributes=attributes, start_time=start_ns).end(end_ns)
