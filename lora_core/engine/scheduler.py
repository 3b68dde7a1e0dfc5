"""Which requests run in the next step, by three budgets: tokens, KV blocks and adapter slots.

Running requests come first, then waiting ones in order of arrival. Two rules keep this fair:

- Blocks: a running request that needs one takes it, when none is free, from the newest running request, which gives
  all of its own back and is computed anew later. The oldest request is therefore never stopped.
- Slots: a request whose adapter has no slot, and for which none can be freed, is passed over; it holds up nobody. Once
  the oldest such request has been passed over for `max_slot_wait_s`, a slot is set aside for it: an adapter in a slot
  admits nothing more until its running requests are done, and no other newcomer may take a slot before the adapter
  that waits. The requests of the drained adapter then wait their turn in the same way.
- Pins: a slot is set aside at once for an adapter that the operator pinned, as its tensors keep memory meanwhile.

An adapter whose files have to be read, or whose slot is being written, is not there yet: its requests are passed over
too, and no slot is set aside for one that could not use it.
"""

import itertools
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lora_core.engine.blocks import BlockPool
from lora_core.engine.request import Request, ScheduledBatch, ScheduledRow
from lora_core.errors import AdapterLost
from lora_core.readiness import Readiness
from lora_core.types import AdapterRef


class AdapterSlots(Protocol):
    """What the scheduler asks of the adapter manager (`LoRAManagerV3` says what each means).

    `pin` and `unpin` count requests that run: an adapter with one keeps its slot. `is_pinned` is the operator's wish.
    """

    def prepare(self, ref: AdapterRef, /, *, take_slot: bool) -> Readiness: ...
    def can_activate(self, ref: AdapterRef, /) -> bool: ...
    def wants_slot(self, ref: AdapterRef, /) -> bool: ...
    def slot_of(self, ref: AdapterRef, /) -> int | None: ...
    def is_pinned(self, ref: AdapterRef, /) -> bool: ...
    def pinned_without_slot(self) -> Sequence[AdapterRef]: ...
    def num_pins(self, ref: AdapterRef, /) -> int: ...
    def pin(self, ref: AdapterRef, /) -> None: ...
    def unpin(self, ref: AdapterRef, /) -> None: ...


@dataclass(frozen=True)
class _Reservation:
    """A slot set aside: `draining` admits nothing, so that `waiting` gets a slot."""

    waiting: AdapterRef
    draining: AdapterRef


