"""Whose turn it is in the adapter slots: who has come to one, who is to leave it, and for whom."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from lora_core.engine.request import Request
from lora_core.engine.waiting import WaitingQueues
from lora_core.types import AdapterRef

# Shares of the longest wait for a slot. What is left after the last is for writing the slot and the step that does it.
STOP_SHARE, PUT_BACK_SHARE = 0.7, 0.8
# Shares of it that an adapter surely has: in which it admits requests, and until its requests may be put back.
LEAST_OPEN_SHARE, LEAST_TURN_SHARE = 0.25, 0.5
# Of the adapters that wait longest, how many are looked at for those that are due and in memory.
NUM_LOOKED_AT = 64


class SlotState(Protocol):
    """What turns depend on (`LoRAManagerV3` says what each means)."""

    def can_activate(self, ref: AdapterRef, /) -> bool: ...
    def wants_slot(self, ref: AdapterRef, /) -> bool: ...
    def is_pinned(self, ref: AdapterRef, /) -> bool: ...
    def pinned_without_slot(self) -> Iterable[AdapterRef]: ...


@dataclass
class _Turn:
    """An adapter's time in a slot, from its first running request to its last."""

    since_s: float
    requests: dict[Request, None] = field(default_factory=dict)
    closed_s: float | None = None
    """When it stopped admitting requests, in favour of another adapter."""


