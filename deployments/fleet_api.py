"""The routes of the operator's view: adapters as they should be and as they are, and the replicas."""

from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Query

from cluster.status import AdapterReport, FleetReport, Page
from deployments.fleet_status import MOST_ADAPTERS


class FleetService(Protocol):
    """What the routes call; `deployments.ingress.Ingress` is one."""

    async def fleet(self) -> FleetReport: ...

    async def adapters(self, after: str = "", limit: int = MOST_ADAPTERS) -> Page: ...

    async def adapter(self, name: str) -> AdapterReport: ...


def fleet_routes(service: FleetService) -> APIRouter:
    """The routes over one service."""
    routes = APIRouter()

    @routes.get("/v1/adapters")
    async def list_adapters(
        after: str = "", limit: Annotated[int, Query(ge=1, le=MOST_ADAPTERS)] = MOST_ADAPTERS
    ) -> dict[str, Any]:
        """Desired adapters in the order of their names, from the one behind `after` on."""
        page = await service.adapters(after, limit)
        return {"object": "list", "data": msgspec.to_builtins(page.adapters), "has_more": page.has_more}

    @routes.get("/v1/adapters/{name:path}")
    async def get_adapter(name: str) -> dict[str, Any]:
        """One desired adapter."""
        return _fields(await service.adapter(name))

    @routes.get("/v1/fleet")
    async def get_fleet() -> dict[str, Any]:
        """The replicas, the epochs they are at, and the last changes that failed."""
        return _fields(await service.fleet())

    return routes


def _fields(report: AdapterReport | FleetReport) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(report)
    return fields
