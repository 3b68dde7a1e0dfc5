"""The engine of one replica: requests in, tokens out, one step at a time."""

import itertools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.block_tables import BlockTables
from lora_core.engine.blocks import BlockPool
from lora_core.engine.constraint import ConstraintState
from lora_core.engine.grammars import Grammars
from lora_core.engine.prompt_scores import score_prompts
from lora_core.engine.request import Limits, Request, ScheduledBatch, check
from lora_core.engine.runner import ModelRunner
from lora_core.engine.sampler import Choice, sample
from lora_core.engine.sampler_state import SamplerState
from lora_core.engine.scheduler import Scheduler
from lora_core.engine.work_meter import WorkMeter
from lora_core.errors import AdapterError, AdapterLost, AdapterUnloaded, ConfigError, InvalidRequest
from lora_core.messages import EngineReady, GenerateRequest, SamplingParams, TokenDelta
from lora_core.types import AdapterRef, LoRAStatus
from lora_core.workload import Workload

WARM_UP_TOKENS = 16
"""Prompt length of `LLMEngine.warm_up`."""

WRITE_SHARE = 0.5
"""Of the shortest recent step: what a step may spend on writing adapters into slots while requests run, so that no gap
between two tokens comes near twice the usual."""

NUM_RECENT_STEPS = 8
"""Steps looked back at; among them some with long prompts, which say nothing of how long a token takes."""

SHORTEST_WRITE_S = 0.0005
"""What a step may always spend on writing: steps that are shorter yet need no protection."""

LONGEST_WAIT_S = 0.005
"""How long a step waits for files that are read, when it has nothing to run."""