class Scheduler:
    """Continuous batching over one KV cache and one set of adapter slots; all calls come from the step thread.

    Args:
        blocks: The KV cache's blocks; the scheduler alone takes and frees them.
        slots: The adapter manager.
        max_num_seqs: Most requests that run at once.
        max_num_batched_tokens: Most tokens in one step.
        max_slot_wait_s: How long a request may be passed over for a slot before one is set aside for it.
        clock: Seconds, never falling.
    """

    def __init__(
        self,
        blocks: BlockPool,
        slots: AdapterSlots,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_slot_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks = blocks
        self._slots = slots
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_slot_wait_s = max_slot_wait_s
        self._clock = clock
        # Both in order of arrival.
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        # Of every adapter with running requests: how many, and since when without a gap.
        self._num_running: dict[AdapterRef, int] = {}
        self._slotted_s: dict[AdapterRef, float] = {}
        self._reservation: _Reservation | None = None

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request. Its `arrival` is higher than that of any before, and the cache can hold it alone."""
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """Forget a request, waiting or running, and free what it holds."""
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self.finish(request)

    def finish(self, request: Request) -> None:
        """Free the blocks and the slot pin of a running request."""
        self._running.remove(request)
        self._release(request)

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's rows: running requests that decode, those still in their prompt, newly admitted ones.

        Their blocks are allocated and their adapters are in slots, pinned, when this returns. The caller runs the
        rows, then advances `num_computed` by each row's `num_tokens` and appends what was sampled. Waiting requests
        whose adapter's files are lost are forgotten, and named in the batch.
        """
        self._grow_running()
        # Decoding requests first, one token each: a long prompt may slow answers that have begun, never stop them. The
        # budget holds them all, because a request is only admitted in a step that has a token for each one running.
        rows = [ScheduledRow(request, 1) for request in self._running if request.num_uncomputed == 1]
        budget = self._max_num_batched_tokens - len(rows)
        for request in self._running:
            if budget and request.num_uncomputed > 1:
                rows.append(ScheduledRow(request, min(budget, request.num_uncomputed)))
                budget -= rows[-1].num_tokens
        lost: dict[AdapterRef, AdapterLost] = {}
        rows += self._admit(budget, lost)
        return ScheduledBatch(rows, self._give_up(lost))

    def _grow_running(self) -> None:
        """Give every running request the blocks of its known tokens, oldest first, preempting from the newest end."""
        index = 0
        while index < len(self._running):
            request = self._running[index]
            if self._num_missing_blocks(request) <= self._blocks.num_free:
                request.block_table += self._blocks.allocate(self._num_missing_blocks(request))
                index += 1
            else:
                self._preempt(self._running[-1])

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.num_computed = 0
        insort(self._waiting, request, key=lambda waiting: waiting.arrival)

    def _release(self, request: Request) -> None:
        self._blocks.free(request.block_table)
        if request.adapter is not None:
            self._slots.unpin(request.adapter)
            self._num_running[request.adapter] -= 1
            if not self._num_running[request.adapter]:
                del self._num_running[request.adapter], self._slotted_s[request.adapter]

    def _admit(self, budget: int, lost: dict[AdapterRef, AdapterLost]) -> list[ScheduledRow]:
        """Start waiting requests in order of arrival while tokens, seats and blocks last.

        Those whose adapter is not ready are passed over; adapters whose files are lost are put into `lost`.
        """
        self._update_reservation()
        rows: list[ScheduledRow] = []
        # Of adapters that are not ready: whether a slot is what they lack.
        waits_for_slot: dict[AdapterRef | None, bool] = {}
        for request in self._waiting:
            if not budget or len(self._running) >= self._max_num_seqs:
                break
            adapter = request.adapter
            if adapter in waits_for_slot:
                self._pass_over(request, waits_for_slot[adapter])
                continue
            has_blocks = self._has_blocks(request)
            if adapter is not None:
                readiness = self._prepare(adapter, has_blocks, lost)
                if readiness is not Readiness.READY:
                    waits_for_slot[adapter] = readiness is Readiness.NO_SLOT
                    self._pass_over(request, waits_for_slot[adapter])
                    continue
            # Whoever waits for blocks waits at the head of the queue: smaller requests behind would keep it there.
            if not has_blocks:
                break
            self._start(request)
            rows.append(ScheduledRow(request, min(budget, request.num_uncomputed)))
            budget -= rows[-1].num_tokens
        if rows:
            started = {row.request.request_id for row in rows}
            self._waiting = [request for request in self._waiting if request.request_id not in started]
        return rows

    def _pass_over(self, request: Request, waits_for_slot: bool) -> None:
        if waits_for_slot and request.passed_over_s is None:
            request.passed_over_s = self._clock()

    def _prepare(self, adapter: AdapterRef, has_blocks: bool, lost: dict[AdapterRef, AdapterLost]) -> Readiness:
        """Bring the adapter of a waiting request nearer to a slot.

        Returns:
            READY if the request may start or, without blocks, could have its slot; NO_SLOT if it lacks one, also one
            that is set aside for another; READING or WRITING if it will be there without more ado.
        """
        reservation = self._reservation
        may_take_slot = reservation is None or adapter == reservation.waiting
        try:
            # A slot taken long before the request can run would be missing elsewhere.
            readiness = self._slots.prepare(adapter, take_slot=may_take_slot and has_blocks)
        except AdapterLost as error:
            lost[adapter] = error
            return Readiness.READING
        if readiness in (Readiness.READING, Readiness.WRITING):
            if reservation is not None and adapter == reservation.waiting:
                self._reservation = None
            return readiness
        if reservation is not None and adapter == reservation.draining:
            return Readiness.NO_SLOT
        if readiness is Readiness.SLOT_AVAILABLE:
            # With blocks it would have got the slot, were it not for another slot that is being written.
            return Readiness.READY if may_take_slot and not has_blocks else Readiness.NO_SLOT
        return readiness

    def _give_up(self, lost: Mapping[AdapterRef, AdapterLost]) -> list[tuple[Request, AdapterLost]]:
        """Forget the waiting requests of lost adapters."""
        if not lost:
            return []
        given_up = [request for request in self._waiting if request.adapter in lost]
        self._waiting = [request for request in self._waiting if request.adapter not in lost]
        return [(request, lost[request.adapter]) for request in given_up if request.adapter is not None]

    def _has_blocks(self, request: Request) -> bool:
        # Each running request keeps a block to grow into, or admission and preemption would chase each other.
        return self._num_missing_blocks(request) + len(self._running) <= self._blocks.num_free

    def _start(self, request: Request) -> None:
        if request.adapter is not None:
            self._slots.pin(request.adapter)
            self._num_running[request.adapter] = self._num_running.get(request.adapter, 0) + 1
            self._slotted_s.setdefault(request.adapter, self._clock())
            if self._reservation is not None and request.adapter == self._reservation.waiting:
                self._reservation = None
        request.passed_over_s = None
        request.block_table += self._blocks.allocate(self._num_missing_blocks(request))
        insort(self._running, request, key=lambda running: running.arrival)

    def _num_missing_blocks(self, request: Request) -> int:
        return self._blocks.blocks_for(len(request.token_ids)) - len(request.block_table)

    def _update_reservation(self) -> None:
        """Drop a reservation that nobody could use; make one for a pinned adapter or a request passed over too long."""
        pinned = self._slots.pinned_without_slot()
        if self._reservation is not None:
            if self._is_of_use(self._reservation, pinned):
                return
            self._reservation = None
        deadline_s = self._clock() - self._max_slot_wait_s
        overdue = (
            request.adapter
            for request in self._waiting
            if request.adapter is not None and request.passed_over_s is not None and request.passed_over_s <= deadline_s
        )
        for waiting in itertools.chain(pinned, overdue):
            if self._slots.wants_slot(waiting) and not self._slots.can_activate(waiting):
                draining = self._adapter_to_drain(deadline_s)
                if draining is not None:
                    self._reservation = _Reservation(waiting, draining)
                return

    def _is_of_use(self, reservation: _Reservation, pinned: Sequence[AdapterRef]) -> bool:
        """Whether somebody still waits for the slot, and it is there or will be."""
        waiting, draining = reservation.waiting, reservation.draining
        return (
            self._slots.wants_slot(waiting)
            and (waiting in pinned or any(request.adapter == waiting for request in self._waiting))
            # A pinned adapter takes the first slot that is free, also one set aside for another.
            and (draining in self._num_running or self._slots.can_activate(waiting))
        )

    def _adapter_to_drain(self, deadline_s: float) -> AdapterRef | None:
        """The adapter to stop admitting: one that had its turn, with the fewest running requests, soonest done.

        None if only pinned adapters run: their slots would not be given up.

        An adapter that came to its slot less than `max_slot_wait_s` ago is spared while there is another, or those
        that just got a slot would pay for one that keeps its own under steady load.
        """

        def cost(adapter: AdapterRef) -> tuple[bool, int, int]:
            longest = max(request.num_tokens_left for request in self._running if request.adapter == adapter)
            return self._slotted_s[adapter] > deadline_s, self._num_running[adapter], longest

        return min((ref for ref in self._num_running if not self._slots.is_pinned(ref)), key=cost, default=None)

    def check(self) -> None:
        """Assert that requests, blocks, slots and counts agree."""
        for queue in (self._running, self._waiting):
            assert all(a.arrival < b.arrival for a, b in itertools.pairwise(queue)), "a queue is out of order"
        self._blocks.check(request.block_table for request in self._running)
        assert len(self._running) <= self._max_num_seqs, f"{len(self._running)} requests run of {self._max_num_seqs}"
        for request in self._waiting:
            held = len(request.block_table) + request.num_computed
            assert not held, f"{request.request_id} waits and holds blocks or computed tokens"
        for request in self._running:
            num_blocks = len(request.block_table)
            assert self._blocks.blocks_for(request.num_computed) <= num_blocks, f"{request.request_id} lacks blocks"
            assert num_blocks <= self._blocks.blocks_for(len(request.token_ids)), f"{request.request_id} hoards blocks"
        running = Counter(request.adapter for request in self._running if request.adapter is not None)
        assert running == self._num_running, f"{running} run and {self._num_running} are counted"
        assert running.keys() == self._slotted_s.keys(), f"{running} run and {self._slotted_s} have times"
        for adapter, count in running.items():
            assert self._slots.slot_of(adapter) is not None, f"{adapter.name} runs without a slot"
            assert self._slots.num_pins(adapter) == count, f"{adapter.name} has {count} requests and other pins"
