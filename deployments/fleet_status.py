"""`FleetStatus`: the operator's view of the fleet, as the router actor has it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from cluster.picture import FleetPicture
from cluster.status import AdapterReport, FleetReport, Page
from lora_core.errors import AdapterNotFound, EngineError, LoRAFleetError

ANSWER_TIMEOUT_S = 5.0
"""How long the router actor may take to answer, or to be found again."""

MOST_ADAPTERS = 1000
"""Adapters in one answer."""

Result = TypeVar("Result")


class StatusSource(Protocol):
    """What is asked; `deployments.router_client.RouterClient` is one."""

    async def fleet_status(self) -> FleetReport: ...

    async def fleet_picture(self) -> FleetPicture: ...

    async def adapters_status(self, after: str, limit: int) -> Page: ...

    async def adapter_status(self, name: str) -> AdapterReport | None: ...


class FleetStatus:
    """Asks the router actor, for a short time. All methods raise EngineError where it does not answer."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    async def fleet(self) -> FleetReport:
        """Replicas, epochs, and the last changes that failed."""
        return await _soon(self._source.fleet_status())

    async def picture(self) -> FleetPicture:
        """What the live page shows."""
        return await _soon(self._source.fleet_picture())

    async def adapters(self, after: str = "", limit: int = MOST_ADAPTERS) -> Page:
        """The desired adapters whose names come after `after`, in order, at most `limit` and `MOST_ADAPTERS`."""
        return await _soon(self._source.adapters_status(after, min(limit, MOST_ADAPTERS)))

    async def adapter(self, name: str) -> AdapterReport:
        """One desired adapter, whether or not it can be asked for now. Raises AdapterNotFound."""
        report = await _soon(self._source.adapter_status(name))
        if report is None:
            raise AdapterNotFound(f"no adapter named {name!r} is asked for; GET /v1/adapters lists those that are")
        return report


async def _soon(answer: Coroutine[Any, Any, Result]) -> Result:
    try:
        return await asyncio.wait_for(answer, ANSWER_TIMEOUT_S)
    except LoRAFleetError as error:
        raise EngineError(f"the router actor cannot be asked: {error}") from error
    except (TimeoutError, asyncio.TimeoutError):
        raise EngineError(
            f"the router actor does not answer within {ANSWER_TIMEOUT_S:g} s; requests are served meanwhile, try again"
        ) from None
