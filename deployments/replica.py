"""`EngineReplica`: one engine behind Ray Serve. Starts it, keeps its adapters in step with the fleet, answers calls."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ray import serve

from cluster.base_model import locate_base_model
from cluster.fleet import ROUTER_ACTOR
from cluster.schema import AppSettings, parse_settings
from deployments.adapter_follower import AdapterFollower
from deployments.engine_client import EngineClient
from deployments.generation import GenerateCall, GenerateChunk, Refusal
from deployments.generator import Generator
from deployments.router_client import RouterClient
from deployments.text_calls import TextCall, TextTokens, TokensCall
from deployments.tokenization import Tokenization
from deployments.tokenizer import ModelTokenizer
from lora_core.config import EngineConfig
from lora_core.errors import AdapterError, AdapterLost, InvalidRequest
from lora_core.messages import EngineReady, Residency
from lora_core.types import LoRARequest, LoRAResponse

logger = logging.getLogger(__name__)

EPOCH_TIMEOUT_S = 10.0
"""Longest wait of a request for an adapter change that it must see."""


class EngineReplica:
    """One engine and its adapters; undecorated, bound by `deployments.app.build`.

    It is ready when its engine is, and when it holds the adapters its fellow replicas hold.

    Args:
        settings: `cluster.schema.AppSettings`, as a dict.

    Raises:
        ConfigError: a setting cannot work, or an adapter of `lora_paths` cannot be served.
        EngineDead: the engine process did not start.
    """

    # Serve awaits it.
    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]
        self._client: EngineClient | None = None
        self._follower: AdapterFollower | None = None
        app = parse_settings(settings)
        model = await asyncio.to_thread(locate_base_model, app.model)
        self._client = client = self._new_client(app, model)
        # Side by side: the engine's start takes a process of its own some seconds.
        tokenizer_task = asyncio.ensure_future(asyncio.to_thread(_load_tokenizer, model))
        try:
            self._ready = await client.start(app.replica.start_timeout_s)
            tokenizer = await tokenizer_task
            self._generator = Generator(client, self._ready, tokenizer)
            self._texts = Tokenization(tokenizer, self._ready)
            self._follower = await self._join(client, self._ready, app.router.change_timeout_s)
        except BaseException:
            tokenizer_task.cancel()
            await client.close()
            raise

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk | Refusal, None]:
        """Answer a call, see `Generator.generate`; closing the iterator ends it in the engine.

        A call that can never be served (InvalidRequest, AdapterNotFound after its changes up to `call.epoch`,
        LoRADisabled), or whose adapter is not served by this replica (AdapterLost) or no longer (AdapterUnloaded), is
        answered by a `Refusal`.

        Raises:
            RequestTimeout: this replica does not learn of the changes the call needs.
            EngineDead: the engine ended, or no longer makes progress.
        """
        if call.lora_name is not None:
            await self._joined.wait_for(call.lora_name, call.epoch, EPOCH_TIMEOUT_S)
            reason = self._joined.refusal(call.lora_name)
            if reason is not None:
                message = f"replica {_replica_id()} does not serve adapter {call.lora_name!r}: {reason}"
                yield Refusal(kind=AdapterLost.__name__, message=message)
                return
        try:
            async with aclosing(self._generator.generate(call)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (InvalidRequest, AdapterError) as error:
            yield Refusal(kind=type(error).__name__, message=str(error))

    async def tokenize(self, call: TextCall) -> TextTokens | Refusal:
        """The tokens of a text or chat, or why there are none."""
        try:
            return await self._texts.tokenize(call)
        except InvalidRequest as error:
            return Refusal(kind=type(error).__name__, message=str(error))

    async def detokenize(self, call: TokensCall) -> str | Refusal:
        """The text of tokens, or why there is none."""
        try:
            return await self._texts.detokenize(call)
        except InvalidRequest as error:
            return Refusal(kind=type(error).__name__, message=str(error))

    async def router_name(self) -> str:
        """Ray name of the router actor."""
        return self._joined.router_name

    async def check_health(self) -> None:
        """Called by Serve; raises EngineDead when this replica must be replaced."""
        if self._client is not None:
            self._client.check_healthy()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Called by Serve when the replica is ready; handles' routers read it."""
        return {
            ROUTER_ACTOR: self._joined.router_name,
            "replica_id": _replica_id(),
            "num_slots": self._ready.num_slots,
        }

    def __del__(self) -> None:
        # Called by Serve after the last request has ended. The engine has nothing to save.
        client = getattr(self, "_client", None)
        if client is not None:
            client.kill()

    @property
    def _joined(self) -> AdapterFollower:
        assert self._follower is not None, "Serve calls only replicas that have started"
        return self._follower

    def _new_client(self, app: AppSettings, model: Path) -> EngineClient:
        return EngineClient(
            EngineConfig(model=model, **app.engine.model_dump()),
            # The router actor has them loaded, under generations that are the same in the whole fleet.
            app.lora_config.model_copy(update={"lora_paths": ()}),
            stall_timeout_s=app.replica.stall_timeout_s,
            on_residency=self._on_residency,
        )

    async def _join(self, client: EngineClient, ready: EngineReady, change_timeout_s: float) -> AdapterFollower:
        async def apply(request: LoRARequest) -> LoRAResponse:
            return await client.lora(request, change_timeout_s)

        follower = AdapterFollower(RouterClient(), apply, _replica_id(), ready.num_slots)
        try:
            await follower.join()
        except BaseException:
            await follower.close()
            raise
        follower.report(client.residency)
        return follower

    def _on_residency(self, residency: Residency) -> None:
        if self._follower is not None:
            self._follower.report(residency)


def _replica_id() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


def _load_tokenizer(model: Path) -> ModelTokenizer | None:
    if ModelTokenizer.exists(model):
        return ModelTokenizer(model)
    logger.warning("%s has no tokenizer: only prompts of token ids can be answered", model)
    return None
