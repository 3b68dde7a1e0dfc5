"""A scheduler with real blocks and real slots, stepped on a clock of its own with a model of one line."""

from collections import Counter
from dataclasses import dataclass, field

from lora_core.adapters import AdapterTable
from lora_core.engine.blocks import BlockPool
from lora_core.engine.request import Request, ScheduledBatch
from lora_core.engine.scheduler import Scheduler
from lora_core.messages import SamplingParams
from lora_core.types import AdapterRef

VOCAB = 251
STEP_S = 0.1


class Slots(AdapterTable[str]):
    """The adapter table behind the manager's name for activation, counting pins."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.pins: Counter[AdapterRef] = Counter()

    def activate_adapter(self, ref: AdapterRef) -> int:
        return self.activate(ref).slot

    def pin(self, ref: AdapterRef) -> None:
        super().pin(ref)
        self.pins[ref] += 1

    def unpin(self, ref: AdapterRef) -> None:
        super().unpin(ref)
        self.pins[ref] -= 1


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


@dataclass
class SteppedScheduler:
    """Steps the scheduler, keeps a KV cache of (token, generation) by block, and reads answers only from there."""

    num_slots: int = 2
    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    max_slot_wait_s: float = 2.0
    checks: bool = True
    now_s: float = 0.0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    history: list[ScheduledBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = Slots(self.num_slots)
        self.blocks = BlockPool(self.num_blocks, self.block_size)
        self.scheduler = Scheduler(
            self.blocks,
            self.slots,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_slot_wait_s=self.max_slot_wait_s,
            clock=lambda: self.now_s,
        )
        self.cache: dict[tuple[int, int], tuple[int, AdapterRef | None]] = {}
        self.live: list[Request] = []

    def adapter(self, name: str) -> AdapterRef:
        found = self.slots.find(name)
        return self.slots.add(name, name) if found is None else found[0]

    def add(self, name: str | None, prompt: int = 3, max_tokens: int = 4) -> Request:
        arrival = len(self.outcomes)
        request = Request(
            request_id=f"r{arrival}",
            token_ids=[(arrival * 7 + place) % VOCAB for place in range(prompt)],
            num_prompt_tokens=prompt,
            arrival=arrival,
            sampling=SamplingParams(max_tokens=max_tokens),
            adapter=None if name is None else self.adapter(name),
        )
        self.outcomes[request.request_id] = Outcome(request)
        self.live.append(request)
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request)
        self.live.remove(request)
        self.check()

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self.history.append(batch)
        self.check()
        assert batch.num_tokens <= self.max_num_batched_tokens
        assert len(batch.rows) <= self.max_num_seqs
        assert len({row.request.request_id for row in batch.rows}) == len(batch.rows)
        assert all(row.num_tokens > 0 for row in batch.rows)
        assert len({row.adapter for row in batch.rows} - {None}) <= self.num_slots
        self.now_s += STEP_S
        for row in batch.rows:
            self._run(row.request, row.num_tokens, row.samples)
        self.check()
        return batch

    def _run(self, request: Request, num_tokens: int, samples: bool) -> None:
        outcome = self.outcomes[request.request_id]
        if outcome.started_s is None:
            outcome.started_s = self.now_s - STEP_S
        for place in range(request.num_computed, request.num_computed + num_tokens):
            self.cache[self._cell(request, place)] = (request.token_ids[place], request.adapter)
        request.num_computed += num_tokens
        if samples:
            read = [self.cache[self._cell(request, place)] for place in range(request.num_computed)]
            assert {adapter for _, adapter in read} == {request.adapter}
            request.token_ids.append(next_token([token for token, _ in read], request.adapter))
            if request.finish_reason(frozenset()) is not None:
                outcome.finished_s = self.now_s
                self.scheduler.finish(request)
                self.live.remove(request)

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
        assert not +self.slots.pins
        assert self.scheduler.schedule().rows == []

    def check(self) -> None:
        if not self.checks:
            return
        self.scheduler.check()
        self.slots.check()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        running = Counter(r.adapter for r in self.live if r.adapter is not None and r.block_table)
        assert running == +self.slots.pins

    def assert_exact(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.token_ids[len(prompt) :] == answer(prompt, request.adapter, request.sampling.max_tokens)

    def running(self, request: Request) -> bool:
        return bool(request.block_table)
