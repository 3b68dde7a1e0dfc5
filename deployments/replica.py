"""`EngineReplica`: one engine behind Ray Serve. Starts it, keeps its adapters in step with the fleet, answers calls."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from ray import serve

from cluster.base_model import locate_base_model
from cluster.fleet import ROUTER_ACTOR
from cluster.schema import AppSettings, parse_settings
from deployments.adapter_follower import AdapterFollower
from deployments.engine_client import EngineClient
from deployments.generation import GenerateCall, GenerateChunk, Refusal, SlotSnapshot
from deployments.generator import Generator
from deployments.leaving import watch_leaving
from deployments.replica_metrics import ReplicaMetrics
from deployments.replica_spans import traced_answer
from deployments.router_client import RouterClient
from deployments.stream_pace import StreamPace
from deployments.text_calls import TextCall, TextTokens, TokensCall
from deployments.tokenization import Tokenization
from deployments.tokenizer import ModelTokenizer
from deployments.tracing import tracer_of
from deployments.watchdog import Watchdog
from lora_core.config import EngineConfig
from lora_core.errors import AdapterError, AdapterLost, InvalidRequest
from lora_core.messages import EngineReady, Residency
from lora_core.types import LoRARequest, LoRAResponse
from lora_core.workload import Workload

logger = logging.getLogger(__name__)

EPOCH_TIMEOUT_S = 10.0
"""Longest wait of a request for an adapter change that it must see."""


class EngineReplica:
    """One engine and its adapters; undecorated, bound by `deployments.app.build`.

    It is ready when its engine is, when it holds the adapters its fellow replicas hold, and when those of them are in
    slots that requests will come for (within `replica.warm_timeout_s`).

    Args:
        settings: `cluster.schema.AppSettings`, as a dict.

    Raises:
        ConfigError: a setting cannot work, or an adapter of `lora_paths` cannot be served.
        EngineDead: the engine process did not start.
    """

    engine_module = "deployments.engine_process"
    """What the engine process runs."""
    router_client: type[RouterClient] = RouterClient
    """How the router actor is reached."""

    # Serve awaits it.
    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]
        self._client: EngineClient | None = None
        self._follower: AdapterFollower | None = None
        self._snapshot: SlotSnapshot | None = None
        self._calls: Counter[str] = Counter()
        self._metrics = ReplicaMetrics()
        app = parse_settings(settings)
        self._tracer = tracer_of(app.tracing, _replica_id())
        model = await asyncio.to_thread(locate_base_model, app.model)
        self._client = client = self._new_client(app, model)
        # Side by side: the engine's start takes a process of its own some seconds.
        tokenizer_task = asyncio.ensure_future(asyncio.to_thread(_load_tokenizer, model))
        try:
            self._ready = await client.start(app.replica.start_timeout_s)
            self._metrics.start(self._ready.num_slots)
            tokenizer = await tokenizer_task
            pace = StreamPace(app.replica.stream_window_s)
            self._generator = Generator(client, self._ready, tokenizer, pace)
            self._texts = Tokenization(tokenizer, self._ready)
            self._follower = await self._join(client, self._ready, app)
            deadlines, follower = app.watchdog.deadlines, self._follower
            self._watchdog = Watchdog(client, deadlines, follower.set_stalled, self._metrics.count_heal)
            self._watching = asyncio.create_task(self._watchdog.run(), name="watchdog")
            self._leaving = asyncio.create_task(watch_leaving(follower.set_leaving), name="watch-leaving")
        except BaseException:
            tokenizer_task.cancel()
            await client.close()
            raise

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk | Refusal, None]:
        """Answer a call, see `Generator.generate`; closing the iterator ends it in the engine.

        A call that can never be served (InvalidRequest, AdapterNotFound after its changes up to `call.epoch`,
        LoRADisabled), or whose adapter is not served by this replica (AdapterLost) or no longer (AdapterUnloaded), is
        answered by a `Refusal`. The first chunk carries this replica's slots as they are then.

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
            answer = traced_answer(self._tracer, call, _replica_id(), self._generator.generate(call))
            with counted(self._calls, call.lora_name):
                async with aclosing(answer) as chunks:
                    is_first = True
                    async for chunk in chunks:
                        yield msgspec.structs.replace(chunk, snapshot=self._slots()) if is_first else chunk
                        is_first = False
        except (InvalidRequest, AdapterError) as error:
            yield Refusal(kind=type(error).__name__, message=str(error))

    async def warm(self, name: str, epoch: int = 0) -> LoRAResponse:
        """Bring an adapter into a slot, if one is to spare, before requests for it come: see `AdapterFollower.warm`.

        Raises:
            RequestTimeout: this replica does not learn of the adapter's changes up to `epoch`.
            EngineDead: the engine ended.
        """
        await self._joined.wait_for(name, epoch, EPOCH_TIMEOUT_S)
        return await self._joined.warm(name)

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
            on_workload=self._on_workload,
            module=self.engine_module,
        )

    async def _join(self, client: EngineClient, ready: EngineReady, app: AppSettings) -> AdapterFollower:
        async def apply(request: LoRARequest) -> LoRAResponse:
            return await client.lora(request, app.router.change_timeout_s)

        follower = AdapterFollower(
            self.router_client(), apply, _replica_id(), ready.num_slots, protect=client.protect_adapters
        )
        # It is told what the engine holds from now on.
        self._follower = follower
        try:
            await follower.join()
            self._on_residency(client.residency)
            if ready.num_slots and app.replica.warm_timeout_s:
                await follower.warm_share(app.replica.warm_timeout_s)
        except BaseException:
            await follower.close()
            raise
        return follower

    def _slots(self) -> SlotSnapshot | None:
        if self._snapshot is None:
            return None
        return msgspec.structs.replace(self._snapshot, num_busy=len(self._calls.keys() | self._joined.pinned))

    def _on_residency(self, residency: Residency) -> None:
        self._metrics.take_residency(residency)
        self._snapshot = SlotSnapshot(
            replica_id=_replica_id(),
            sequence=residency.sequence,
            resident=tuple(ref.name for ref in residency.resident),
            loading=tuple(ref.name for ref in residency.loading),
            num_slots_used=residency.num_slots_used,
        )
        if self._follower is not None:
            self._follower.report(residency)

    def _on_workload(self, workload: Workload) -> None:
        self._metrics.take_work(workload)
        if self._follower is not None:
            self._follower.report_work(workload)


@contextmanager
def counted(counts: Counter[str], name: str | None) -> Iterator[None]:
    """Count a name for as long as this lasts; names that are not counted any more are no keys."""
    if name is None:
        yield
        return
    counts[name] += 1
    try:
        yield
    finally:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]


def _replica_id() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


def _load_tokenizer(model: Path) -> ModelTokenizer | None:
    if ModelTokenizer.exists(model):
        return ModelTokenizer(model)
    logger.warning("%s has no tokenizer: only prompts of token ids can be answered", model)
    return None
