"""`Ingress`: the application's front door, for HTTP (`deployments.http_api`) and for handle calls alike."""

import logging
import os
import platform
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from pydantic import ValidationError
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.access import AccessSettings
from cluster.entry import AdapterEntry
from cluster.fleet import Alias, AliasInFleet, FleetTable, LoadOutcome
from cluster.quotas import TenantQuotas
from cluster.schema import QueueSettings, TracingSettings
from cluster.status import AdapterReport, FleetReport, Page
from deployments import exact_replica, request_id
from deployments.adapter_card import status_body
from deployments.answer import Answer
from deployments.caller_context import current_caller
from deployments.directory import ModelDirectory
from deployments.engine_handle import EngineHandle
from deployments.fleet_api import fleet_routes
from deployments.fleet_feed import FleetFeed, fleet_events
from deployments.fleet_page import add_fleet_page
from deployments.fleet_status import MOST_ADAPTERS, FleetStatus
from deployments.gate import Gate
from deployments.generation import GenerateCall, GenerateChunk
from deployments.http_api import http_app
from deployments.http_errors import STATUS_ERRORS, describe_validation
from deployments.key_store import KeyStore
from deployments.metrics_api import metrics_routes
from deployments.node_metrics import NodeMetrics
from deployments.openai_api import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    TextRequest,
    TokensRequest,
    model_card,
    tokens_body,
)
from deployments.prompt_batch import collect_all, stream_all
from deployments.request_spans import TracedRequests
from deployments.tenant_service import as_tenants_see
from deployments.text_calls import TokensCall
from deployments.tokenizer_handle import TokenizerHandle
from deployments.tracing import tracer_of
from lora_core.errors import InvalidRequest, LoRADisabled, LoRAFleetError
from lora_core.types import LoRAStatus

logger = logging.getLogger(__name__)


class BaseModelCard(NamedTuple):
    """How the base model appears in GET /v1/models."""

    name: str
    root: str
    """Where its weights come from."""
    created: int
    """Unix time."""


