"""Which requests run in the next step, by three budgets: tokens, KV blocks and adapter slots.

Running requests come first, then waiting ones. These rules keep it fair:

- Blocks: a running request that needs one takes it, when none is free, from one that was put back or else from the
  newest running request, which gives all of its own back and waits again. The oldest request is never stopped.
- Seats: each adapter has a queue of its own, and the base model has one. The next request to start is that of the
  queue that has been served least since it began to wait, in tokens (start-time fair queueing, Goyal et al. 1996), so
  that a thousand waiting requests of one adapter are in nobody else's way.
- Slots: a request whose adapter has no slot, and for which none can be freed, holds up nobody. It gets one within a
  bounded time (`lora_core.engine.slot_turns`).

An adapter whose files have to be read, or whose slot is being written, is not there yet: its requests are passed over
too, and no slot is set aside for one that could not use it.
"""

import heapq
import itertools
import time
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from lora_core.engine.block_tables import BlockTables
from lora_core.engine.request import Request, ScheduledBatch, ScheduledRow
from lora_core.engine.slot_turns import SlotState, SlotTurns
from lora_core.engine.step_adapters import StepAdapters
from lora_core.engine.waiting import WaitingQueues
from lora_core.errors import AdapterLost
from lora_core.readiness import Readiness
from lora_core.types import AdapterRef

# Waiting adapters that are asked for in a step: those that have waited longest, and others by turns.
NUM_ASKED_FIRST, NUM_ASKED_BY_TURNS = 16, 16
# Counts of served tokens from which on those that make no difference are looked for.
LEAST_SERVED = 256


class AdapterSlots(SlotState, Protocol):
    """What the scheduler asks of the adapter manager (`LoRAManagerV3` says what each means).

    `pin` and `unpin` count requests that run: an adapter with one keeps its slot. `is_pinned` is the operator's wish.
    """

    def prepare(self, ref: AdapterRef, /, *, take_slot: bool) -> Readiness: ...
    def slot_of(self, ref: AdapterRef, /) -> int | None: ...
    def num_pins(self, ref: AdapterRef, /) -> int: ...
    def pin(self, ref: AdapterRef, /) -> None: ...
    def unpin(self, ref: AdapterRef, /) -> None: ...


