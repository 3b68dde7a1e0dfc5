"""Which models can be asked for: the ingress's view of the router actor's table."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from cluster.aliases import choose
from cluster.fleet import AdapterInFleet, FleetTable
from cluster.names import listed
from deployments.router_client import RouterClient
from lora_core.errors import AdapterNotFound, EngineError

logger = logging.getLogger(__name__)

SHOWN_NAME = 256
"""Characters of an unknown name that an answer repeats."""

LOOKUP_TIMEOUT_S = 2.0
"""How long an unknown name is worth asking the router actor about."""


class Model(NamedTuple):
    """What a `model` field names."""

    lora_name: str | None
    """The adapter; None is the base model."""
    epoch: int
    """Adapter change the serving replica must have applied."""


class ModelDirectory:
    """Resolves model names, following the router actor's table in the background."""

    def __init__(self, base_name: str, locate: Callable[[], Awaitable[str]]) -> None:
        self.base_name = base_name
        self.router = RouterClient(locate)
        self._table: FleetTable | None = None
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin following; needs a running event loop."""
        self._following = asyncio.create_task(self._follow(), name="follow-table")

    @property
    def table(self) -> FleetTable | None:
        """The newest table seen; None before the first."""
        return self._table

    async def refresh(self) -> FleetTable | None:
        """Ask the router actor itself, so that what it has done before this call is seen; returns `table`.

        Where it cannot be reached in time, the last table stands.
        """
        try:
            self._take(await asyncio.wait_for(self.router.watch(self._table, 0), LOOKUP_TIMEOUT_S))
        except Exception as error:
            logger.warning(
                "the router actor does not answer (%s: %s); the last table stands", type(error).__name__, error
            )
        return self._table

    async def describe(self, name: str) -> AdapterInFleet | None:
        """An adapter in detail, as the router actor knows it; None where it has none, or does not answer in time."""
        try:
            return await asyncio.wait_for(self.router.describe(name), LOOKUP_TIMEOUT_S)
        except Exception as error:
            logger.warning("the router actor does not describe %r (%s: %s)", name, type(error).__name__, error)
            return None

    async def resolve(self, name: str, key: str = "") -> Model:
        """Find the model a request names, itself or by an alias.

        Args:
            name: Of the base model, of an adapter, or an alias.
            key: The request's id: of an alias's adapters it chooses one, the same one each time.

        Raises:
            AdapterNotFound: neither the base model nor an adapter; the message names those that are.
            EngineError: the router actor has not been reached yet, so that nothing is known of adapters.
        """
        if name == self.base_name:
            return Model(None, 0)
        if self._table is None or not (name in self._table.adapters or name in self._table.aliases):
            await self.refresh()
        if self._table is None:
            raise EngineError("the list of adapters is not known yet; try again in a moment")
        alias = self._table.aliases.get(name)
        entry = self._table.adapters.get(name if alias is None else choose(alias, key))
        if entry is None:
            known = ", ".join([self.base_name, listed([*self._table.adapters, *self._table.aliases])])
            shown = repr(name) if len(name) <= SHOWN_NAME else f"{name[:SHOWN_NAME]!r}..."
            raise AdapterNotFound(f"model {shown} does not exist; known models: {known}")
        return Model(entry.name, entry.epoch)

    async def _follow(self) -> None:
        while True:
            try:
                await self.router.follow_table(self._take)
                # It returns when this process has left Ray.
                return
            except Exception:
                logger.exception("following the table of adapters failed; trying again")
            await asyncio.sleep(1)

    def _take(self, table: FleetTable) -> None:
        current = self._table
        if current is None or current.router_id != table.router_id or current.version < table.version:
            self._table = table
