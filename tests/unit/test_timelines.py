"""When a traced request got where in its engine, and that tracing costs nothing where it is off."""

from collections.abc import AsyncGenerator

from cluster.schema import TracingSettings
from deployments.generation import GenerateCall, GenerateChunk
from deployments.replica_spans import traced_answer
from deployments.request_spans import traced_attempt
from deployments.tracing import context_of, traceparent_of, tracer_of
from lora_core.engine.request import Request, ScheduledBatch, ScheduledRow
from lora_core.engine.timelines import Timelines
from lora_core.messages import Timeline
from lora_core.types import AdapterRef

ADAPTER = AdapterRef("a", 1)


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def request(adapter: AdapterRef | None) -> Request:
    return Request(request_id="r", token_ids=[1], num_prompt_tokens=1, arrival=0, adapter=adapter, is_traced=True)


def test_a_request_waits_for_its_slot_and_then_for_its_turn() -> None:
    clock, slots = Clock(), dict[AdapterRef, int]()
    timelines, traced = Timelines(slots.get, clock), request(ADAPTER)
    clock.now_ns = 10
    timelines.came(traced)
    clock.now_ns = 20
    timelines.begins(ScheduledBatch([]))
    slots[ADAPTER] = 0
    clock.now_ns = 30
    timelines.begins(ScheduledBatch([]))
    clock.now_ns = 40
    timelines.begins(ScheduledBatch([ScheduledRow(traced, 1)]))
    clock.now_ns = 50
    assert timelines.has_token(traced, is_last=False) == Timeline(10, 30, 40, 50)
    clock.now_ns = 60
    timelines.begins(ScheduledBatch([ScheduledRow(traced, 1)]))
    assert timelines.has_token(traced, is_last=False) is None, "nothing new that a trace shows"
    clock.now_ns = 70
    assert timelines.has_token(traced, is_last=True) == Timeline(10, 30, 40, 50, 70)
    timelines.ended(traced)
    assert not timelines


def test_without_an_adapter_nothing_is_waited_for() -> None:
    clock = Clock()
    timelines, traced = Timelines(lambda ref: None, clock), request(None)
    clock.now_ns = 10
    timelines.came(traced)
    timelines.begins(ScheduledBatch([ScheduledRow(traced, 1)]))
    assert timelines.has_token(traced, is_last=True) == Timeline(10, 10, 10, 10, 10)


def test_a_request_that_is_forgotten_is_no_fault() -> None:
    timelines, traced = Timelines(lambda ref: None, Clock()), request(None)
    timelines.came(traced)
    timelines.ended(traced)
    assert timelines.has_token(traced, is_last=True) is None
    timelines.ended(traced)


async def test_off_by_default_and_then_nothing_stands_between() -> None:
    assert tracer_of(TracingSettings(), "me") is None
    call = GenerateCall(request_id="r", prompt="x")

    async def answer(asked: GenerateCall) -> AsyncGenerator[GenerateChunk, None]:
        assert asked is call
        yield GenerateChunk(text="y", token_ids=[1])

    chunks = answer(call)
    assert traced_attempt(None, call, lambda _: chunks) is chunks
    assert traced_answer(None, call, "replica", chunks) is chunks
    await chunks.aclose()


def test_a_span_is_named_to_other_processes_as_the_w3c_says() -> None:
    tracer = tracer_of(TracingSettings(otlp_endpoint="http://127.0.0.1:1"), "me")
    assert tracer is not None
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    span = tracer.start_span("x", context_of(f"00-{trace}-{parent}-01"))
    version, of_trace, of_span, flags = traceparent_of(span).split("-")
    assert (version, of_trace, flags) == ("00", trace, "01")
    assert of_span not in ("", parent)
    assert traceparent_of(tracer.start_span("x", context_of(f"00-{trace}-{parent}-00"))) == ""
    for wrong in ("", "x", f"00-{'0' * 32}-{parent}-01", f"00-{trace}-{parent}", "é" * 55):
        begun = tracer.start_span("x", context_of(wrong))
        assert f"{begun.get_span_context().trace_id:032x}" != trace