class Ingress:
    """Answers OpenAI-style bodies and changes what the fleet serves; undecorated, bound by `deployments.app.build`.

    Another actor calls it through `serve.get_app_handle(...)`: `complete` and `stream` take the bodies of
    POST /v1/chat/completions and /v1/completions as dicts; `load_adapter`, `unload_adapter`, `pin_adapter` and
    `unpin_adapter` the fields of their routes.

    Args:
        engine: Handle of the engine deployment.
        base: The base model's card.
        enable_lora: Whether adapters are served.
        queue: How many requests may wait, and how long.
        access: Its keys and tenants; unset: none.
        tracing: Where traces go; unset: nowhere.
    """

    def __init__(
        self,
        engine: DeploymentHandle,
        base: BaseModelCard,
        *,
        enable_lora: bool,
        queue: QueueSettings | None = None,
        access: AccessSettings | None = None,
        tracing: TracingSettings | None = None,
    ) -> None:
        self._tracer = tracer_of(tracing or TracingSettings(), f"ingress-{platform.node()}-{os.getpid()}")
        self._engine = EngineHandle(engine, queue, self._tracer)
        self._tokenizer = TokenizerHandle(engine)
        self._base = base
        self._enable_lora = enable_lora
        self._access = access or AccessSettings()
        self._keys = KeyStore(self._access)
        if self._keys.is_empty:
            logger.warning(
                "no keys: only this machine is answered, and whoever is on it may do everything; access.keys_file or "
                "the variable %s gives it keys",
                self._access.keys_variable,
            )
        self._directory = ModelDirectory(base.name, self._engine.router_name)
        self._directory.start()
        self._status = FleetStatus(self._directory.router)
        self._feed = FleetFeed(self._status.picture)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once the replica is constructed."""
        # Unset while the number of ingress replicas is Serve's to choose.
        quotas = TenantQuotas(self._access.tenants, num_sharing=lambda: serve.get_replica_context().world_size or 1)
        app = http_app(as_tenants_see(self, self._base.name, self._access, quotas))
        app.include_router(fleet_routes(self))
        app.include_router(metrics_routes(NodeMetrics(self._base.name).page))
        add_fleet_page(app, lambda: fleet_events(self._feed))
        # Outside of all routes, also of those that come later.
        app.add_middleware(Gate, keys=self._keys, quotas=quotas, max_body_bytes=self._access.max_body_bytes)
        if self._tracer is not None:
            app.add_middleware(TracedRequests, tracer=self._tracer)
        return app

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a chat (it has `messages`) or completion body in one object.

        Raises:
            InvalidRequest: the body is wrong.
            AdapterNotFound: no such model.
            EngineError: no replica could answer.
        """
        request = parse_body(body)
        return Answer(request).whole(await self.collect(request))

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Answer a chat or completion body as OpenAI-style chunks; raises as `complete` does."""
        request = parse_body({**body, "stream": True})
        async with aclosing(self.pieces(request)) as pieces:
            async for chunk in Answer(request).chunks(pieces):
                yield chunk

    async def load_adapter(
        self, lora_name: str, lora_path: str, load_inplace: bool = False, path_is_final: bool = False
    ) -> LoadOutcome:
        """Load an adapter on every replica; returns when all live ones have it.

        Or, with status PARTIAL, when some have it, and the others, named in `behind`, could not get it for reasons of
        their own: they are asked again.

        With `load_inplace` it takes the place of the adapter of this name, if there is one: requests in flight finish
        on the old weights, later ones get the new, and content that is served already changes nothing. With
        `path_is_final` no link in the path is followed any more.

        Raises:
            AdapterNameTaken, InvalidAdapterPath, InvalidAdapter: why it was refused; what was served before still is,
                and nothing else stays registered.
            LoRADisabled: the server runs without adapters.
            EngineError: no replica is there, or one did not answer in time; nothing was changed.
            NoReplica: none is there, and the one started for this did not come in time.
        """
        self._check_enabled()
        if not await self.num_replicas():
            # It takes one to say whether an adapter can be served.
            await self._engine.wake()
        return await self._changed(await self._directory.router.load(lora_name, lora_path, load_inplace, path_is_final))

    async def unload_adapter(self, lora_name: str) -> LoadOutcome:
        """Stop serving an adapter; requests already accepted finish. Raises AdapterNotFound, LoRADisabled."""
        self._check_enabled()
        return await self._changed(await self._directory.router.unload(lora_name))

    async def pin_adapter(self, lora_name: str) -> LoadOutcome:
        """Keep an adapter in a slot of every replica, those that start later included.

        Raises:
            AdapterNotFound: no such adapter.
            AdapterError: too many are pinned; both numbers are named.
            LoRADisabled: the server runs without adapters.
            EngineError: no replica serves it, or one did not answer in time.
        """
        self._check_enabled()
        return await self._changed(await self._directory.router.pin(lora_name))

    async def unpin_adapter(self, lora_name: str) -> LoadOutcome:
        """Let an adapter's slot be taken again. Raises AdapterNotFound, LoRADisabled, EngineError."""
        self._check_enabled()
        return await self._changed(await self._directory.router.unpin(lora_name))

    async def set_alias(self, alias: str, targets: dict[str, float]) -> Alias:
        """Have a name stand for weighted adapters (name -> weight, on any scale), in one step.

        Raises:
            InvalidRequest: a name, a weight or a target cannot be; the numbers are named.
            AdapterNameTaken: an adapter, or the base model, has the name.
            LoRADisabled: the server runs without adapters.
        """
        self._check_enabled()
        moved = await self._directory.router.set_alias(alias, targets)
        await self._directory.refresh()
        return moved

    async def roll_back_alias(self, alias: str) -> Alias:
        """Have an alias stand for what it stood for before its last move. Raises AdapterNotFound, InvalidRequest,
        LoRADisabled."""
        self._check_enabled()
        moved = await self._directory.router.roll_back_alias(alias)
        await self._directory.refresh()
        return moved

    async def remove_alias(self, alias: str) -> int:
        """Forget an alias; returns the epoch. Raises AdapterNotFound, LoRADisabled."""
        self._check_enabled()
        epoch = await self._directory.router.remove_alias(alias)
        await self._directory.refresh()
        return epoch

    async def aliases(self) -> list[AliasInFleet]:
        """All aliases, each with what it stood for before."""
        return await self._directory.router.aliases()

    async def set_min_copies(self, lora_name: str, min_copies: int) -> AdapterEntry:
        """Have an adapter in a slot of at least so many replicas.

        Raises:
            AdapterNotFound: no such adapter.
            InvalidRequest: more than there are replicas, or slots to give; the numbers are named.
            LoRADisabled: the server runs without adapters.
            EngineError: no replica is there.
        """
        self._check_enabled()
        return await self._directory.router.set_min_copies(lora_name, min_copies)

    async def collect(self, request: GenerationRequest) -> list[GenerateChunk]:
        """The whole answer, see `EngineHandle.collect`."""
        return await collect_all(self._engine.collect, await self._calls(request))

    async def pieces(self, request: GenerationRequest) -> AsyncGenerator[GenerateChunk, None]:
        """The answer piece by piece, see `EngineHandle.generate`."""
        async with aclosing(stream_all(self._engine.generate, await self._calls(request))) as pieces:
            async for piece in pieces:
                yield piece

    async def models(self, is_wanted: Callable[[str], bool] | None = None) -> dict[str, dict[str, Any]]:
        """Cards of the base model, of every adapter and of every alias, or of those whose name is wanted, by name."""
        table = self._directory.table or await self._directory.refresh()
        names = [*filter(is_wanted, [self._base.name])]
        if table is not None:
            names += sorted(filter(is_wanted, table.adapters)) + sorted(filter(is_wanted, table.aliases))
        return {name: self._card(name, table) for name in names}

    async def model(self, name: str) -> dict[str, Any]:
        """Card of one model; an adapter's has a field `lora` with its state in the fleet. Raises AdapterNotFound."""
        await self._directory.resolve(name)
        card = self._card(name, self._directory.table)
        status = None if name == self._base.name else await self._directory.describe(name)
        return card if status is None else {**card, "lora": status_body(status)}

    async def pinned(self) -> set[str]:
        """Names of pinned adapters."""
        table = await self._directory.refresh()
        return set() if table is None else {name for name, entry in table.adapters.items() if entry.pinned}

    async def tokenize(self, request: TextRequest) -> dict[str, Any]:
        """The token ids of a text or chat, as a request for the same would begin with. Raises AdapterNotFound."""
        await self._resolve_optional(request.model)
        return tokens_body(await self._tokenizer.tokenize(request.call()))

    async def detokenize(self, request: TokensRequest) -> dict[str, Any]:
        """The text of token ids, special ones included. Raises AdapterNotFound."""
        await self._resolve_optional(request.model)
        return {"prompt": await self._tokenizer.detokenize(TokensCall(request.tokens))}

    async def fleet(self) -> FleetReport:
        """The replicas, the epochs they are at, and the last changes that failed. Raises EngineError."""
        return await self._status.fleet()

    async def adapters(self, after: str = "", limit: int = MOST_ADAPTERS) -> Page:
        """The desired adapters in detail, in the order of their names, from the one behind `after` on."""
        return await self._status.adapters(after, limit)

    async def adapter(self, name: str) -> AdapterReport:
        """One desired adapter in detail. Raises AdapterNotFound, EngineError."""
        return await self._status.adapter(name)

    async def num_replicas(self) -> int:
        """Replicas that can serve now: those that have applied the adapter changes they found when they joined."""
        table = self._directory.table
        if table is None or not table.num_joined:
            table = await self._directory.refresh()
        return 0 if table is None else table.num_joined

    async def starts_on_demand(self) -> bool:
        """Whether the fleet may be without any replica, and the next request starts one."""
        return await self._engine.starts_on_demand()

    def _card(self, name: str, table: FleetTable | None) -> dict[str, Any]:
        base = self._base
        if name == base.name or table is None:
            return model_card(base.name, root=base.root, parent=None, created=base.created)
        if (entry := table.adapters.get(name)) is not None:
            return model_card(name, root=entry.path, parent=base.name, created=entry.created or base.created)
        targets = table.aliases[name].targets
        card = model_card(name, root=", ".join(targets), parent=base.name, created=base.created)
        return {**card, "targets": targets}

    async def _resolve_optional(self, name: str | None) -> None:
        if name is not None:
            await self._directory.resolve(name)

    def _check_enabled(self) -> None:
        if not self._enable_lora:
            raise LoRADisabled("this server runs with enable_lora: false; set it to true to serve adapters")

    async def _calls(self, request: GenerationRequest) -> list[GenerateCall]:
        """What replicas are asked: one call for each prompt, all for the same adapter."""
        # A client that sends a request again under the same id gets the same of an alias's adapters.
        model = await self._directory.resolve(request.model, request_id.current() or request_id.new_call_id())
        if model.lora_name is not None:
            # What an alias is asked is answered in the name of the adapter that answers.
            request.model = model.lora_name
        calls = [
            request.call(request_id.new_call_id(), model.lora_name, model.epoch, index)
            for index in range(request.num_prompts)
        ]
        # How long a prompt takes must not tell what other tenants have asked.
        salt = current_caller().tenant or ""
        replica = exact_replica.current()
        return [msgspec.structs.replace(call, cache_salt=salt, replica=replica) for call in calls]

    async def _changed(self, outcome: LoadOutcome) -> LoadOutcome:
        await self._directory.refresh()
        if outcome.status not in (LoRAStatus.SUCCESS, LoRAStatus.PARTIAL):
            raise STATUS_ERRORS.get(outcome.status, LoRAFleetError)(outcome.message)
        return outcome


def parse_body(body: dict[str, Any]) -> GenerationRequest:
    """Read a chat (it has `messages`) or completion body. Raises InvalidRequest."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body is a {type(body).__name__}; expected a dict")
    kind = ChatCompletionRequest if "messages" in body else CompletionRequest
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise InvalidRequest(describe_validation(error)[0]) from None
