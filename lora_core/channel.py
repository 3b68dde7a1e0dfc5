"""The channel between a replica and its engine process.

Addresses are a base, shared by both processes, and a suffix per link (`lora_core.links`):

    {base}-request        generation requests and aborts, to the engine
    {base}-response       tokens, residency, heartbeats, to the replica
    {base}-lora_request   (request id, LoRARequest), to the engine
    {base}-lora_response  (request id, LoRAResponse), to the replica
"""

import asyncio
import collections
import contextlib
import logging
import queue
import uuid
from typing import Protocol

from lora_core.errors import ConfigError, EngineDead, RequestTimeout
from lora_core.links import AsyncMessageReceiver, MessageReceiver, MessageSender, endpoint
from lora_core.places import Places
from lora_core.types import (
    LORA_REQUEST_ENDPOINT,
    LORA_RESPONSE_ENDPOINT,
    LoRAOperation,
    LoRARequest,
    LoRAResponse,
    LoRAStatus,
)
from lora_core.workers import Workers

__all__ = [
    "REQUEST_ENDPOINT",
    "RESPONSE_ENDPOINT",
    "AdapterOperations",
    "AsyncMessageReceiver",
    "LoRAQueue",
    "LoRARequestProcessor",
    "MessageReceiver",
    "MessageSender",
    "endpoint",
]

REQUEST_ENDPOINT = "request"
RESPONSE_ENDPOINT = "response"

logger = logging.getLogger(__name__)

NUM_LOADERS = 3
"""Adapters fetched or read at a time, those not counted that take long: a slow download holds up no other adapter."""

_CLOSE_WAIT_S = 5.0


