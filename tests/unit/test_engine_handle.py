"""Calls to replicas that die, or do not come: what is tried again, how often, and what the caller is told."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException, RequestCancelledError

from cluster.schema import QueueSettings
from deployments import engine_handle
from deployments.engine_handle import EngineHandle
from deployments.generation import GenerateCall, GenerateChunk, Refusal, SlotSnapshot
from lora_core.errors import (
    AdapterLate,
    AdapterLost,
    AdapterNotFound,
    AdapterUnloaded,
    EngineDead,
    EngineUnavailable,
    NoReplica,
    QueueFull,
)

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
        self.calls: list[GenerateCall] = []
        self.models: list[str] = []
        self.sessions: list[str] = []
        self.generate = self

    def options(
        self, *, stream: bool = True, multiplexed_model_id: str | None = None, session_id: str | None = None
    ) -> "Handle":
        assert stream
        self.models += [] if multiplexed_model_id is None else [multiplexed_model_id]
        self.sessions += [] if session_id is None else [session_id]
        return self

    def remote(self, call: GenerateCall) -> Response:
        self.calls.append(call)
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
    loop = SimpleNamespace(
        sleep=sleep, get_running_loop=asyncio.get_running_loop, CancelledError=asyncio.CancelledError
    )
    monkeypatch.setattr(engine_handle, "asyncio", loop)
    return advance


def engine(*scripts: Script, **queue: Any) -> tuple[EngineHandle, Handle]:
    handle = Handle(*scripts)
    return EngineHandle(handle, QueueSettings(**queue)), handle


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


@pytest.mark.parametrize("error", [ActorDiedError(), RayServeException("the replica is going")])
async def test_what_ray_says_through_a_replica_is_that_this_one_cannot_go_on(clock: object, error: Exception) -> None:
    for script in ([error], [task_error(error)]):
        handle, _ = engine(script, [chunk("a")])
        assert await streamed(handle) == ["a"]


@pytest.mark.parametrize("error", [NoReplica("none came", 5), BackPressureError(9, 9)])
async def test_what_only_time_can_help_is_not_tried_again(clock: object, error: Exception) -> None:
    handle, played = engine([error])
    with pytest.raises(type(error)):
        await streamed(handle)
    assert len(played.responses) == 1


async def test_a_call_can_be_for_one_replica_alone(clock: object) -> None:
    handle, calls = engine([EngineDead("gone")], [chunk("a")])
    call = msgspec.structs.replace(CALL, replica="r1")
    assert [piece.text for piece in await handle.collect(call)] == ["a"]
    assert calls.sessions == ["replica:r1"] * 2, "the next try, too"
    assert await streamed(handle) == ["a"]
    assert len(calls.sessions) == 2


async def test_a_whole_answer_is_asked_for_in_few_chunks(clock: object) -> None:
    handle, played = engine([chunk("a")])
    await handle.collect(CALL)
    await streamed(handle)
    assert [call.streamed for call in played.calls] == [False, True]


class Endless(Handle):
    """Answers nothing before it is cancelled, as Serve's responses do."""

    fleet: Any = None
    ending: BaseException = RequestCancelledError("r")

    @property
    def _router(self) -> Any:
        request_router = SimpleNamespace(fleet=self.fleet)
        return SimpleNamespace(_asyncio_router=SimpleNamespace(_request_router=request_router))

    def remote(self, call: GenerateCall) -> Any:
        cancelled = asyncio.Event()

        async def chunks() -> AsyncIterator[GenerateChunk]:
            await cancelled.wait()
            raise self.ending
            yield

        return _Iterable(chunks(), cancelled)


class _Iterable:
    def __init__(self, chunks: AsyncIterator[GenerateChunk], cancelled: asyncio.Event) -> None:
        self._chunks, self._cancelled = chunks, cancelled

    def __aiter__(self) -> AsyncIterator[GenerateChunk]:
        return self._chunks

    def cancel(self) -> None:
        self._cancelled.set()


async def test_calls_wait_up_to_a_number_and_are_then_refused() -> None:
    handle = EngineHandle(Endless(), QueueSettings(max_waiting=3, max_waiting_per_adapter=2))
    waiting = [asyncio.create_task(handle.collect(CALL)) for _ in range(2)]
    await asyncio.sleep(0)
    for ask in (lambda: handle.collect(CALL), lambda: streamed(handle)):
        with pytest.raises(QueueFull, match="2 requests for adapter 'pirate'") as caught:
            await ask()
        assert caught.value.retry_after_s >= 1
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    waiting.append(asyncio.create_task(handle.collect(CALL)))
    await asyncio.sleep(0)
    assert not waiting[-1].done(), "a call that was cancelled has given its place back"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_call_whose_first_token_has_come_waits_no_longer(clock: object) -> None:
    handle, _ = engine([chunk("a"), chunk("b")], max_waiting=1)
    stream = handle.generate(CALL)
    await anext(stream)
    assert await streamed(handle) == ["a", "b"]
    await stream.aclose()


@pytest.mark.parametrize("is_warm", [False, True])
# As it comes from Ray's own transport, and from gRPC.
@pytest.mark.parametrize("ending", [RequestCancelledError("r"), asyncio.CancelledError()])
async def test_a_cold_adapter_is_waited_for_no_longer_than_it_should_be(is_warm: bool, ending: BaseException) -> None:
    endless = Endless()
    endless.ending = ending
    endless.fleet = SimpleNamespace(is_warm=lambda adapter: is_warm, load_s=lambda adapter: 7.0)
    handle = EngineHandle(endless, QueueSettings(cold_wait_s=0.1))
    waiting = asyncio.create_task(handle.collect(CALL))
    if is_warm:
        done, _ = await asyncio.wait([waiting], timeout=0.35)
        assert not done, "it waits for its turn, and not for its adapter"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return
    with pytest.raises(AdapterLate, match=r"'pirate' could not be brought to a slot .* within 0\.1 s") as caught:
        await waiting
    assert caught.value.retry_after_s == 7


async def test_the_base_model_is_not_waited_for_as_adapters_are() -> None:
    endless = Endless()
    endless.fleet = SimpleNamespace(is_warm=lambda adapter: False)
    handle = EngineHandle(endless, QueueSettings(cold_wait_s=0.05))
    waiting = asyncio.create_task(handle.collect(msgspec.structs.replace(CALL, lora_name=None)))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_what_a_reply_says_of_slots_reaches_the_request_router() -> None:
    taken: list[SlotSnapshot] = []
    request_router = SimpleNamespace(take_snapshot=taken.append, _event_loop=asyncio.get_running_loop())
    snapshot = SlotSnapshot(replica_id="r0", sequence=3, resident=("pirate",))
    handle, played = engine([msgspec.structs.replace(chunk("a"), snapshot=snapshot), chunk("b")])
    played._router = SimpleNamespace(_asyncio_router=SimpleNamespace(_request_router=request_router))  # type: ignore[attr-defined]
    assert await streamed(handle) == ["a", "b"]
    await asyncio.sleep(0)
    assert taken == [snapshot]