class SlotTurns:
    """Ends the turns of adapters in slots so that no other waits longer than `max_slot_wait_s`.

    An adapter whose requests run keeps its slot, and as long as nobody waits it may do so for ever. Once another one
    has waited for 0.7 of the bound, a slot is *set aside* for it: the adapter that has it admits no more requests.
    Those that still run at 0.8 of the bound are put back into the queue, to go on later.

    An adapter that comes to a slot has it for at least half the bound if it needs it that long, a quarter of the bound
    open to new requests, and until each of its requests has a token more than before. So K adapters that wait for N
    slots take turns, and each waits for about half the bound times K / N where that is more than the bound.

    An adapter that the operator pinned waits for nothing but a slot that can be drained, and gives none up.
    """

    def __init__(self, slots: SlotState, max_slot_wait_s: float, clock: Callable[[], float]) -> None:
        self.pinned_without_slot: list[AdapterRef] = []
        """The operator's, still without a slot at the last `update`."""
        self._slots = slots
        self._max_slot_wait_s = max_slot_wait_s
        self._clock = clock
        self._turns: dict[AdapterRef, _Turn] = {}
        # Who waits for a slot that is set aside, and whose it is.
        self._set_aside: dict[AdapterRef, AdapterRef] = {}

    def __contains__(self, adapter: object) -> bool:
        """Whether requests of the adapter run."""
        return adapter in self._turns

    def running(self) -> list[AdapterRef]:
        """Adapters whose requests run."""
        return list(self._turns)

    def num_running(self, adapter: AdapterRef) -> int:
        """Running requests of an adapter."""
        return len(self._turns[adapter].requests) if adapter in self._turns else 0

    def is_closed(self, adapter: AdapterRef) -> bool:
        """Whether the adapter may start no request, because its slot is set aside for another."""
        return adapter in self._set_aside.values()

    def may_take_slot(self, adapter: AdapterRef) -> bool:
        """Whether a slot that can be had is not meant for others."""
        return not self._set_aside or adapter in self._set_aside

    def begin(self, request: Request, adapter: AdapterRef) -> None:
        """Take note that a request runs."""
        self._drop(adapter)
        turn = self._turns.setdefault(adapter, _Turn(self._clock()))
        turn.requests[request] = None

    def end(self, request: Request, adapter: AdapterRef, waiting: WaitingQueues) -> None:
        """Take note that a request runs no more; after the last one, those of its adapter that wait do so anew."""
        turn = self._turns[adapter]
        del turn.requests[request]
        if not turn.requests:
            del self._turns[adapter]
            waiting.wait_anew(adapter, self._clock() if turn.closed_s is None else turn.closed_s)

    def is_on_its_way(self, adapter: AdapterRef) -> None:
        """Take note that an adapter has its slot, or is not in memory any more: none need be set aside for it."""
        self._drop(adapter)

    def update(self, waiting: WaitingQueues) -> list[Request]:
        """Set slots aside for those who have waited long enough.

        Returns:
            Running requests to be put back, the turn of whose adapter has to end now.
        """
        now_s, bound_s = self._clock(), self._max_slot_wait_s
        pinned = self.pinned_without_slot = list(self._slots.pinned_without_slot())
        for adapter in list(self._set_aside):
            if not self._is_of_use(adapter, pinned, waiting):
                self._drop(adapter)
        if self._turns:
            for adapter in itertools.chain(pinned, self._due(waiting, now_s)):
                if adapter in self._set_aside or not self._slots.wants_slot(adapter):
                    continue
                if self._slots.can_activate(adapter) or not self._set_one_aside(adapter, now_s, adapter in pinned):
                    break
        put_back: list[Request] = []
        for adapter, leaving in self._set_aside.items():
            if adapter not in waiting or now_s - waiting.since_s(adapter) < PUT_BACK_SHARE * bound_s:
                continue
            turn = self._turns.get(leaving)
            if turn is None or now_s - turn.since_s < LEAST_TURN_SHARE * bound_s:
                continue
            if all(request.has_progressed for request in turn.requests):
                put_back += turn.requests
        return put_back

    def check(self, running: Iterable[Request]) -> None:
        """Assert that turns and running requests agree."""
        by_adapter: dict[AdapterRef, set[Request]] = {}
        for request in running:
            if request.adapter is not None:
                by_adapter.setdefault(request.adapter, set()).add(request)
        found = {adapter: set(turn.requests) for adapter, turn in self._turns.items()}
        assert found == by_adapter, f"{by_adapter} run and {found} are counted"
        closed = {adapter for adapter, turn in self._turns.items() if turn.closed_s is not None}
        leaving = list(self._set_aside.values())
        assert len(set(leaving)) == len(leaving), "a slot is set aside twice"
        assert closed == {adapter for adapter in leaving if adapter in self._turns}, f"{closed} admit nothing"
        assert self._set_aside.keys().isdisjoint(self._turns), "a slot is set aside for an adapter that runs"

    def _due(self, waiting: WaitingQueues, now_s: float) -> Iterator[AdapterRef]:
        """Adapters that have waited long enough for a slot to be set aside, if a slot is what they wait for."""
        latest_s = now_s - STOP_SHARE * self._max_slot_wait_s
        return (a for a in waiting.oldest(NUM_LOOKED_AT, self._turns) if waiting.since_s(a) <= latest_s)

    def _set_one_aside(self, adapter: AdapterRef, now_s: float, at_once: bool) -> bool:
        """Set a slot aside for an adapter; False if there is none that may be."""
        leaving = self._adapter_to_leave(now_s if at_once else now_s - LEAST_OPEN_SHARE * self._max_slot_wait_s)
        if leaving is None:
            return False
        self._set_aside[adapter] = leaving
        self._turns[leaving].closed_s = now_s
        return True

    def _adapter_to_leave(self, latest_s: float) -> AdapterRef | None:
        """Whose turn to end: of those that began theirs by then, with the fewest running requests, soonest done."""

        def cost(adapter: AdapterRef) -> tuple[int, int]:
            requests = self._turns[adapter].requests
            return len(requests), max(request.num_tokens_left for request in requests)

        may_leave = (
            adapter
            for adapter, turn in self._turns.items()
            if turn.closed_s is None and turn.since_s <= latest_s and not self._slots.is_pinned(adapter)
        )
        return min(may_leave, key=cost, default=None)

    def _is_of_use(self, adapter: AdapterRef, pinned: list[AdapterRef], waiting: WaitingQueues) -> bool:
        """Whether somebody still waits for the slot, and it is there or will be."""
        return (
            self._slots.wants_slot(adapter)
            and (adapter in pinned or adapter in waiting)
            # A pinned adapter takes the first slot that is free, also one set aside for another.
            and (self._set_aside[adapter] in self._turns or self._slots.can_activate(adapter))
        )

    def _drop(self, adapter: AdapterRef) -> None:
        leaving = self._set_aside.pop(adapter, None)
        if leaving in self._turns:
            self._turns[leaving].closed_s = None
