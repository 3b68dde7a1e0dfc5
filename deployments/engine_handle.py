"""Calls to the engine replicas: routed by adapter, cancelled when dropped, retried while nothing has been lost."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.admission import LONGEST_RETRY_S, SHORTEST_RETRY_S, Admission, Place
from cluster.fleet import ROUTER_ACTOR
from cluster.schema import QueueSettings
from deployments.fleet_view import FleetView
from deployments.generation import GenerateCall, GenerateChunk, Refusal, SlotSnapshot
from deployments.queue_metrics import QueueMetrics
from deployments.ray_internals import call_on_loop, deployment_actors, request_router_of, starts_on_demand
from deployments.request_metrics import RequestMetrics
from deployments.request_router import EXACT_REPLICA
from deployments.request_spans import traced_attempt
from lora_core.errors import (
    AdapterLate,
    AdapterLost,
    EngineDead,
    EngineError,
    EngineUnavailable,
    NoReplica,
    QueueFull,
)

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

RETRY_FOR_S = 60.0
"""How long a call is offered again after its first failure: longer than a replica's replacement takes."""

MAX_DEATHS = 3
"""Replicas that may die under one call before it is taken for the cause."""

MAX_LOSSES = 4
"""Tries that may end at a replica without the adapter. Their pauses outlast what a handle's table takes to tell which
replicas those are, so that the call meets one that has it, if there is one."""


SHOWN_EVERY_S = 1.0
"""How often the length of the queue is shown while there is one."""

ASKED_EVERY_S = 2.0
"""Serve is asked no more often than this whether it starts replicas on demand: anybody may ask for /health."""


class EngineHandle:
    """The engine deployment as the ingress sees it.

    Args:
        handle: Serve's.
        queue: How many calls may wait for their first token, and how long.
        tracer: Makes the spans of calls; unset: there are none.
    """

    def __init__(
        self, handle: DeploymentHandle, queue: QueueSettings | None = None, tracer: "Tracer | None" = None
    ) -> None:
        self._handle = handle
        self._tracer = tracer
        self._queue = queue = queue or QueueSettings()
        self._metrics = QueueMetrics()
        self._requests = RequestMetrics()
        self._admission = Admission(queue.max_waiting, queue.max_waiting_per_adapter)
        self._showing: asyncio.TimerHandle | None = None
        self._on_demand, self._on_demand_until = False, 0.0

    async def router_name(self) -> str:
        """Ray name of the router actor. Where there are those of two versions, it is the one of a replica that answers.

        Raises:
            EngineError: there is none now.
        """
        names = await deployment_actors(self._handle, ROUTER_ACTOR)
        if not names:
            raise EngineError("no router actor is there; Serve is about to start one")
        # No replica is asked where that is not needed: there may be none, and to wait for one would have it started.
        return names[0] if len(names) == 1 else str(await self._handle.router_name.remote())

    async def starts_on_demand(self) -> bool:
        """Whether the fleet may be without any replica, and the next request starts one."""
        now = time.monotonic()
        if now >= self._on_demand_until:
            try:
                # Its controller may be about to start anew.
                self._on_demand = await asyncio.wait_for(starts_on_demand(self._handle), ASKED_EVERY_S)
            except Exception as error:
                logger.warning(
                    "Serve does not say how many replicas there should be: %s: %s", type(error).__name__, error
                )
                self._on_demand = False
            self._on_demand_until = now + ASKED_EVERY_S
        return self._on_demand

    async def wake(self) -> None:
        """Where the next request would start a replica, be that request. Raises NoReplica where none comes in time."""
        if await self.starts_on_demand():
            await self._handle.router_name.remote()

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk, None]:
        """Stream the answer to `call` from the replica best placed for its adapter.

        A replica that dies before the first chunk, or that alone does not have the adapter, costs nothing but time: the
        call goes to another one. After it, tokens have been seen, and the fault is the caller's to report.

        Raises:
            EngineDead: the replica died in the middle of the answer, or no other one could take the call.
            AdapterLost: no replica that was tried has the adapter.
            TryLater: as many calls wait as may, the adapter could not be loaded in time, or no replica is there.
            LoRAFleetError: whatever the replica refused the call with.
        """
        retries = _Retries(call.request_id)
        with self._enter(call) as place, self._requests.begin(call.lora_name) as seen:
            while True:
                started = False
                try:
                    async with aclosing(self._attempt(call)) as chunks:
                        async for chunk in chunks:
                            if not started:
                                started = True
                                place.start()
                            seen.take(chunk)
                            yield chunk
                    return
                except (EngineDead, AdapterLost) as error:
                    if started:
                        raise
                    await retries.wait(error)

    async def collect(self, call: GenerateCall) -> list[GenerateChunk]:
        """The whole answer to `call`, in few chunks. Nobody has seen a part of it, so a replica's death at any point
        costs only time.

        Raises:
            EngineDead: no replica could finish it.
            AdapterLost: no replica that was tried has the adapter.
            TryLater: as for `generate`.
            LoRAFleetError: whatever the replica refused the call with.
        """
        retries = _Retries(call.request_id)
        call = msgspec.structs.replace(call, streamed=False)
        with self._enter(call) as place, self._requests.begin(call.lora_name) as seen:
            while True:
                answer: list[GenerateChunk] = []
                seen.restart()
                try:
                    async for chunk in self._attempt(call):
                        place.start()
                        seen.take(chunk)
                        answer.append(chunk)
                    return answer
                except (EngineDead, AdapterLost) as error:
                    await retries.wait(error)

    def _attempt(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk, None]:
        return traced_attempt(self._tracer, call, self._answer)

    async def _answer(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk, None]:
        options = self._handle.options(stream=True, multiplexed_model_id=call.lora_name or "")
        if call.replica:
            options = options.options(session_id=EXACT_REPLICA + call.replica)
        response = options.generate.remote(call)
        patience = _Patience(call.lora_name, self._queue.cold_wait_s, self._fleet, response)
        finished = False
        try:
            async for chunk in response:
                patience.end()
                if isinstance(chunk, Refusal):
                    raise chunk.error()
                if chunk.snapshot is not None:
                    self._take_snapshot(chunk.snapshot)
                yield chunk
            finished = True
        except RayTaskError as error:
            finished = True
            raise _own_error(error) from None
        except (TaskCancelledError, asyncio.CancelledError):
            # It is this very request that was cancelled: by its client, or because it waited for too long. Between
            # replicas that speak gRPC the one looks like the other.
            if patience.late is not None:
                self._metrics.refused("adapter_late")
                raise patience.late from None
            raise
        except (BackPressureError, NoReplica) as error:
            finished = True
            self._metrics.refused("no_replica" if isinstance(error, NoReplica) else "queue_full")
            raise
        except (RayError, RayServeException) as error:
            # Ray has many words for a dead actor.
            finished = True
            summary = str(error).partition("\n")[0]
            raise EngineDead(f"the replica serving this request is gone ({type(error).__name__}: {summary})") from None
        finally:
            patience.end()
            if not finished:
                response.cancel()

    def _enter(self, call: GenerateCall) -> Place:
        """Have the call wait for its first token, or refuse it."""
        if self._showing is None:
            self._showing = asyncio.get_running_loop().call_later(SHOWN_EVERY_S, self._show_queue)
        try:
            return self._admission.enter(call.lora_name, lambda: self._load_s(call.lora_name))
        except QueueFull:
            self._metrics.refused("queue_full")
            raise

    def _show_queue(self) -> None:
        waiting = self._admission.waiting_by_model()
        self._metrics.set_queued(waiting)
        loop = asyncio.get_running_loop()
        self._showing = loop.call_later(SHOWN_EVERY_S, self._show_queue) if waiting else None

    def _fleet(self) -> FleetView | None:
        """What this process's request router knows; None before its first request."""
        fleet: FleetView | None = getattr(request_router_of(self._handle), "fleet", None)
        return fleet

    def _load_s(self, adapter: str | None) -> float:
        fleet = None if adapter is None else self._fleet()
        return 0.0 if fleet is None or adapter is None else fleet.load_s(adapter)

    def _take_snapshot(self, snapshot: SlotSnapshot) -> None:
        router = request_router_of(self._handle)
        if router is not None and hasattr(router, "take_snapshot"):
            call_on_loop(router, router.take_snapshot, snapshot)


