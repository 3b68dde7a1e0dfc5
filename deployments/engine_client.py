"""`EngineClient`: the parent's side of one engine process. Starts it, talks to it, notices when it cannot go on."""

import asyncio
import contextlib
import itertools
import logging
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from cluster.progress import BASE, Sign, signs
from deployments.child_process import ChildProcess
from deployments.open_streams import OpenStreams
from deployments.socket_folder import SocketFolder
from deployments.token_stream import TokenStream
from lora_core import errors
from lora_core.channel import (
    REQUEST_ENDPOINT,
    RESPONSE_ENDPOINT,
    AsyncMessageReceiver,
    LoRAQueue,
    MessageSender,
    endpoint,
)
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.process_environment import process_environment
from lora_core.errors import ConfigError, EngineDead, EngineUnavailable, InvalidRequest, LoRAFleetError
from lora_core.messages import (
    AbortRequest,
    EngineEvent,
    EngineFailed,
    EngineReady,
    GenerateRequest,
    ProtectAdapters,
    ResetAdapter,
    Residency,
    StepOutput,
)
from lora_core.types import LoRARequest, LoRAResponse
from lora_core.workload import Workload

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROGRESS_EVERY_S = 10.0
TICK_S = 0.25
STOP_GRACE_S = 5.0