class LLMEngine:
    """Decodes for many requests and adapters at once.

    One thread, the step thread, makes all calls; only `manager` may be used from others, as it says. What a user did
    wrong never raises: it comes back as a delta from the next `step`. What raises out of `step` is a fault of the
    engine itself; every request is then as it was before, and the process is best replaced.

    Tokens: a delta's `token_ids` include the end-of-text or stop token that ends an answer, as `generate` of
    transformers does, so an answer is exactly what the model chose. Whoever turns ids into text leaves that token out.

    Args:
        engine_config: The model, its device and its budgets.
        lora_config: Whether adapters are served; those of `lora_paths` are loaded before this returns.
        clock: Seconds, never falling: measures how long requests wait for a slot, and for how long those of an unloaded
            adapter go on.

    Raises:
        ConfigError: a setting cannot work, or an adapter of `lora_paths` was not loaded; it is named, with the reason.
    """

    def __init__(
        self,
        engine_config: EngineConfig,
        lora_config: LoRAConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = ModelRunner(engine_config, lora_config)
        self.manager = self.runner.manager
        for spec in lora_config.lora_paths:
            response = self.manager.load_adapter(spec)
            if response.status is not LoRAStatus.SUCCESS:
                raise ConfigError(f"lora_paths entry {spec!r}: {response.message}")
        pool = BlockPool(self.runner.num_blocks, engine_config.block_size)
        self._blocks = BlockTables(pool, share=engine_config.enable_prefix_caching)
        self._scheduler = Scheduler(
            self._blocks,
            self.manager,
            max_num_seqs=engine_config.max_num_seqs,
            max_num_batched_tokens=engine_config.max_num_batched_tokens,
            max_slot_wait_s=engine_config.max_slot_wait_s,
            max_loras_per_step=engine_config.max_loras_per_step,
            clock=clock,
        )
        self._max_num_seqs = engine_config.max_num_seqs
        self._eos_token_ids = eos_token_ids(engine_config.model)
        self._limits = Limits(
            max_model_len=self.runner.config.max_model_len,
            kv_cache_tokens=pool.num_blocks * pool.block_size,
            vocab_size=self.runner.config.vocab_size,
            eos_token_ids=self._eos_token_ids,
        )
        self._grammars = Grammars(engine_config.model, self._limits.vocab_size, self._eos_token_ids)
        self._requests: dict[str, Request] = {}
        # Requests that are accepted, and not queued before their constraint is compiled.
        self._compiling: dict[Request, Future[ConstraintState]] = {}
        self._refused: list[TokenDelta] = []
        self._arrivals = itertools.count()
        self._randomness = torch.Generator()
        self._randomness.seed()
        self._clock = clock
        self._drain_timeout_s = lora_config.drain_timeout_s
        # When a generation was first seen to be unloaded with requests in progress.
        self._retired_s: dict[AdapterRef, float] = {}
        self._recent_steps_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._work = WorkMeter(clock)

    @property
    def num_running(self) -> int:
        """Requests that hold a seat and KV blocks."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a seat, blocks, a slot, or the compilation of their constraint."""
        return self._scheduler.num_waiting + len(self._compiling)

    @property
    def prefix_cache_counts(self) -> tuple[int, int]:
        """Since the start: prompt tokens looked for in the prefix cache, and how many of them were there."""
        return self._blocks.num_queried_tokens, self._blocks.num_hit_tokens

    @property
    def preemption_counts(self) -> tuple[int, int]:
        """Since the start: how often a running request had to wait again for want of blocks, and for want of slots."""
        return self._scheduler.num_preempted, self._scheduler.num_put_back

    def ready(self) -> EngineReady:
        """What the engine can take. `max_model_len` is the longest prompt plus answer, the KV cache considered."""
        return EngineReady(
            max_model_len=min(self._limits.max_model_len, self._limits.kv_cache_tokens),
            num_slots=self.manager.num_slots,
            vocab_size=self._limits.vocab_size,
            eos_token_ids=sorted(self._eos_token_ids),
            kv_cache_tokens=self._limits.kv_cache_tokens,
            max_num_seqs=self._max_num_seqs,
        )

    def add_request(self, message: GenerateRequest) -> None:
        """Queue a request, and hold its adapter: it finishes with these weights even if the name is unloaded.

        A request that cannot be served is answered by the next `step`, with finish reason "error" and the error's
        class and sentence: InvalidRequest (out of range, too long, or an id that is in use, whose first request goes
        on), AdapterNotFound or LoRADisabled.
        """
        try:
            request = self._accept(message)
        except (InvalidRequest, AdapterError) as error:
            self._refused.append(_failure(message.request_id, str(error), type(error).__name__))
            return
        self._requests[request.request_id] = request
        self._work.came(request)
        if request.sampling.constraint is None:
            self._scheduler.add(request)
        else:
            self._compiling[request] = self._grammars.compile(request.sampling.constraint)

    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds, now; no delta follows. An unknown id is ignored."""
        self._refused = [delta for delta in self._refused if delta.request_id != request_id]
        request = self._requests.get(request_id)
        if request is not None:
            self._drop(request)

    def reset_adapter(self, name: str, reason: str) -> None:
        """End the requests of an adapter with AdapterLost, and have the next one find it read and written anew."""
        for request in list(self._requests.values()):
            if request.adapter is not None and request.adapter.name == name:
                self._drop(request)
                self._refused.append(_failure(request.request_id, reason, AdapterLost.__name__))
        self.manager.reset_adapter(name)

    def workload(self) -> Workload:
        """What was done since the last call, and is to be done now."""
        return msgspec.structs.replace(
            self._work.take(), load_ms_per_mib=self.manager.load_ms_per_mib(), slots=self.manager.slot_counts()
        )

    def has_work(self) -> bool:
        """Whether `step` has something to do or to say; adapters on their way into slots are something to do."""
        return bool(self._requests or self._refused) or self.manager.is_busy

    def step(self) -> list[TokenDelta]:
        """Run one batch, and return the tokens it produced and the requests that failed since the last step.

        A request fails here, with finish reason "error", when its adapter is needed from files that are gone or changed
        (AdapterLost), or when its adapter was unloaded or replaced and it has not ended `drain_timeout_s` later
        (AdapterUnloaded), or when its constraint does not compile or cannot be followed (InvalidRequest). With nothing
        to run, it waits a few milliseconds for what is being read or compiled.

        Returns:
            At most one delta for each request that is running; a finished one is forgotten here.
        """
        self._queue_compiled()
        self._end_overdue_requests()
        for ref in self.manager.take_dropped():
            self._blocks.forget_adapter(ref)
        self.manager.advance(max(SHORTEST_WRITE_S, WRITE_SHARE * min(self._recent_steps_s, default=0.0)))
        batch = self._schedule()
        if not batch.rows and self.manager.is_writing:
            # Nobody is kept waiting by it.
            self.manager.advance(None)
            batch = self._schedule()
        if batch.rows:
            self._work.begins(batch)
            started_s = time.perf_counter()
            deltas = self._run(batch)
            self._recent_steps_s.append(time.perf_counter() - started_s)
            self._work.ran(batch, self._recent_steps_s[-1])
        else:
            deltas = []
            if not self._refused and self.has_work():
                self._wait()
        deltas += self._refused
        self._refused = []
        return deltas

    def warm_up(self) -> None:
        """Run a short prompt and a decode step, through an adapter too if one is loaded, so that no user pays for it.

        Called before the first request.
        """
        assert not self._requests, "warm_up runs before the first request"
        longest = self.ready().max_model_len
        prompt = [0] * max(1, min(WARM_UP_TOKENS, longest - 2))
        max_tokens = min(2, longest - len(prompt))
        for name in (None, *itertools.islice(self.manager.loras, 1)):
            for temperature in (0.0, 1.0):
                sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=0.9, ignore_eos=True)
                self.add_request(GenerateRequest(f"warm-up {name} {temperature}", prompt, sampling, name))
        tokenizer = self._grammars.prepare()
        while self._requests:
            self.step()
        tokenizer.result()
        # Not what users ask for.
        self._work = WorkMeter(self._clock)

    def check_invariants(self) -> None:
        """Assert that requests, blocks, slots, pins and counts agree; costs time, for tests."""
        self.manager.check()
        self._scheduler.check()
        self.runner.check()
        known = len(self._requests)
        queued = self._scheduler.num_running + self._scheduler.num_waiting + len(self._compiling)
        assert known == queued, f"{known} requests are known and {queued} are queued or running"

    def _accept(self, message: GenerateRequest) -> Request:
        if message.request_id in self._requests:
            raise InvalidRequest(f"request id {message.request_id!r} is in use; give each request its own")
        check(message, self._limits)
        sampling = message.sampling
        # Last, because from here on the adapter must be released.
        adapter = None if message.lora_name is None else self.manager.acquire(message.lora_name)
        return Request(
            request_id=message.request_id,
            token_ids=list(message.prompt_token_ids),
            num_prompt_tokens=len(message.prompt_token_ids),
            arrival=next(self._arrivals),
            sampling=sampling,
            adapter=adapter,
            cache_salt=message.cache_salt,
            sampler=SamplerState.start(sampling, message.prompt_token_ids, self._eos_token_ids),
            # The logits of the whole prompt are needed, and shared blocks have none.
            may_share_blocks=sampling.prompt_logprobs is None,
        )

    def _schedule(self) -> ScheduledBatch:
        """The next batch; the requests it gives up are answered by this step."""
        batch = self._scheduler.schedule()
        for request, error in batch.lost:
            self._forget(request)
            self._refused.append(_failure(request.request_id, str(error), type(error).__name__))
        return batch

    def _end_overdue_requests(self) -> None:
        """End the requests of unloaded adapters that have had their time."""
        retired = self.manager.retired()
        if not retired and not self._retired_s:
            return
        now_s = self._clock()
        self._retired_s = {ref: self._retired_s.get(ref, now_s) for ref in retired}
        overdue = {ref for ref, since_s in self._retired_s.items() if now_s - since_s >= self._drain_timeout_s}
        for request in list(self._requests.values()):
            if request.adapter is None or request.adapter not in overdue:
                continue
            self._drop(request)
            message = (
                f"LoRA adapter {request.adapter.name!r} was unloaded or replaced, and the request did not end within "
                f"{self._drain_timeout_s:g} s of that; send it again, or raise lora_config.drain_timeout_s"
            )
            self._refused.append(_failure(request.request_id, message, AdapterUnloaded.__name__))

    def _run(self, batch: ScheduledBatch) -> list[TokenDelta]:
        """Compute a batch of at least one row, and choose the next token of each row that is due."""
        batch = ScheduledBatch(self.manager.sort_lora_batch(batch.rows))
        logits = self.runner.run(batch)
        batch, logits = self._without_late_rows(batch, score_prompts(batch.rows, logits))
        requests = [row.request for row in batch.rows if row.samples]
        choices = sample(
            logits,
            [request.sampling for request in requests],
            [request.sampler for request in requests],
            self._randomness,
        )
        self._scheduler.advance(batch)
        deltas = [self._advance(request, choice) for request, choice in zip(requests, choices, strict=True)]
        self._grammars.follow(
            [
                (request.sampler.constraint, request.token_ids[-1])
                for request in requests
                if request.sampler.constraint is not None and request.request_id in self._requests
            ]
        )
        return deltas

    def _without_late_rows(self, batch: ScheduledBatch, logits: Tensor) -> tuple[ScheduledBatch, Tensor]:
        """Leave out constrained rows of which it is not yet known what may come next: they are computed anew."""
        sampling = [row for row in batch.rows if row.samples]
        constraints = [one for row in sampling if (one := row.request.sampler.constraint) is not None]
        if constraints:
            self._grammars.settle(constraints)
        if all(one.is_ready for one in constraints):
            return batch, logits
        late = {id(row) for row in sampling if (one := row.request.sampler.constraint) is not None and not one.is_ready}
        kept = [place for place, row in enumerate(sampling) if id(row) not in late]
        return ScheduledBatch([row for row in batch.rows if id(row) not in late]), logits[kept]

    def _advance(self, request: Request, choice: Choice | None) -> TokenDelta:
        """Append the next token to a request's answer, and end the request if that was the last one."""
        if choice is None:
            self._scheduler.fail(request)
            self._forget(request)
            model = "the base model" if request.adapter is None else f"LoRA adapter {request.adapter.name!r}"
            return _failure(request.request_id, f"{model} gave logits that are not finite (NaN or infinity)")
        constraint = request.sampler.constraint
        if constraint is not None and constraint.error is not None:
            self._finish(request)
            return _failure(request.request_id, constraint.error, InvalidRequest.__name__)
        request.token_ids.append(choice.token_id)
        request.sampler.take(choice.token_id)
        reason = request.finish_reason(self._eos_token_ids)
        if reason is not None:
            self._finish(request)
        scores_prompt = request.sampling.prompt_logprobs is not None and request.num_output_tokens == 1
        num_cached_tokens = (request.num_cached_tokens or 0) if request.num_output_tokens == 1 else 0
        return TokenDelta(
            request.request_id,
            [choice.token_id],
            reason,
            logprobs=None if choice.logprobs is None else [choice.logprobs],
            prompt_logprobs=request.sampler.prompt_scores if scores_prompt else None,
            num_cached_tokens=num_cached_tokens,
        )

    def _queue_compiled(self) -> None:
        """Queue the requests whose constraints have been compiled, and refuse those whose cannot be."""
        for request, compilation in list(self._compiling.items()):
            if not compilation.done():
                continue
            del self._compiling[request]
            try:
                request.sampler.constraint = compilation.result()
            except InvalidRequest as error:
                self._forget(request)
                self._refused.append(_failure(request.request_id, str(error), type(error).__name__))
                continue
            # The queue is in order of arrival, and others have come to it meanwhile.
            request.arrival = next(self._arrivals)
            self._scheduler.add(request)

    def _wait(self) -> None:
        """With nothing to run: wait a little for what others do."""
        if self._compiling:
            wait(self._compiling.values(), LONGEST_WAIT_S, return_when=FIRST_COMPLETED)
        else:
            self.manager.wait(LONGEST_WAIT_S)

    def _drop(self, request: Request) -> None:
        """Forget a request, wherever it is, and free what it holds."""
        compilation = self._compiling.pop(request, None)
        if compilation is None:
            self._scheduler.abort(request)
        else:
            compilation.cancel()
        self._forget(request)

    def _finish(self, request: Request) -> None:
        self._scheduler.finish(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._work.ended(request)
        if request.adapter is not None:
            self.manager.release(request.adapter)


def eos_token_ids(folder: Path) -> frozenset[int]:
    """The ids that end an answer: those of generation_config.json, or else of config.json; there may be none."""
    found: int | list[int] | None = None
    if (folder / "generation_config.json").exists():
        found = GenerationConfig.from_pretrained(folder).eos_token_id
    if found is None:
        found = AutoConfig.from_pretrained(folder).eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def _failure(request_id: str, error: str, error_type: str = "EngineError") -> TokenDelta:
    return TokenDelta(request_id, [], "error", error, error_type)