class _Patience:
    """Bounds how long a call waits for its first chunk while its adapter is in no slot anywhere."""

    def __init__(
        self, adapter: str | None, wait_s: float, fleet: Callable[[], FleetView | None], response: Any
    ) -> None:
        self._adapter = adapter
        self._wait_s = wait_s
        self._fleet = fleet
        self._response = response
        self.late: AdapterLate | None = None
        """Why the call was cancelled, if it waited for too long."""
        self._timer: asyncio.TimerHandle | None = None
        if adapter is not None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._expire)

    def end(self) -> None:
        """Wait no longer: the first chunk is there, or the call has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        fleet = self._fleet()
        assert self._adapter is not None, "only adapters are waited for"
        if fleet is None or fleet.is_warm(self._adapter):
            # It waits for its turn, not for its adapter; should the slot be lost again, it goes on waiting.
            self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._expire)
            return
        after_s = min(max(fleet.load_s(self._adapter), SHORTEST_RETRY_S), LONGEST_RETRY_S)
        self.late = AdapterLate(
            f"adapter {self._adapter!r} could not be brought to a slot of any replica within {self._wait_s:g} s "
            "(queue.cold_wait_s); send the request again",
            after_s,
        )
        self._response.cancel()


class _Retries:
    """When a call whose replica died, or lacks its adapter, is tried again, and when no more."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._deaths = 0
        self._losses = 0
        self._failing_since: float | None = None
        self._failed_at = 0.0
        self._pause_s = 0.1

    async def wait(self, error: EngineDead | AdapterLost) -> None:
        """Pause before the next try, longer each time; raises `error` when there is none."""
        now = time.monotonic()
        if self._failing_since is None or now - self._failed_at > RETRY_FOR_S:
            # The first failure, or one after a try that went well for long.
            self._failing_since, self._pause_s = now, 0.1
        self._failed_at = now
        self._losses += isinstance(error, AdapterLost)
        self._deaths += not isinstance(error, EngineUnavailable | AdapterLost)
        if self._deaths >= MAX_DEATHS or self._losses >= MAX_LOSSES or now - self._failing_since > RETRY_FOR_S:
            raise error
        logger.warning("request %s: %s; trying another replica", self._request_id, error)
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, 2.0)


def _own_error(error: RayTaskError) -> BaseException:
    """The exception of this project inside Ray's; one of Ray's own means that the replica could not go on."""
    cause: BaseException = error.cause
    if not isinstance(cause, RayError | RayServeException) or isinstance(cause, BackPressureError):
        return cause
    summary = str(cause).partition("\n")[0]
    return EngineDead(f"the replica serving this request cannot go on ({type(cause).__name__}: {summary})")
