"""A scheduler with real blocks and real slots, stepped on a clock of its own with a model of one line."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lora_core.adapter_record import AdapterRecord, FolderStamp
from lora_core.adapters import AdapterTable
from lora_core.engine.block_tables import BlockTables
from lora_core.engine.blocks import BlockPool
from lora_core.engine.request import Request, ScheduledBatch
from lora_core.engine.scheduler import Scheduler
from lora_core.errors import AdapterLost
from lora_core.messages import SamplingParams
from lora_core.readiness import Readiness
from lora_core.types import AdapterRef

VOCAB = 251
STEP_S = 0.1


SIZE = 10
"""Bytes of every adapter's tensors."""


def record(name: str, num_bytes: int = SIZE) -> AdapterRecord:
    """What describes an adapter that no folder holds."""
    return AdapterRecord(
        path=Path("/adapters", name),
        stamp=FolderStamp((), False),
        content_hash=name,
        num_bytes=num_bytes,
        rank=1,
        ranks={"module": 1},
        phases_s={},
    )


class Slots:
    """The adapter table behind the manager's names; reads and slot writes take so many steps.

    Args:
        num_slots: Slots.
        host_adapters: Adapters that host memory holds.
        read_steps: Steps that a read takes; one is done at a time.
        write_steps: Steps that a write takes; 0 is at once.
    """

    def __init__(self, num_slots: int, host_adapters: int, read_steps: int, write_steps: int) -> None:
        self.table: AdapterTable[str] = AdapterTable(num_slots, host_adapters * SIZE)
        self.read_steps, self.write_steps = read_steps, write_steps
        self.reads: list[AdapterRef] = []
        self.lost: set[str] = set()
        self.can_activate = self.table.can_activate
        self.wants_slot = self.table.wants_slot
        self.slot_of = self.table.slot_of
        self.is_pinned = self.table.wanted.is_pinned
        self.pinned_without_slot = self.table.wanted.pinned_without_slot
        self.num_pins = self.table.num_pins
        self.pin = self.table.pin
        self.unpin = self.table.unpin
        self._reading: tuple[AdapterRef, int] | None = None
        self._writes: dict[AdapterRef, int] = {}

    def adapter(self, name: str) -> AdapterRef:
        found = self.table.find(name)
        return self.table.add(name, record(name), name) if found is None else found[0]

    def prepare(self, ref: AdapterRef, *, take_slot: bool) -> Readiness:
        found = self.table.prepare(ref, take_slot=take_slot and not self._writes)
        if found.slot is None:
            return found.readiness
        assert found.tensors == ref.name
        self._writes[ref] = self.write_steps
        return Readiness.READY if self._write(ref) else Readiness.WRITING

    def advance(self) -> None:
        """What happens between two steps."""
        for ref in list(self._writes):
            self._write(ref)
        for ref in self.table.wanted.pinned_without_slot():
            self.prepare(ref, take_slot=True)
        if not self._writes and (found := self.table.wanted.assign_warm_up()) is not None:
            self._writes[found[0]] = self.write_steps
            self._write(found[0])
        if self._reading is None and (job := self.table.reads.next()) is not None:
            self.reads.append(job[0])
            self._reading = job[0], self.read_steps
        if self._reading is not None:
            ref, left = self._reading
            self._reading = (ref, left - 1) if left > 1 else None
            if left <= 1 and ref.name in self.lost:
                self.table.reads.fail(ref, AdapterLost(f"{ref.name} is lost"))
            elif left <= 1:
                self.table.reads.end(ref, ref.name)

    def _write(self, ref: AdapterRef) -> bool:
        if not self.table.is_writing(ref):
            del self._writes[ref]
            return False
        self._writes[ref] -= 1
        if self._writes[ref] > 0:
            return False
        del self._writes[ref]
        self.table.finish_write(ref)
        return True


def next_token(text: list[int], adapter: AdapterRef | None) -> int:
    """A model: every token of the text, its place, and the adapter decide what follows."""
    salt = 0 if adapter is None else adapter.generation
    return (sum((place + 1) * token for place, token in enumerate(text)) + salt) % VOCAB


def answer(prompt: list[int], adapter: AdapterRef | None, max_tokens: int) -> list[int]:
    text = list(prompt)
    for _ in range(max_tokens):
        text.append(next_token(text, adapter))
    return text[len(prompt) :]


@dataclass
class Outcome:
    """What became of a request."""

    request: Request
    started_s: float | None = None
    finished_s: float | None = None
    error: AdapterLost | None = None


