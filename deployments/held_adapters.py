"""`HeldAdapters`: which adapters one replica's engine holds, and the changes that make it so."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from cluster.changes import Change
from cluster.fleet import Applied
from cluster.verdict import text_of
from lora_core.errors import EngineDead, LoRAFleetError
from lora_core.types import LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus

logger = logging.getLogger(__name__)

FAILED = {
    LoRAOperation.LOAD: LoRAStatus.LOAD_ERROR,
    LoRAOperation.UNLOAD: LoRAStatus.UNLOAD_ERROR,
    LoRAOperation.PIN: LoRAStatus.PIN_ERROR,
    LoRAOperation.UNPIN: LoRAStatus.PIN_ERROR,
}
"""The status of an operation that the engine did not answer."""


class HeldAdapters:
    """Changes are applied one at a time, in the order of their epochs.

    Args:
        ask: Puts an operation to the engine. An exception it raises is a failed operation, except for EngineDead, which
            passes through: the change is tried again.
    """

    def __init__(self, ask: Callable[[LoRARequest], Awaitable[LoRAResponse]]) -> None:
        self._ask_engine = ask
        self._generations: dict[str, int] = {}
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

    async def apply(self, changes: Iterable[Change]) -> Applied:
        """Bring the engine to where the changes lead; returns its answers.

        Raises:
            EngineDead: the engine ended; what was applied until then stays noted.
        """
        applied = Applied()
        for change in changes:
            name = change.request.lora_name
            match change.request.operation:
                case LoRAOperation.LOAD:
                    applied.adapters[name] = await self._load(change)
                case LoRAOperation.UNLOAD:
                    applied.adapters[name] = await self._unload(change.request)
                case LoRAOperation.PIN | LoRAOperation.UNPIN:
                    applied.pins[name] = await self._pin(change.request)
        return applied

    async def give_up(self, unloads: Iterable[Change], reason: str) -> None:
        """Unload adapters that the fleet serves, and that this replica may not."""
        for change in unloads:
            await self._unload(change.request)
            self._refusals[change.request.lora_name] = reason

    async def _load(self, change: Change) -> LoRAResponse:
        request, name = change.request, change.request.lora_name
        held = self._generations.get(name)
        if held is not None and held == request.generation:
            return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} is held already")
        response = await self._ask(request)
        if response.status is LoRAStatus.SUCCESS:
            if request.generation is not None:
                self._generations[name] = request.generation
            self._refusals.pop(name, None)
            return response
        if held is not None or response.status is LoRAStatus.LOAD_ERROR:
            # Another generation is not what the name stands for now; and an engine that did not answer in time may yet
            # load this one.
            await self._unload(LoRARequest(LoRAOperation.UNLOAD, name, generation=request.generation))
        self._refusals[name] = text_of(response)
        return response

    async def _unload(self, request: LoRARequest) -> LoRAResponse:
        response = await self._ask(request)
        if response.status in (LoRAStatus.SUCCESS, LoRAStatus.UNLOAD_NAME_NONEXISTENT):
            name = request.lora_name
            self._generations.pop(name, None)
            self._refusals.pop(name, None)
            self._pinned.discard(name)
        return response

    async def _pin(self, request: LoRARequest) -> LoRAResponse:
        name = request.lora_name
        if name not in self._generations:
            return LoRAResponse(LoRAStatus.PIN_NAME_NONEXISTENT, f"LoRA adapter {name!r} is not loaded here")
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
        except LoRAFleetError as error:
            response = LoRAResponse(FAILED[operation], str(error))
        except Exception as error:
            # A fault of ours. Were it raised, this change would be tried for ever, and later ones never.
            logger.exception("%s of adapter %r", operation.value, name)
            response = LoRAResponse(FAILED[operation], f"{type(error).__name__}: {error}")
        log = logger.info if response.status is LoRAStatus.SUCCESS else logger.warning
        log("%s of adapter %r: %s", operation.value, name, text_of(response))
        return response