class EngineClient:
    """One engine process, for one event loop.

    Args:
        engine: What the process serves.
        lora: Its adapter settings.
        stall_timeout_s: Longest silence of a started process, which otherwise speaks twice a second and after each
            step; then its requests are failed. It counts as alive again when it speaks again.
        on_residency: Called on the loop with every new residency.
        on_workload: Called on the loop with every account of the engine's work.
        module: What the process runs.
    """

    def __init__(
        self,
        engine: EngineConfig,
        lora: LoRAConfig,
        *,
        stall_timeout_s: float = 60.0,
        on_residency: Callable[[Residency], None] | None = None,
        on_workload: Callable[[Workload], None] | None = None,
        module: str = "deployments.engine_process",
    ) -> None:
        self.residency = Residency(-1, [], [])
        """Which adapters the engine holds, as last heard."""
        self.status = StepOutput(0)
        """The engine's last step or heartbeat, for its counts of requests."""
        self.workload = Workload()
        """The engine's last account of its work."""
        self._engine, self._lora_config = engine, lora
        self._stall_timeout_s = stall_timeout_s
        self._on_residency = on_residency
        self._on_workload = on_workload
        self._module = module
        # Weak, so that a stream its consumer has dropped is told to the engine.
        self._streams: weakref.WeakValueDictionary[str, TokenStream] = weakref.WeakValueDictionary()
        self._open_streams = OpenStreams()
        self._numbers = itertools.count()
        self._child: ChildProcess | None = None
        self._folder: SocketFolder | None = None
        self._opened = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._fault: LoRAFleetError | None = None
        self._stalled = False
        self._silent_s = 0.0
        self._closed = False

    async def start(self, timeout_s: float) -> EngineReady:
        """Start the process and wait until it can take requests.

        Raises:
            ConfigError: it cannot serve this configuration.
            EngineDead: it ended, or was not ready within `timeout_s`. Nothing is left of it.
        """
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineReady] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        try:
            self._child = child = self._open()
            self._tasks = [
                asyncio.create_task(self._read_events(), name="engine-events"),
                asyncio.create_task(self._watch_exit(child), name="engine-exit"),
                asyncio.create_task(self._watch_silence(child), name="engine-silence"),
            ]
            for task in self._tasks:
                task.add_done_callback(self._task_done)
            return await self._wait_ready(child, timeout_s)
        except BaseException:
            await self.close()
            raise

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._child is not None, "not started"
        return self._child.pid

    def check_healthy(self) -> None:
        """Raise EngineDead if the process has ended, or has been silent for longer than `stall_timeout_s`."""
        if self._fault is not None:
            raise _copy(self._fault)
        if self._stalled:
            raise self._stall_error()

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Send a request, and return its tokens as they will arrive.

        A fault of the request itself arrives in the stream, as an item with finish reason "error". Request ids are
        the caller's affair: the engine gets each with a number behind it.

        Raises:
            EngineUnavailable: the process cannot take it. The stream raises EngineDead as soon as the process ends.
            InvalidRequest: a number in it does not fit into 64 bits.
        """
        try:
            self.check_healthy()
        except EngineDead as fault:
            raise EngineUnavailable(str(fault)) from None
        # Never used twice, so that no stream gets the late tokens of another one.
        request_id = f"{request.request_id}#{next(self._numbers)}"
        try:
            self._requests.send(msgspec.structs.replace(request, request_id=request_id))
        except OverflowError:
            raise InvalidRequest("a number in the request does not fit into 64 bits") from None
        stream = self._streams[request_id] = TokenStream(request_id, self._abandon)
        self._open_streams.opened(request_id, request.lora_name)
        return stream

    async def lora(self, request: LoRARequest, timeout_s: float) -> LoRAResponse:
        """Load, unload, pin, unpin or warm an adapter; the engine goes on generating meanwhile.

        Raises:
            EngineDead: the process ended before it answered.
            RequestTimeout: no answer within `timeout_s`.
        """
        self.check_healthy()
        answer = asyncio.ensure_future(self._lora_queue.submit(request, timeout_s))
        try:
            await _first_done(answer, self._ended)
            if not answer.done():
                self.check_healthy()
            return await answer
        finally:
            answer.cancel()

    def protect_adapters(self, names: list[str]) -> None:
        """From now on have these adapters lose their slots last, and no others."""
        if self._fault is None:
            self._requests.send(ProtectAdapters(names))

    def reset_adapter(self, name: str, reason: str) -> None:
        """End an adapter's requests with AdapterLost; the next one finds it read from its folder, and its slot written,
        anew."""
        if self._fault is None:
            self._requests.send(ResetAdapter(name, reason))

    def signs(self) -> dict[str, Sign]:
        """How the oldest unfinished request of each adapter fares, and of the base model under `BASE`."""
        work = {one.name or BASE: one for one in self.workload.adapters}
        return signs(self._open_streams.idle_s(), work)

    def end_requests(self, name: str, fault: LoRAFleetError) -> int:
        """Fail the streams of an adapter, or of the base model (`BASE`), and have the engine forget their requests;
        returns how many there were."""
        request_ids = self._open_streams.of(name)
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.fail(_copy(fault))
            self._abandon(request_id)
        return len(request_ids)

    def condemn(self, fault: EngineDead) -> None:
        """Take no more requests, fail those under way, and be unhealthy from now on, as if the process had ended."""
        if self._child is not None:
            # Where its threads are is written to the log.
            self._child.signal(signal.SIGUSR1)
        self._end(fault)

    async def close(self) -> None:
        """End the process and remove its sockets; streams under way fail. May be called again."""
        self._closed = True
        if self._child is not None:
            self._end(EngineDead("the engine process is being shut down"))
            await self._child.stop(STOP_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._opened.aclose()

    def kill(self) -> None:
        """End the process and remove its sockets at once; for a parent that is itself about to end."""
        self._closed = True
        if self._child is not None:
            self._child.kill()
        if self._folder is not None:
            self._folder.remove()

    def _open(self) -> ChildProcess:
        """Open the links, and start the process at their other end. `_opened` closes them in the opposite order."""
        self._folder = SocketFolder()
        self._opened.callback(self._folder.remove)
        base = f"ipc://{self._folder.path}/engine"
        self._requests = MessageSender(endpoint(base, REQUEST_ENDPOINT), bind=True)
        # Closed when the process is gone: nothing can leave any more.
        self._opened.callback(self._requests.close, 0)
        self._events: AsyncMessageReceiver[EngineEvent] = AsyncMessageReceiver(
            endpoint(base, RESPONSE_ENDPOINT), EngineEvent, bind=True
        )
        self._opened.callback(self._events.close)
        self._lora_queue = LoRAQueue(base)
        self._opened.push_async_callback(self._lora_queue.close)
        return ChildProcess(self._module, self._first_line(base), process_environment(self._engine.num_threads))

    def _first_line(self, base: str) -> bytes:
        return msgspec.json.encode(
            {
                "zmq_endpoint_base": base,
                "engine": self._engine.model_dump(mode="json"),
                "lora": self._lora_config.model_dump(mode="json"),
            }
        )

    async def _wait_ready(self, child: ChildProcess, timeout_s: float) -> EngineReady:
        start = time.monotonic()
        while True:
            elapsed = time.monotonic() - start
            if elapsed >= timeout_s:
                raise EngineDead(
                    f"the engine process was not ready after {timeout_s:g} s; raise start_timeout_s if the model "
                    f"{self._engine.model} is slow to load"
                )
            wait_s = min(PROGRESS_EVERY_S, timeout_s - elapsed)
            await _first_done(self._ready, self._ended, timeout_s=wait_s)
            elapsed = time.monotonic() - start
            if self._ready.done():
                logger.info("engine process %d is ready after %.1f s", child.pid, elapsed)
                return self._ready.result()
            self.check_healthy()
            if elapsed < timeout_s:
                model = self._engine.model
                logger.info("engine process %d is loading %s: %.0f of %g s", child.pid, model, elapsed, timeout_s)

    async def _read_events(self) -> None:
        while True:
            event = await self._events.recv()
            self._heard()
            match event:
                case StepOutput():
                    self.status = event
                    for delta in event.deltas:
                        self._open_streams.progressed(delta.request_id)
                        stream = self._streams.get(delta.request_id)
                        if stream is not None:
                            stream.feed(delta)
                            if delta.finish_reason is not None:
                                del self._streams[delta.request_id]
                        if delta.finish_reason is not None:
                            self._open_streams.closed(delta.request_id)
                case Residency():
                    self.residency = event.over(self.residency) or self.residency
                    _tell(self._on_residency, self.residency)
                case Workload():
                    self.workload = event
                    _tell(self._on_workload, event)
                case EngineReady():
                    self._ready.set_result(event)
                case EngineFailed():
                    self._end(_failure(event.reason))

    async def _watch_exit(self, child: ChildProcess) -> None:
        code = await asyncio.shield(child.exited)
        if code > 0:
            # It ended by itself, and may have said why: that message can still be on its way.
            await asyncio.wait({self._ended}, timeout=0.5)
        self._end(EngineDead(f"engine process {child.pid} {child.exit_reason()}"))
        # Nobody will connect any more, and this process may be killed before it is told to close.
        if self._folder is not None:
            self._folder.remove()

    async def _watch_silence(self, child: ChildProcess) -> None:
        # Counted in ticks of this loop: when the loop itself is held up, the child is not to blame.
        while not self._ended.done():
            await asyncio.sleep(TICK_S)
            self._silent_s += TICK_S
            self._open_streams.tick(TICK_S)
            if self._ready.done() and not self._stalled and self._silent_s > self._stall_timeout_s:
                self._stalled = True
                logger.error("%s; its stack follows if it can still be written", self._stall_error())
                child.signal(signal.SIGUSR1)
                # Should it go on after all, nobody reads these answers.
                for request_id in list(self._streams):
                    self._requests.send(AbortRequest(request_id))
                self._fail_streams(self._stall_error())

    def _heard(self) -> None:
        self._silent_s = 0.0
        if self._stalled:
            self._stalled = False
            logger.warning("the engine process makes progress again")

    def _stall_error(self) -> EngineDead:
        return EngineDead(f"engine process {self.pid} has been silent for more than {self._stall_timeout_s:g} s")

    def _abandon(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._open_streams.closed(request_id)
        if self._fault is None:
            self._requests.send(AbortRequest(request_id))

    def _end(self, fault: LoRAFleetError) -> None:
        """Take no more requests, and fail those under way; the first reason given stands."""
        if self._fault is None:
            self._fault = fault
            if not self._closed:
                logger.error("%s", fault)
            self._ended.set_result(None)
            self._fail_streams(fault)

    def _fail_streams(self, fault: LoRAFleetError) -> None:
        for stream in list(self._streams.values()):
            stream.fail(_copy(fault))
        self._streams.clear()
        self._open_streams.clear()

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)
            self._end(EngineDead(f"{task.get_name()} failed: {type(error).__name__}: {error}"))


def _tell(listener: Callable[[T], None] | None, event: T) -> None:
    if listener is None:
        return
    try:
        listener(event)
    except Exception:
        logger.exception("%s was not taken", type(event).__name__)


async def _first_done(*futures: "asyncio.Future[Any]", timeout_s: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _copy(fault: LoRAFleetError) -> LoRAFleetError:
    """One for each who raises it: an exception gathers the traceback of everyone who does."""
    return type(fault)(str(fault))


def _failure(reason: str) -> LoRAFleetError:
    """What the engine process died of. Its reason begins with the exception's name: faults of the configuration keep
    their type, so that they can be told from accidents."""
    name, _, sentence = reason.partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, ConfigError):
        return kind(sentence)
    return EngineDead(f"the engine process failed: {reason}")