@dataclass
class SteppedScheduler:
    """Steps the scheduler, keeps a KV cache of (token, generation) by block, and reads answers only from there."""

    num_slots: int = 2
    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    max_slot_wait_s: float = 2.0
    max_loras_per_step: int | None = None
    share: bool = True
    checks: bool = True
    host_adapters: int = 10**6
    read_steps: int = 1
    write_steps: int = 0
    now_s: float = 0.0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    history: list[ScheduledBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = Slots(self.num_slots, self.host_adapters, self.read_steps, self.write_steps)
        self.blocks = BlockPool(self.num_blocks, self.block_size)
        self.tables = BlockTables(self.blocks, share=self.share)
        self.scheduler = Scheduler(
            self.tables,
            self.slots,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_slot_wait_s=self.max_slot_wait_s,
            max_loras_per_step=self.max_loras_per_step,
            clock=lambda: self.now_s,
        )
        self.cache: dict[tuple[int, int], tuple[int, AdapterRef | None]] = {}
        self.live: list[Request] = []

    def adapter(self, name: str) -> AdapterRef:
        return self.slots.adapter(name)

    def add(
        self, name: str | None, prompt: int = 3, max_tokens: int = 4, tokens: Sequence[int] | None = None
    ) -> Request:
        """Queue a request with the given prompt, or with one so long of its own."""
        arrival = len(self.outcomes)
        text = [(arrival * 7 + place) % VOCAB for place in range(prompt)] if tokens is None else list(tokens)
        request = Request(
            request_id=f"r{arrival}",
            token_ids=text,
            num_prompt_tokens=len(text),
            arrival=arrival,
            sampling=SamplingParams(max_tokens=max_tokens),
            adapter=None if name is None else self.slots.table.acquire(self.adapter(name).name),
        )
        self.outcomes[request.request_id] = Outcome(request)
        self.live.append(request)
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request)
        self._forget(request)
        self.check()

    def fail(self, request: Request) -> None:
        """End a running request as one whose logits are not finite."""
        self.scheduler.fail(request)
        self._forget(request)
        self.check()

    def reload(self, name: str) -> None:
        """Load a name's adapter anew, in place; nothing happens if it is not loaded."""
        if self.slots.table.find(name) is not None:
            self.slots.table.add(name, record(name), name, replace=True)

    def unload(self, name: str) -> None:
        """Unload an adapter, if it is loaded."""
        if self.slots.table.find(name) is not None:
            self.slots.table.retire(name)

    def _forget(self, request: Request) -> None:
        self.live.remove(request)
        if request.adapter is not None:
            self.slots.table.release(request.adapter)

    def step(self) -> ScheduledBatch:
        self.slots.advance()
        for ref in self.slots.table.take_dropped():
            self.tables.forget_adapter(ref)
        batch = self.scheduler.schedule()
        self.history.append(batch)
        for request, error in batch.lost:
            self.outcomes[request.request_id].error = error
            self._forget(request)
        self.check()
        assert batch.num_tokens <= self.max_num_batched_tokens
        assert len(batch.rows) <= self.max_num_seqs
        assert len({row.request.request_id for row in batch.rows}) == len(batch.rows)
        assert all(row.num_tokens > 0 for row in batch.rows)
        assert len({row.adapter for row in batch.rows} - {None}) <= (self.max_loras_per_step or self.num_slots)
        self.now_s += STEP_S
        sampling = [row.request for row in batch.rows if row.samples]
        for row in batch.rows:
            self._write(row.request, row.num_tokens)
        self.scheduler.advance(batch)
        for request in sampling:
            self._sample(request)
        self.check()
        return batch

    def _write(self, request: Request, num_tokens: int) -> None:
        outcome = self.outcomes[request.request_id]
        if outcome.started_s is None:
            outcome.started_s = self.now_s - STEP_S
        for place in range(request.num_computed, request.num_computed + num_tokens):
            self.cache[self._cell(request, place)] = (request.token_ids[place], request.adapter)

    def _sample(self, request: Request) -> None:
        read = [self.cache[self._cell(request, place)] for place in range(request.num_computed)]
        assert {adapter for _, adapter in read} == {request.adapter}
        request.token_ids.append(next_token([token for token, _ in read], request.adapter))
        if request.finish_reason(frozenset()) is not None:
            self.outcomes[request.request_id].finished_s = self.now_s
            self.scheduler.finish(request)
            self._forget(request)

    def _cell(self, request: Request, place: int) -> tuple[int, int]:
        return request.block_table[place // self.block_size], place % self.block_size

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.live:
                break
            self.step()
        assert not self.live, f"{len(self.live)} requests are not done after {max_steps} steps"
        assert self.blocks.num_free == self.num_blocks
        assert self.num_pins() == {}
        assert self.scheduler.schedule().rows == []

    def check(self) -> None:
        if not self.checks:
            return
        self.scheduler.check()
        self.slots.table.check()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        running = Counter(r.adapter for r in self.live if r.adapter is not None and self.running(r))
        assert running == self.num_pins()

    def num_pins(self) -> dict[AdapterRef, int]:
        """Pins of the adapters that have some."""
        refs = {outcome.request.adapter for outcome in self.outcomes.values()}
        pins = {ref: self.slots.table.num_pins(ref) for ref in refs if ref is not None}
        return {ref: count for ref, count in pins.items() if count}

    def assert_exact(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.token_ids[len(prompt) :] == answer(prompt, request.adapter, request.sampling.max_tokens)

    def running(self, request: Request) -> bool:
        return bool(request.block_table) and not request.is_parked
