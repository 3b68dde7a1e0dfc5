"""Calls to replicas that die: what is tried again, how often, and what the caller is told."""

from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from deployments import engine_handle
from deployments.engine_handle import EngineHandle
from deployments.generation import GenerateCall, GenerateChunk, Refusal
from lora_core.errors import AdapterLost, AdapterNotFound, AdapterUnloaded, EngineDead, EngineUnavailable

CALL = GenerateCall(request_id="r", lora_name="pirate", prompt="hi")
Script = Sequence[GenerateChunk | Refusal | Exception]


def chunk(text: str) -> GenerateChunk:
    return GenerateChunk(text=text, token_ids=[1])


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("generate", "", cause, pid=1, ip="127.0.0.1")


class Response:
    """One attempt: chunks, then perhaps an error."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[GenerateChunk | Refusal]:
        for item in self._script:
            if isinstance(item, Exception):
                raise item
            yield item


class Handle:
    """A deployment handle that plays one script for each attempt, the last one again and again."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = scripts
        self.responses: list[Response] = []
        self.models: list[str] = []
        self.generate = self

    def options(self, *, stream: bool, multiplexed_model_id: str) -> "Handle":
        assert stream
        self.models.append(multiplexed_model_id)
        return self

    def remote(self, call: GenerateCall) -> Response:
        script = self._scripts[min(len(self.responses), len(self._scripts) - 1)]
        self.responses.append(Response(script))
        return self.responses[-1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time that passes only while somebody sleeps, or as the test says."""
    now = [1000.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    def advance(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(engine_handle, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(engine_handle, "asyncio", SimpleNamespace(sleep=sleep))
    return advance


def engine(*scripts: Script) -> tuple[EngineHandle, Handle]:
    handle = Handle(*scripts)
    return EngineHandle(handle), handle


async def streamed(handle: EngineHandle) -> list[str]:
    return [piece.text async for piece in handle.generate(CALL)]


@pytest.mark.parametrize("death", [ActorDiedError(), OutOfMemoryError("oom"), task_error(EngineDead("gone"))])
async def test_a_death_before_the_first_chunk_costs_only_time(clock: object, death: Exception) -> None:
    handle, played = engine([death], [chunk("a"), chunk("b")])
    assert await streamed(handle) == ["a", "b"]
    assert played.models == ["pirate", "pirate"]


async def test_a_death_after_the_first_chunk_is_the_streams_end(clock: object) -> None:
    handle, played = engine([chunk("a"), ActorDiedError()], [chunk("never")])
    stream = handle.generate(CALL)
    assert (await anext(stream)).text == "a"
    with pytest.raises(EngineDead):
        await anext(stream)
    assert len(played.responses) == 1


async def test_a_whole_answer_begins_anew_after_any_death(clock: object) -> None:
    handle, _ = engine([chunk("a"), ActorDiedError()], [chunk("b"), chunk("c")])
    assert [piece.text for piece in await handle.collect(CALL)] == ["b", "c"]


async def test_a_call_that_kills_replicas_is_given_up_before_it_kills_them_all(clock: object) -> None:
    handle, played = engine([task_error(EngineDead("out of memory in a step"))])
    with pytest.raises(EngineDead, match="out of memory in a step"):
        await handle.collect(CALL)
    assert len(played.responses) == engine_handle.MAX_DEATHS


async def test_replicas_that_were_dead_already_are_waited_for(clock: object) -> None:
    handle, played = engine(*[[task_error(EngineUnavailable("dead"))]] * 10, [chunk("a")])
    assert await streamed(handle) == ["a"]
    handle, played = engine([task_error(EngineUnavailable("dead"))])
    with pytest.raises(EngineUnavailable):
        await streamed(handle)
    assert len(played.responses) > 10, "tried for as long as a replacement takes"


async def test_time_before_the_first_failure_does_not_count(clock: Callable[[float], None]) -> None:
    class LongAttempt(Handle):
        def remote(self, call: GenerateCall) -> Response:
            if not self.responses:
                clock(10 * engine_handle.RETRY_FOR_S)
            return super().remote(call)

    handle = EngineHandle(LongAttempt([ActorDiedError()], [chunk("a")]))
    assert [piece.text for piece in await handle.collect(CALL)] == ["a"]


async def test_refusals_are_passed_on_at_once(clock: object) -> None:
    refusal = Refusal(kind="AdapterNotFound", message="no 'pirate'")
    for script in ([refusal], [task_error(AdapterNotFound("no 'pirate'"))]):
        handle, played = engine(script)
        with pytest.raises(AdapterNotFound, match="no 'pirate'"):
            await streamed(handle)
        assert len(played.responses) == 1


async def test_a_replica_without_the_adapter_costs_only_time(clock: object) -> None:
    lost = Refusal(kind="AdapterLost", message="replica r1 does not serve adapter 'pirate': its files are other ones")
    handle, _ = engine([lost], [lost], [chunk("a")])
    assert await streamed(handle) == ["a"]
    handle, _ = engine([lost], [chunk("a")])
    assert [piece.text for piece in await handle.collect(CALL)] == ["a"]
    handle, played = engine([lost])
    with pytest.raises(AdapterLost, match="its files are other ones"):
        await handle.collect(CALL)
    assert len(played.responses) == engine_handle.MAX_LOSSES


async def test_an_unload_in_the_middle_of_an_answer_is_its_end(clock: object) -> None:
    unloaded = Refusal(kind="AdapterUnloaded", message="'pirate' was unloaded")
    handle, played = engine([chunk("a"), unloaded], [chunk("never")])
    stream = handle.generate(CALL)
    assert (await anext(stream)).text == "a"
    with pytest.raises(AdapterUnloaded, match="'pirate' was unloaded"):
        await anext(stream)
    assert len(played.responses) == 1


async def test_a_stream_that_is_dropped_is_cancelled(clock: object) -> None:
    handle, played = engine([chunk("a"), chunk("b")])
    stream: Any = handle.generate(CALL)
    await anext(stream)
    await stream.aclose()
    assert played.responses[0].cancelled
