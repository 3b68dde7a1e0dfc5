"""`TenantService`: a service as the caller of each request may see and use it."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, cast

from cluster.access import AccessSettings
from cluster.callers import Caller
from cluster.fleet import LoadOutcome
from cluster.quotas import RETRY_AFTER_OWN_S, TenantQuotas, over
from deployments import request_id
from deployments.caller_context import current_caller
from deployments.directory import SHOWN_NAME
from deployments.folder_looks import FolderLooks
from deployments.generation import GenerateChunk
from deployments.http_api import Service
from deployments.openai_api import GenerationRequest, TextRequest, TokensRequest
from deployments.token_count import TokenCount, most_tokens
from lora_core.errors import AdapterError, AdapterNameTaken, AdapterNotFound, EngineError, NotPermitted, TryLater
from lora_core.sources import AdapterSources

logger = logging.getLogger(__name__)

SHOWN_FIELDS = ("id", "object", "created", "owned_by", "parent")
"""Of a card of what all share; what else it says is the operator's."""


def as_tenants_see(service: Service, base_name: str, access: AccessSettings, quotas: TenantQuotas) -> Service:
    """A service that keeps tenants apart, over one that knows of none.

    Args:
        service: Does what is asked.
        base_name: The base model's name, which all may use.
        access: Tenants and where their adapters may come from.
        quotas: Counts tokens.
    """
    # What it does not name itself it hands on: see `__getattr__`.
    return cast(Service, TenantService(service, base_name, access, quotas))


