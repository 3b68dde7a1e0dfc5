"""Calls to the engine replicas: routed by adapter, cancelled when dropped, retried while nothing has been lost."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.generation import GenerateCall, GenerateChunk
from lora_core.errors import EngineDead

logger = logging.getLogger(__name__)

RETRY_FOR_S = 60.0
"""How long a request that has produced nothing yet is offered to other replicas: longer than a replacement takes."""


class EngineHandle:
    """The engine deployment as the ingress sees it."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def router_name(self) -> str:
        """Ray name of the router actor, as any live replica knows it."""
        name: str = await self._handle.router_name.remote()
        return name

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateChunk]:
        """Stream the answer to `call` from the replica best placed for its adapter.

        A replica that dies before the first chunk costs nothing but time: the call goes to another one. After it,
        tokens have been seen, and the fault is the caller's to report.

        Raises:
            EngineDead: the replica died in the middle of the answer, or none could take it within `RETRY_FOR_S`.
            LoRAFleetError: whatever the replica refused the call with.
        """
        async for _ in self._tries(call):
            started = False
            try:
                async for chunk in self._attempt(call):
                    started = True
                    yield chunk
                return
            except EngineDead:
                if started:
                    raise

    async def collect(self, call: GenerateCall) -> list[GenerateChunk]:
        """The whole answer to `call`. Nobody has seen a part of it, so a replica's death at any point costs only time.

        Raises:
            EngineDead: no replica could finish it within `RETRY_FOR_S`.
            LoRAFleetError: whatever the replica refused the call with.
        """
        async for _ in self._tries(call):
            with suppress(EngineDead):
                return [chunk async for chunk in self._attempt(call)]
        raise AssertionError("the last try raises")

    async def _tries(self, call: GenerateCall) -> AsyncIterator[None]:
        """Yield once per try, further and further apart, then raise EngineDead."""
        deadline = time.monotonic() + RETRY_FOR_S
        pause_s = 0.1
        while time.monotonic() < deadline:
            yield
            logger.warning("request %s: its replica died; trying another", call.request_id)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)
        raise EngineDead(f"no replica could answer within {RETRY_FOR_S:.0f} s; see /health")

    async def _attempt(self, call: GenerateCall) -> AsyncIterator[GenerateChunk]:
        options = self._handle.options(stream=True, multiplexed_model_id=call.lora_name or "")
        response = options.generate.remote(call)
        finished = False
        try:
            async for chunk in response:
                yield chunk
            finished = True
        except RayTaskError as error:
            finished = True
            raise error.cause from None
        except (RayActorError, DeploymentUnavailableError) as error:
            finished = True
            summary = str(error).partition("\n")[0]
            raise EngineDead(f"the replica serving this request is gone ({type(error).__name__}: {summary})") from None
        finally:
            if not finished:
                response.cancel()
