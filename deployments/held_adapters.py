"""`HeldAdapters`: which adapters one replica's engine holds, and the changes that make it so."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

import msgspec

from cluster.changes import Change
from cluster.verdict import text_of
from deployments.bell import Bell
from lora_core.channel import NUM_LOADERS
from lora_core.errors import EngineDead, EngineError, LoRAFleetError
from lora_core.messages import Residency
from lora_core.places import Places
from lora_core.types import AdapterRef, LoadReport, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus

logger = logging.getLogger(__name__)

FAILED = {
    LoRAOperation.LOAD: LoRAStatus.LOAD_ERROR,
    LoRAOperation.UNLOAD: LoRAStatus.UNLOAD_ERROR,
    LoRAOperation.PIN: LoRAStatus.UNSPECIFIED_ERROR,
    LoRAOperation.UNPIN: LoRAStatus.UNSPECIFIED_ERROR,
    LoRAOperation.WARM: LoRAStatus.UNSPECIFIED_ERROR,
}
"""The status of an operation that failed on the way to the engine."""

MAYBE_GIVEN = (LoRAStatus.SUCCESS, LoRAStatus.LOAD_ERROR, LoRAStatus.UNAVAILABLE)
"""How a load ends whose generation the engine may have given to an adapter, now or later."""

LOOK_AGAIN_S = 0.25
"""How soon a load that waits notices that another one has taken long."""


class HeldAdapters:
    """Changes of different names may be applied side by side, those of one name one at a time and in order.

    As many loads are put to the engine as it does at once, so that the time each is given is its own. Those that take
    long are not counted, as there, so that they hold up no other adapter.

    Args:
        ask: Puts an operation to the engine. An exception it raises is a failed operation, except for EngineDead, which
            passes through: the change is tried again.
    """

    def __init__(self, ask: Callable[[LoRARequest], Awaitable[LoRAResponse]]) -> None:
        self._ask_engine = ask
        self._places = Places(NUM_LOADERS)
        self._place_left = Bell()
        self._next_load = asyncio.Lock()
        # The engine gives a generation once. One that this replica loads again, having given it up, has another number
        # there, of its own: none of the fleet's is negative.
        self._numbers = itertools.count(-1, -1)
        self._spent: set[int] = set()
        self._fleet_generations: dict[int, int] = {}
        self._generations: dict[str, int] = {}
        # Of what is loaded, what its load found.
        self._reports: dict[str, LoadReport] = {}
        self._pinned: set[str] = set()
        self._refusals: dict[str, str] = {}

    @property
    def generations(self) -> Mapping[str, int]:
        """Name -> generation of what is loaded."""
        return self._generations

    @property
    def pinned(self) -> frozenset[str]:
        """Names of what is pinned."""
        return frozenset(self._pinned)

    def refusal(self, name: str) -> str | None:
        """Why an adapter that the fleet serves is not held here; None where it is, or where the fleet has none."""
        return self._refusals.get(name)

    def as_fleet(self, residency: Residency) -> Residency:
        """What the engine holds, by the fleet's generations."""
        if not self._fleet_generations:
            return residency
        return msgspec.structs.replace(
            residency,
            resident=self._renamed(residency.resident),
            loaded=None if residency.loaded is None else self._renamed(residency.loaded),
            in_memory=None if residency.in_memory is None else self._renamed(residency.in_memory),
            loading=self._renamed(residency.loading),
        )

    async def apply(self, change: Change) -> LoRAResponse:
        """Bring the engine to where a change leads; returns its answer.

        Raises:
            EngineDead: the engine ended.
        """
        match change.request.operation:
            case LoRAOperation.LOAD:
                return await self._load(change.request)
            case LoRAOperation.UNLOAD:
                return await self._unload(change.request)
            case LoRAOperation.PIN | LoRAOperation.UNPIN:
                return await self._pin(change.request)
            case LoRAOperation.WARM:
                return await self.warm(change.request.lora_name)

    async def warm(self, name: str) -> LoRAResponse:
        """Have the engine bring an adapter into a slot, if one is to spare; see `LoRAManagerV3.warm_adapter`.

        Raises:
            EngineDead: the engine ended.
        """
        if name not in self._generations:
            return _not_here(name)
        return await self._ask(LoRARequest(LoRAOperation.WARM, name))

    async def give_up(self, unload: Change, reason: str) -> None:
        """Unload a generation that the fleet serves, and that this replica may not; later ones are none of its."""
        name = unload.request.lora_name
        if self._generations.get(name) == unload.request.generation:
            await self._unload(unload.request)
            self._refusals[name] = reason

    def _renamed(self, refs: Iterable[AdapterRef]) -> list[AdapterRef]:
        numbers = self._fleet_generations
        return [AdapterRef(name, numbers.get(generation, generation)) for name, generation in refs]

    async def _load(self, request: LoRARequest) -> LoRAResponse:
        name = request.lora_name
        held, report = self._generations.get(name), self._reports.get(name)
        is_content = report is None or request.content_hash in (None, report.content_hash)
        if held is not None and held == request.generation and is_content:
            return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} is held already", report)
        # Whatever it says: what is held under the name is not what it stands for now.
        replace = request.replace or held is not None
        async with self._loading():
            response = await self._ask_load(msgspec.structs.replace(request, replace=replace))
        if response.status is LoRAStatus.SUCCESS:
            self._refusals.pop(name, None)
            self._reports.pop(name, None)
            if request.generation is not None:
                self._generations[name] = request.generation
            if response.report is not None:
                self._reports[name] = response.report
            return response
        if held is not None or response.status in MAYBE_GIVEN:
            # Another generation is not what the name stands for now; and an engine that did not answer in time may yet
            # load this one.
            await self._unload(LoRARequest(LoRAOperation.UNLOAD, name, generation=request.generation))
        self._refusals[name] = text_of(response)
        return response

    @asynccontextmanager
    async def _loading(self) -> AsyncIterator[None]:
        """Wait for the turn of a load, and have it within the block."""
        async with self._next_load:
            while (place := self._places.try_take()) is None:
                # Places come free by themselves, too.
                await self._place_left.wait(LOOK_AGAIN_S)
        try:
            yield
        finally:
            self._places.leave(place)
            self._place_left.ring()

    async def _ask_load(self, request: LoRARequest) -> LoRAResponse:
        """Load a generation, under another number if the engine may have had this one."""
        generation = request.generation
        if generation is None or generation not in self._spent:
            response = await self._ask(request)
            if generation is not None and response.status in MAYBE_GIVEN:
                self._spent.add(generation)
            return response
        number = next(self._numbers)
        self._fleet_generations[number] = generation
        response = await self._ask(msgspec.structs.replace(request, generation=number))
        if response.report is None:
            return response
        report = msgspec.structs.replace(response.report, generation=generation)
        return LoRAResponse(response.status, response.message, report)

    async def _unload(self, request: LoRARequest) -> LoRAResponse:
        response = await self._ask(request)
        if response.status in (LoRAStatus.SUCCESS, LoRAStatus.UNLOAD_NAME_NONEXISTENT):
            name = request.lora_name
            self._generations.pop(name, None)
            self._reports.pop(name, None)
            self._refusals.pop(name, None)
            self._pinned.discard(name)
        return response

    async def _pin(self, request: LoRARequest) -> LoRAResponse:
        name = request.lora_name
        if name not in self._generations:
            return _not_here(name)
        response = await self._ask(request)
        if response.status is LoRAStatus.SUCCESS:
            (self._pinned.add if request.operation is LoRAOperation.PIN else self._pinned.discard)(name)
        return response

    async def _ask(self, request: LoRARequest) -> LoRAResponse:
        operation, name = request.operation, request.lora_name
        try:
            response = await self._ask_engine(request)
        except EngineDead:
            # Says nothing of the adapter: this replica is to be replaced, and until then has no answer.
            raise
        except EngineError as error:
            response = LoRAResponse(LoRAStatus.UNAVAILABLE, str(error))
        except LoRAFleetError as error:
            response = LoRAResponse(FAILED[operation], str(error))
        except Exception as error:
            # A fault of ours. Were it raised, this change would be tried for ever, and later ones never.
            logger.exception("%s of adapter %r", operation.value, name)
            response = LoRAResponse(FAILED[operation], f"{type(error).__name__}: {error}")
        level = logging.INFO if response.status is LoRAStatus.SUCCESS else logging.WARNING
        # Asked for again and again, and none the worse where it does not come about.
        level = logging.DEBUG if operation is LoRAOperation.WARM else level
        logger.log(level, "%s of adapter %r: %s", operation.value, name, text_of(response))
        return response


def _not_here(name: str) -> LoRAResponse:
    return LoRAResponse(LoRAStatus.PIN_NAME_NONEXISTENT, f"LoRA adapter {name!r} is not loaded here")