class TenantService:
    """Refuses and hides what is not the caller's. The fleet's operator sees all.

    A name that the caller may not see is answered exactly as one that nobody has, and as fast: whether it exists is not
    looked up.
    """

    def __init__(self, service: Service, base_name: str, access: AccessSettings, quotas: TenantQuotas) -> None:
        self._service = service
        self._base_name = base_name
        self._tenants = access.tenants
        self._sources = {
            name: AdapterSources(tenant.sources, f"access.tenants.{name}.sources")
            for name, tenant in access.tenants.items()
        }
        self._looks = FolderLooks()
        self._quotas = quotas
        # Of each tenant, names whose load is under way.
        self._loading: dict[str, set[str]] = {}
        self._pinning: dict[str | None, asyncio.Lock] = {}

    def __getattr__(self, name: str) -> Any:
        """Everything else, unchanged: only the fleet's operator reaches routes that `route_access` does not declare."""
        return getattr(self._service, name)

    async def collect(self, request: GenerationRequest) -> list[GenerateChunk]:
        """The whole answer, counted."""
        caller, count = current_caller(), TokenCount(request.n or 1)
        self._check_name(caller, request.model)
        charge = self._quotas.charge(caller.tenant, most_tokens(request))
        with self._in_the_callers_words(caller, request):
            try:
                chunks = await self._service.collect(request)
                count.add(chunks)
            finally:
                charge.settle(count.total)
        return chunks

    async def pieces(self, request: GenerationRequest) -> AsyncGenerator[GenerateChunk, None]:
        """The answer piece by piece, counted as far as it was read."""
        caller, count = current_caller(), TokenCount(request.n or 1)
        self._check_name(caller, request.model)
        charge = self._quotas.charge(caller.tenant, most_tokens(request))
        with self._in_the_callers_words(caller, request) as hide_target:
            try:
                async with aclosing(self._service.pieces(request)) as pieces:
                    async for piece in pieces:
                        count.add([piece])
                        charge.grow(count.total)
                        hide_target()
                        yield piece
            finally:
                charge.settle(count.total)

    async def tokenize(self, request: TextRequest) -> dict[str, Any]:
        """Token ids of a text or chat."""
        caller, name = current_caller(), request.model or self._base_name
        self._check_name(caller, name)
        try:
            return await self._service.tokenize(request)
        except AdapterNotFound as error:
            raise self._not_found(caller, name, error) from None
        except EngineError as error:
            raise _as_told(caller, error) from None

    async def detokenize(self, request: TokensRequest) -> dict[str, Any]:
        """The text of token ids."""
        caller, name = current_caller(), request.model or self._base_name
        self._check_name(caller, name)
        try:
            return await self._service.detokenize(request)
        except AdapterNotFound as error:
            raise self._not_found(caller, name, error) from None
        except EngineError as error:
            raise _as_told(caller, error) from None

    async def models(self) -> dict[str, dict[str, Any]]:
        """Cards of the models the caller may use."""
        caller = current_caller()
        cards = await self._service.models(lambda name: self._may_see(caller, name))
        return {name: self._shown(caller, card) for name, card in cards.items()}

    async def model(self, name: str) -> dict[str, Any]:
        """Card of one of them. Raises AdapterNotFound."""
        caller = current_caller()
        self._check_name(caller, name)
        try:
            return self._shown(caller, await self._service.model(name))
        except AdapterNotFound as error:
            raise self._not_found(caller, name, error) from None

    async def load_adapter(
        self, lora_name: str, lora_path: str, load_inplace: bool = False, **more: Any
    ) -> LoadOutcome:
        """Load an adapter: a tenant's operator its own, from its own places, and not more than it may have."""
        caller = current_caller()
        if caller.tenant is None:
            return await self._service.load_adapter(lora_name, lora_path, load_inplace, **more)
        if not caller.owns(lora_name):
            raise NotPermitted(
                f"this key loads adapters whose names begin with {caller.tenant + '/'!r}, found "
                f"{_shown_name(lora_name)}; the operator of this server can load others"
            )
        path = await self._looks.see(self._sources[caller.tenant].locate, lora_path)
        with self._counted(caller.tenant, lora_name, await self._own(caller)):
            return await self._service.load_adapter(lora_name, path, load_inplace, path_is_final=True, **more)

    async def unload_adapter(self, lora_name: str) -> LoadOutcome:
        """Unload an adapter of the caller's."""
        caller = current_caller()
        self._check_own(caller, lora_name)
        try:
            return await self._service.unload_adapter(lora_name)
        except AdapterNotFound as error:
            raise self._not_found(caller, lora_name, error) from None
        except AdapterNameTaken:
            if caller.is_fleet_operator:
                raise
            # Its name may be another tenant's.
            raise AdapterNameTaken(
                f"{_shown_name(lora_name)} was not unloaded: an alias stands for it; the operator of this server can "
                "move or remove that"
            ) from None

    async def pin_adapter(self, lora_name: str) -> LoadOutcome:
        """Pin an adapter of the caller's, if it may pin one more."""
        caller = current_caller()
        self._check_own(caller, lora_name)
        # One at a time: two could not both be the last.
        async with self._pinning.setdefault(caller.tenant, asyncio.Lock()):
            if caller.tenant is not None:
                await self._check_pins(caller, caller.tenant, lora_name)
            try:
                return await self._service.pin_adapter(lora_name)
            except AdapterNotFound as error:
                raise self._not_found(caller, lora_name, error) from None

    async def unpin_adapter(self, lora_name: str) -> LoadOutcome:
        """Unpin an adapter of the caller's."""
        caller = current_caller()
        self._check_own(caller, lora_name)
        try:
            return await self._service.unpin_adapter(lora_name)
        except AdapterNotFound as error:
            raise self._not_found(caller, lora_name, error) from None

    # Inside

    def _may_see(self, caller: Caller, name: str) -> bool:
        return caller.may_see(name) or (name == self._base_name and caller.tenant is not None)

    def _check_name(self, caller: Caller, name: str) -> None:
        if not self._may_see(caller, name):
            raise self._not_found(caller, name)

    def _check_own(self, caller: Caller, name: str) -> None:
        if caller.is_fleet_operator or caller.owns(name):
            return
        if self._may_see(caller, name):
            raise NotPermitted(
                f"{_shown_name(name)} is shared by all, and not this key's to change; the operator of this server can"
            )
        raise self._not_found(caller, name)

    @contextmanager
    def _in_the_callers_words(self, caller: Caller, request: GenerationRequest) -> Iterator[Callable[[], None]]:
        """Have an answer, and a refusal, name what was asked for, where the caller may not know what is behind it.

        A name may stand for an adapter that the caller does not see, and why one cannot be served may tell of folders.
        A service may put the adapter that answers into the request: what it yields takes it out again.
        """
        asked, is_hidden = request.model, False

        def hide_target() -> None:
            nonlocal is_hidden
            if not self._may_see(caller, request.model):
                request.model, is_hidden = asked, True

        try:
            yield hide_target
        except AdapterNotFound as error:
            raise self._not_found(caller, asked, error) from None
        except AdapterError as error:
            hide_target()
            if caller.is_fleet_operator or (caller.owns(request.model) and not is_hidden):
                raise
            error.args = (f"model {_shown_name(asked)} cannot be served now; the operator of this server can see why",)
            raise
        except TryLater as error:
            hide_target()
            if not is_hidden:
                raise
            again = f"model {_shown_name(asked)} cannot be served yet; send the request again"
            raise type(error)(again, error.retry_after_s) from None
        except EngineError as error:
            hide_target()
            # A fault of this very answer is the caller's to know; what has ended a replica may be anybody's adapter.
            if type(error) is EngineError and not is_hidden:
                raise
            raise _as_told(caller, error) from None
        finally:
            hide_target()

    def _not_found(self, caller: Caller, name: str, error: AdapterNotFound | None = None) -> AdapterNotFound:
        """The refusal of a name that is not there for the caller, in words that tell nothing of the others'."""
        if caller.is_fleet_operator and error is not None:
            return error
        return AdapterNotFound(
            f"model {_shown_name(name)} does not exist; GET /v1/models lists those that this key may use"
        )

    def _shown(self, caller: Caller, card: dict[str, Any]) -> dict[str, Any]:
        """A card without what concerns the server's own folders and replicas, where the adapter is not the caller's."""
        if caller.is_fleet_operator:
            return card
        # Its alias may stand for what is not to be seen.
        if caller.owns(card["id"]) and all(self._may_see(caller, target) for target in card.get("targets", ())):
            return card
        return {**{key: card[key] for key in SHOWN_FIELDS if key in card}, "root": card["id"]}

    async def _own(self, caller: Caller) -> set[str]:
        cards = await self._service.models(caller.owns)
        # An alias is no adapter.
        return {name for name, card in cards.items() if "targets" not in card}

    @contextmanager
    def _counted(self, tenant: str, name: str, loaded: set[str]) -> Iterator[None]:
        """Count a load under way among a tenant's adapters. Raises RateLimited."""
        loading, most = self._loading.setdefault(tenant, set()), self._tenants[tenant].adapters
        if most is not None and len(loaded | loading | {name}) > most:
            raise over(tenant, "adapters", most, RETRY_AFTER_OWN_S, "unload one first")
        if name in loading:
            # Another request for the same: the one that came first counts it.
            yield
            return
        loading.add(name)
        try:
            yield
        finally:
            loading.discard(name)

    async def _check_pins(self, caller: Caller, tenant: str, name: str) -> None:
        most = self._tenants[tenant].pinned_slots
        pinned = {pinned for pinned in await self._service.pinned() if caller.owns(pinned)}
        if len(pinned | {name}) > most:
            raise over(tenant, "pinned_slots", most, RETRY_AFTER_OWN_S, "unpin one first")


def _shown_name(name: str) -> str:
    return repr(name) if len(name) <= SHOWN_NAME else f"{name[:SHOWN_NAME]!r}..."


def _as_told(caller: Caller, error: EngineError) -> EngineError:
    """An engine's fault as its operator is told of it, and as others are: the reason may name another tenant's adapter,
    whose requests alone made no progress."""
    if caller.is_fleet_operator:
        return error
    logger.warning("request %s: %s: %s", json.dumps(request_id.current()), type(error).__name__, error)
    return type(error)(
        "the server could not answer this now; send it again. Its operator finds the reason in the log, under this "
        "request's id"
    )
