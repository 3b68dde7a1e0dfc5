"""HTTP routes for aliases, and for how many copies of an adapter there should be."""

from typing import Annotated, Any, Protocol

from fastapi import APIRouter
from pydantic import Field

from cluster.entry import AdapterEntry
from cluster.fleet import Alias, AliasInFleet
from deployments.body import Body, NonEmpty

Weight = Annotated[float, Field(ge=0, le=1e9)]


class SetAliasRequest(Body):
    """Body of POST /v1/set_lora_alias."""

    alias: NonEmpty
    targets: dict[NonEmpty, Weight]
    """Adapter -> weight, on any scale: {"tuned@1": 90, "tuned@2": 10}."""


class AliasNameRequest(Body):
    """Body of POST /v1/rollback_lora_alias and /v1/remove_lora_alias."""

    alias: NonEmpty


class MinCopiesRequest(Body):
    """Body of POST /v1/set_lora_copies."""

    lora_name: NonEmpty
    min_copies: Annotated[int, Field(ge=1)]


class AliasService(Protocol):
    """What the routes call; `deployments.ingress.Ingress` is one."""

    async def aliases(self) -> list[AliasInFleet]: ...

    async def set_alias(self, alias: str, targets: dict[str, float], /) -> Alias: ...

    async def roll_back_alias(self, alias: str, /) -> Alias: ...

    async def remove_alias(self, alias: str, /) -> int: ...

    async def set_min_copies(self, lora_name: str, min_copies: int, /) -> AdapterEntry: ...


def alias_routes(service: AliasService) -> APIRouter:
    """The routes of one service."""
    routes = APIRouter()

    @routes.get("/v1/lora_aliases")
    async def list_aliases() -> dict[str, Any]:
        """All aliases, each with what it stood for before."""
        return {"object": "list", "data": [alias_card(found) for found in await service.aliases()]}

    @routes.post("/v1/set_lora_alias")
    async def set_lora_alias(request: SetAliasRequest) -> dict[str, Any]:
        """Have a name stand for weighted adapters, in one step."""
        return alias_body(await service.set_alias(request.alias, dict(request.targets)))

    @routes.post("/v1/rollback_lora_alias")
    async def rollback_lora_alias(request: AliasNameRequest) -> dict[str, Any]:
        """Have an alias stand for what it stood for before its last move."""
        return alias_body(await service.roll_back_alias(request.alias))

    @routes.post("/v1/remove_lora_alias")
    async def remove_lora_alias(request: AliasNameRequest) -> dict[str, Any]:
        """Forget an alias; its adapters stay loaded."""
        epoch = await service.remove_alias(request.alias)
        return {"status": "success", "message": f"alias {request.alias!r} is removed", "epoch": epoch}

    @routes.post("/v1/set_lora_copies")
    async def set_lora_copies(request: MinCopiesRequest) -> dict[str, Any]:
        """Have an adapter in a slot of at least so many replicas."""
        entry = await service.set_min_copies(request.lora_name, request.min_copies)
        return {
            "status": "success",
            "message": f"adapter {entry.name!r} gets a slot on at least {entry.min_copies} replica(s)",
            "lora_name": entry.name,
            "min_copies": entry.min_copies,
        }

    return routes


def alias_body(alias: Alias) -> dict[str, Any]:
    """What an alias stands for, and since which epoch."""
    return {"alias": alias.name, "targets": alias.targets, "epoch": alias.epoch}


def alias_card(found: AliasInFleet) -> dict[str, Any]:
    """An alias, and where rollbacks would lead, one after the other."""
    before = [{"targets": move.targets, "epoch": move.epoch} for move in found.before]
    return {**alias_body(found.alias), "object": "lora_alias", "before": before}