class Scheduler:
    """Continuous batching over one KV cache and one set of adapter slots; all calls come from the step thread.

    Args:
        blocks: The block tables of requests; the scheduler alone fills and empties them.
        slots: The adapter manager.
        max_num_seqs: Most requests that run at once.
        max_num_batched_tokens: Most tokens in one step.
        max_slot_wait_s: How long an adapter with requests may have to wait for a slot.
        max_loras_per_step: Most adapters in one step; None is as many as there are slots.
        clock: Seconds, never falling.

    Attributes:
        num_preempted: How often a running request gave its blocks back and waited again, for want of blocks.
        num_put_back: How often one waited again, with its blocks, because its adapter's turn in a slot was over.
    """

    def __init__(
        self,
        blocks: BlockTables,
        slots: AdapterSlots,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_slot_wait_s: float,
        max_loras_per_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_preempted = 0
        self.num_put_back = 0
        self._blocks = blocks
        self._slots = slots
        # Of those that decode each one needs a token in every step.
        self._max_running = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting = WaitingQueues(clock)
        # In order of arrival.
        self._running: list[Request] = []
        self._turns = SlotTurns(slots, max_slot_wait_s, clock)
        self._step_adapters = StepAdapters(max_loras_per_step)
        # Not running, and in a slot or on the way into one, as far as is known.
        self._resident: set[AdapterRef] = set()
        # Tokens that were computed for each queue, and are still to come of its requests that run.
        self._served: dict[AdapterRef | None, float] = {}
        # What a queue that begins to wait starts from, so that nobody saves time up: the count of the queue that was
        # served last, and at least what is computed, shared equally among all that wait or run.
        self._level = 0.0
        self._most_served = LEAST_SERVED

    @property
    def num_waiting(self) -> int:
        """Requests in the queues, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request. Its `arrival` is higher than that of any before, and the cache can hold it alone."""
        self._queue(request)
        if request.adapter is not None and self._slots.slot_of(request.adapter) is not None:
            self._resident.add(request.adapter)

    def abort(self, request: Request) -> None:
        """Forget a request, waiting or running, and free what it holds."""
        if request.block_table and not request.is_parked:
            self.finish(request)
        else:
            self._waiting.remove(request)
            self._blocks.release(request)

    def finish(self, request: Request) -> None:
        """Free the blocks and the slot pin of a running request."""
        self._stop(request)
        self._blocks.release(request)

    def _stop(self, request: Request) -> None:
        """Let a request run no more; what it was still to come to is not charged to its queue."""
        self._running.remove(request)
        if request.adapter in self._served:
            self._served[request.adapter] -= request.num_tokens_left
        if request.adapter is not None:
            self._slots.unpin(request.adapter)
            self._turns.end(request, request.adapter, self._waiting)
            self._resident.add(request.adapter)

    def fail(self, request: Request) -> None:
        """End a request whose keys and values may be wrong: nobody is to share them."""
        self._blocks.forget(request)
        self.abort(request)

    def advance(self, batch: ScheduledBatch) -> None:
        """Take note that a scheduled batch has been computed; its requests are those that were scheduled."""
        self.launch(batch)
        for row in batch.rows:
            self._blocks.settle(row.request, row.request.num_computed)

    def launch(self, batch: ScheduledBatch) -> None:
        """Take note that a scheduled batch is being computed. The next one may be scheduled meanwhile.

        Each request that is to get a token by it has `PENDING` put at the end of its own before that. `settle` follows
        for each row, unless its request has given its blocks back in between.
        """
        for row in batch.rows:
            self._blocks.extend(row.request, row.num_tokens)
        if self._waiting:
            running = {request.adapter for request in self._running}
            num_others = sum(adapter not in self._waiting for adapter in running)
            self._level += batch.num_tokens / (self._waiting.num_queues + num_others)

    def settle(self, request: Request, num_tokens: int) -> None:
        """Take note that the first `num_tokens` tokens of a request are known, and computed."""
        self._blocks.settle(request, num_tokens)

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's rows: running requests that decode, those still in their prompt, newly admitted ones.

        Their blocks are allocated and their adapters are in slots, pinned, when this returns. The caller runs the
        rows, then calls `advance` and appends what was sampled. Waiting requests whose adapter's files are lost are
        forgotten, and named in the batch.
        """
        self._grow_running()
        for request in self._turns.update(self._waiting):
            self._blocks.park(request)
            self._put_back(request)
            self.num_put_back += 1
        self._step_adapters.choose(self._turns.running())
        runs = self._step_adapters.admits
        # Decoding requests first, one token each: a long prompt may slow answers that have begun, never stop them.
        rows = [ScheduledRow(r, 1) for r in self._running if r.num_uncomputed == 1 and r.may_go_on and runs(r.adapter)]
        budget = self._max_num_batched_tokens - len(rows)
        for request in self._running:
            if budget and request.num_uncomputed > 1 and runs(request.adapter):
                rows.append(ScheduledRow(request, min(budget, request.num_uncomputed)))
                budget -= rows[-1].num_tokens
        lost: dict[AdapterRef, AdapterLost] = {}
        if budget and self._waiting and len(self._running) < self._max_running:
            rows += self._admit(budget, lost)
        self._step_adapters.ran(rows)
        return ScheduledBatch(rows, list(self._give_up(lost)))

    def _give_up(self, lost: Mapping[AdapterRef, AdapterLost]) -> Iterator[tuple[Request, AdapterLost]]:
        """Forget the waiting requests of lost adapters."""
        for adapter, error in lost.items():
            for request in self._waiting.drop(adapter):
                self._blocks.release(request)
                yield request, error

    def _grow_running(self) -> None:
        """Give every running request the blocks of its known tokens, oldest first, preempting from the newest end."""
        index = 0
        while index < len(self._running):
            # One whose last token is on its way needs no room for it.
            if not self._running[index].may_go_on or self._blocks.grow(self._running[index]):
                index += 1
            else:
                newest = self._running[-1]
                self._put_back(newest)
                self._blocks.release(newest)
                self.num_preempted += 1

    def _put_back(self, request: Request) -> None:
        """Let a running request wait again."""
        self._stop(request)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        if request.adapter not in self._waiting:
            self._served[request.adapter] = max(self._level, self._served.get(request.adapter, 0.0))
        self._waiting.add(request)

    def _admit(self, budget: int, lost: dict[AdapterRef, AdapterLost]) -> list[ScheduledRow]:
        """Start waiting requests, of the queue served least first, while tokens, seats and blocks last.

        Those whose adapter is not ready are passed over; adapters whose files are lost are put into `lost`.
        """
        rows: list[ScheduledRow] = []
        candidates = self._candidates()
        heapq.heapify(candidates)
        while candidates and budget and len(self._running) < self._max_running:
            served, _, _, adapter = candidates[0]
            request = self._waiting.first(adapter)
            if adapter is not None and not self._is_ready(adapter, request, lost):
                heapq.heappop(candidates)
                continue
            # Whoever waits for blocks waits in front: smaller requests behind would keep it there.
            if not self._has_blocks(request):
                self._level = max(self._level, served)
                # Meanwhile the adapters of the others come nearer, and those that are lost are told of.
                for _, _, _, adapter in candidates[1:]:
                    if adapter is not None:
                        self._is_ready(adapter, None, lost)
                break
            self._start(request, served)
            if self._step_adapters.admits(adapter):
                rows.append(ScheduledRow(request, min(budget, request.num_uncomputed)))
                budget -= rows[-1].num_tokens
            if adapter in self._waiting:
                heapq.heapreplace(candidates, self._candidate(adapter, self._served[adapter]))
            else:
                heapq.heappop(candidates)
        return rows

    def _candidates(self) -> list[tuple[float, float, int, AdapterRef | None]]:
        """The queues that may start a request in this step: what they have been served, and how long they wait."""
        running = [adapter for adapter in self._turns.running() if adapter in self._waiting]
        known = itertools.chain(self._resident, self._turns.pinned_without_slot)
        self._resident = {adapter for adapter in known if adapter in self._waiting}
        oldest = self._waiting.oldest(NUM_ASKED_FIRST, self._turns)
        absent = dict.fromkeys(itertools.chain(self._resident, oldest, self._waiting.some(NUM_ASKED_BY_TURNS)))
        found = [self._candidate(adapter, self._served[adapter]) for adapter in running]
        # Among those of which no request runs it is first come, first served; to the others they are as one queue that
        # has been served as little as any of them.
        least = float("inf")
        in_order = sorted((self._candidate(a, 0.0)[1:] for a in absent if a not in self._turns), reverse=True)
        for since_s, arrival, adapter in in_order:
            least = min(least, self._served[adapter])
            found.append((least, since_s, arrival, adapter))
        if None in self._waiting:
            found.append(self._candidate(None, self._served[None]))
        return found

    def _candidate(self, adapter: AdapterRef | None, served: float) -> tuple[float, float, int, AdapterRef | None]:
        return served, self._waiting.since_s(adapter), self._waiting.first(adapter).arrival, adapter

    def _has_blocks(self, request: Request | None) -> bool:
        # Each running request keeps a block to grow into, or admission and preemption would chase each other.
        return request is not None and self._blocks.fits(request, len(self._running))

    def _is_ready(self, adapter: AdapterRef, request: Request | None, lost: dict[AdapterRef, AdapterLost]) -> bool:
        """Bring the adapter of a waiting request nearer to a slot; to one that it takes only for a request.

        Returns:
            Whether the request may start or, without blocks, could have its slot.
        """
        if self._turns.is_closed(adapter):
            return False
        if adapter in self._turns:
            return True
        may_take_slot = self._turns.may_take_slot(adapter)
        try:
            # A slot taken long before the request can run would be missing elsewhere.
            take_slot = may_take_slot and self._slots.can_activate(adapter) and self._has_blocks(request)
            readiness = self._slots.prepare(adapter, take_slot=take_slot)
        except AdapterLost as error:
            lost[adapter] = error
            return False
        if readiness in (Readiness.READING, Readiness.WRITING):
            self._turns.is_on_its_way(adapter)
        if readiness in (Readiness.READY, Readiness.WRITING):
            self._resident.add(adapter)
        else:
            self._resident.discard(adapter)
        if readiness is Readiness.SLOT_AVAILABLE:
            # With blocks it would have got the slot, were it not for another slot that is being written.
            return may_take_slot and not self._has_blocks(request)
        return readiness is Readiness.READY

    def _start(self, request: Request, served: float) -> None:
        """Begin to run a waiting request of a queue that counts as one that has been served so much."""
        self._waiting.remove(request)
        self._level = max(self._level, served)
        self._blocks.start(request)
        self._served[request.adapter] += request.num_tokens_left
        if len(self._served) > self._most_served:
            self._forget_served()
        if request.adapter is not None:
            self._slots.pin(request.adapter)
            self._turns.begin(request, request.adapter)
            self._step_adapters.add(request.adapter)
        request.num_outputs_before = request.num_output_tokens
        insort(self._running, request, key=lambda running: running.arrival)

    def _forget_served(self) -> None:
        """Forget the counts that make no difference any more."""
        self._served = {
            adapter: served
            for adapter, served in self._served.items()
            if served > self._level or adapter in self._waiting or adapter in self._turns
        }
        self._most_served = max(LEAST_SERVED, 2 * len(self._served))

    def check(self) -> None:
        """Assert that requests, blocks, slots and counts agree."""
        assert all(a.arrival < b.arrival for a, b in itertools.pairwise(self._running)), "running out of order"
        assert len(self._running) <= self._max_running, f"{len(self._running)} requests run of {self._max_running}"
        self._waiting.check()
        self._blocks.check(self._running)
        self._turns.check(self._running)
        assert all(request.adapter in self._served for request in self._waiting), "a queue has no count"
        for adapter in self._turns.running():
            count = self._turns.num_running(adapter)
            assert self._slots.slot_of(adapter) is not None, f"{adapter.name} runs without a slot"
            assert self._slots.num_pins(adapter) == count, f"{adapter.name} has {count} requests and other pins"