class LoRAQueue:
    """The asking side of LoRA operations, in the replica: each caller gets the answer to its own request."""

    def __init__(self, zmq_endpoint_base: str) -> None:
        """Bind both links, on the running asyncio loop.

        Raises:
            ConfigError: an address cannot be opened.
        """
        self._sender = MessageSender(endpoint(zmq_endpoint_base, LORA_REQUEST_ENDPOINT), bind=True)
        try:
            self._receiver: AsyncMessageReceiver[tuple[str, LoRAResponse]] = AsyncMessageReceiver(
                endpoint(zmq_endpoint_base, LORA_RESPONSE_ENDPOINT), tuple[str, LoRAResponse], bind=True
            )
        except ConfigError:
            self._sender.close(0)
            raise
        self._pending: dict[str, asyncio.Future[LoRAResponse]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._closed = False

    async def submit(self, request: LoRARequest, timeout_s: float) -> LoRAResponse:
        """Ask the engine, and wait for its answer to this request.

        The operation is not undone by a timeout: it may still take effect, and its late answer is dropped.

        Raises:
            RequestTimeout: no answer came within `timeout_s`.
            EngineDead: the queue is, or gets, closed.
        """
        if self._closed:
            raise EngineDead("the LoRA channel is closed; the engine is shut down")
        if self._reader is None:
            self._reader = asyncio.create_task(self._read_responses())
        request_id = uuid.uuid4().hex
        answer = self._pending[request_id] = asyncio.get_running_loop().create_future()
        try:
            self._sender.send((request_id, request))
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            raise RequestTimeout(
                f"the engine did not answer the {request.operation.value} of LoRA adapter {request.lora_name!r} within "
                f"{timeout_s:g} s; it may still take effect, ask for the list of adapters before trying again"
            ) from None
        finally:
            del self._pending[request_id]

    async def close(self) -> None:
        """Close both links; callers still waiting get `EngineDead`. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(EngineDead("the LoRA channel was closed before the engine answered"))
        self._sender.close(0)
        self._receiver.close()

    async def _read_responses(self) -> None:
        while True:
            request_id, response = await self._receiver.recv()
            answer = self._pending.get(request_id)
            if answer is None or answer.done():
                logger.info("A late answer is dropped: %s", response.message)
            else:
                answer.set_result(response)


class AdapterOperations(Protocol):
    """What `LoRARequestProcessor` needs of the manager; every failure is answered with a status."""

    def load_adapter(
        self, spec: str, *, generation: int | None, replace: bool, content_hash: str | None
    ) -> LoRAResponse:
        """Load `name=path`; called from loader threads."""
        ...

    def unload_adapter(self, name: str) -> LoRAResponse:
        """Unload a name, at once; called, as those below are, from the thread that polls."""
        ...

    def pin_adapter(self, name: str) -> LoRAResponse: ...
    def unpin_adapter(self, name: str) -> LoRAResponse: ...
    def warm_adapter(self, name: str) -> LoRAResponse: ...


class _Operation:
    """One operation to run, and the ids of the requests it answers."""

    def __init__(self, request_id: str, request: LoRARequest) -> None:
        self.request_ids = [request_id]
        self.request = request


class LoRARequestProcessor:
    """The answering side of LoRA operations, in the engine process.

    Operations on one name run in the order they came. Loads are fetched, read and checked by a few loader threads, and
    by more while some are slow, so that those hold up no other adapter for long. The thread that polls goes on with its
    steps, runs the other operations between them, and sends the answers. A load that comes while the same name is being
    loaded, and asks for the same in every field, shares that load and its answer.
    """

    def __init__(self, manager: AdapterOperations, zmq_endpoint_base: str) -> None:
        """Connect both links.

        Raises:
            ConfigError: an address cannot be opened.
        """
        self._manager = manager
        self._receiver: MessageReceiver[tuple[str, LoRARequest]] = MessageReceiver(
            endpoint(zmq_endpoint_base, LORA_REQUEST_ENDPOINT), tuple[str, LoRARequest], bind=False
        )
        try:
            self._sender = MessageSender(endpoint(zmq_endpoint_base, LORA_RESPONSE_ENDPOINT), bind=False)
        except ConfigError:
            self._receiver.close()
            raise
        # The head of each name's queue is running; the others wait for it.
        self._by_name: dict[str, collections.deque[_Operation]] = {}
        self._to_load: queue.SimpleQueue[_Operation] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[tuple[_Operation, LoRAResponse]] = queue.SimpleQueue()
        self._loaders = Workers("lora-loader", Places(NUM_LOADERS), self._next_load, self._load)
        self._is_closed = False

    def process_lora_requests(self) -> bool:
        """Take new requests and finish what can be finished, without waiting.

        Returns:
            Whether anything was taken or finished.
        """
        did_something = False
        for request_id, request in self._receiver.poll(0):
            self._take(request_id, request)
            did_something = True
        self._loaders.start()
        while True:
            try:
                operation, response = self._loaded.get_nowait()
            except queue.Empty:
                return did_something
            self._finish(operation, response)
            did_something = True

    def close(self) -> None:
        """Begin no more loads, wait for those in progress, and close both links. Safe to call again.

        Loads that take seconds longer are left behind; operations not yet answered never are.
        """
        self._is_closed = True
        self._loaders.join(_CLOSE_WAIT_S)
        self._sender.close()
        self._receiver.close()

    def _take(self, request_id: str, request: LoRARequest) -> None:
        refusal = _refuse(request)
        if refusal is not None:
            self._sender.send((request_id, refusal))
            return
        waiting = self._by_name.setdefault(request.lora_name, collections.deque())
        if waiting and _is_same_load(waiting[-1].request, request):
            waiting[-1].request_ids.append(request_id)
            return
        waiting.append(_Operation(request_id, request))
        if len(waiting) == 1:
            self._run(waiting[0])

    def _run(self, operation: _Operation) -> None:
        if operation.request.operation is LoRAOperation.LOAD:
            self._to_load.put(operation)
        else:
            self._loaded.put((operation, self._change(operation.request)))

    def _finish(self, operation: _Operation, response: LoRAResponse) -> None:
        for request_id in operation.request_ids:
            self._sender.send((request_id, response))
        name = operation.request.lora_name
        waiting = self._by_name[name]
        waiting.popleft()
        if waiting:
            self._run(waiting[0])
        else:
            del self._by_name[name]

    def _next_load(self) -> _Operation | None:
        if self._is_closed:
            return None
        with contextlib.suppress(queue.Empty):
            return self._to_load.get_nowait()
        return None

    def _load(self, operation: _Operation) -> None:
        request = operation.request
        spec = request.lora_name if request.lora_path is None else f"{request.lora_name}={request.lora_path}"
        try:
            response = self._manager.load_adapter(
                spec, generation=request.generation, replace=request.replace, content_hash=request.content_hash
            )
        except Exception as error:
            response = _unforeseen(request, error)
        self._loaded.put((operation, response))

    def _change(self, request: LoRARequest) -> LoRAResponse:
        """Run an operation that takes no time."""
        changes = {
            LoRAOperation.UNLOAD: self._manager.unload_adapter,
            LoRAOperation.PIN: self._manager.pin_adapter,
            LoRAOperation.UNPIN: self._manager.unpin_adapter,
            LoRAOperation.WARM: self._manager.warm_adapter,
        }
        try:
            return changes[request.operation](request.lora_name)
        except Exception as error:
            return _unforeseen(request, error)


def _is_same_load(earlier: LoRARequest, request: LoRARequest) -> bool:
    return request.operation is LoRAOperation.LOAD and earlier == request


def _refuse(request: LoRARequest) -> LoRAResponse | None:
    """An answer to a request that cannot be put to the manager."""
    if request.lora_name and "=" not in request.lora_name:
        return None
    status = {
        LoRAOperation.LOAD: LoRAStatus.LOAD_INVALID_ADAPTER,
        LoRAOperation.UNLOAD: LoRAStatus.UNLOAD_NAME_NONEXISTENT,
        LoRAOperation.PIN: LoRAStatus.PIN_NAME_NONEXISTENT,
        LoRAOperation.UNPIN: LoRAStatus.PIN_NAME_NONEXISTENT,
        LoRAOperation.WARM: LoRAStatus.PIN_NAME_NONEXISTENT,
    }[request.operation]
    return LoRAResponse(status, f"LoRA adapter name {request.lora_name!r} is not a name; expected one without '='")


def _unforeseen(request: LoRARequest, error: Exception) -> LoRAResponse:
    what = f"{request.operation.value} of LoRA adapter {request.lora_name!r}"
    logger.error("The %s failed unexpectedly", what, exc_info=error)
    return LoRAResponse(LoRAStatus.UNSPECIFIED_ERROR, f"the {what} failed unexpectedly: {type(error).__name__}")
