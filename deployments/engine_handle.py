"""Calls to the engine replicas: routed by adapter, cancelled when dropped, retried while nothing has been lost."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.generation import GenerateCall, GenerateChunk, Refusal
from lora_core.errors import AdapterLost, EngineDead, EngineUnavailable

logger = logging.getLogger(__name__)

RETRY_FOR_S = 60.0
"""How long a call is offered again after its first failure: longer than a replica's replacement takes."""

MAX_DEATHS = 3
"""Replicas that may die under one call before it is taken for the cause."""

MAX_LOSSES = 4
"""Tries that may end at a replica without the adapter. Their pauses outlast what a handle's table takes to tell which
replicas those are, so that the call meets one that has it, if there is one."""


class EngineHandle:
    """The engine deployment as the ingress sees it."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def router_name(self) -> str:
        """Ray name of the router actor, as any live replica knows it."""
        name: str = await self._handle.router_name.remote()
        return name

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk, None]:
        """Stream the answer to `call` from the replica best placed for its adapter.

        A replica that dies before the first chunk, or that alone does not have the adapter, costs nothing but time: the
        call goes to another one. After it, tokens have been seen, and the fault is the caller's to report.

        Raises:
            EngineDead: the replica died in the middle of the answer, or no other one could take the call.
            AdapterLost: no replica that was tried has the adapter.
            LoRAFleetError: whatever the replica refused the call with.
        """
        retries = _Retries(call.request_id)
        while True:
            started = False
            try:
                async with aclosing(self._attempt(call)) as chunks:
                    async for chunk in chunks:
                        started = True
                        yield chunk
                return
            except (EngineDead, AdapterLost) as error:
                if started:
                    raise
                await retries.wait(error)

    async def collect(self, call: GenerateCall) -> list[GenerateChunk]:
        """The whole answer to `call`. Nobody has seen a part of it, so a replica's death at any point costs only time.

        Raises:
            EngineDead: no replica could finish it.
            AdapterLost: no replica that was tried has the adapter.
            LoRAFleetError: whatever the replica refused the call with.
        """
        retries = _Retries(call.request_id)
        while True:
            try:
                return [chunk async for chunk in self._attempt(call)]
            except (EngineDead, AdapterLost) as error:
                await retries.wait(error)

    async def _attempt(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk, None]:
        options = self._handle.options(stream=True, multiplexed_model_id=call.lora_name or "")
        response = options.generate.remote(call)
        finished = False
        try:
            async for chunk in response:
                if isinstance(chunk, Refusal):
                    raise chunk.error()
                yield chunk
            finished = True
        except RayTaskError as error:
            finished = True
            raise error.cause from None
        except TaskCancelledError:
            # It is this very request that was cancelled.
            raise
        except (RayError, DeploymentUnavailableError) as error:
            # Ray has many words for a dead actor.
            finished = True
            summary = str(error).partition("\n")[0]
            raise EngineDead(f"the replica serving this request is gone ({type(error).__name__}: {summary})") from None
        finally:
            if not finished:
                response.cancel()


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
