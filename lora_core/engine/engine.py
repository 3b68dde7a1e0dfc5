"""The engine of one replica: requests in, tokens out, one step at a time."""

import itertools
import time
from collections.abc import Callable

import torch

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.block_tables import BlockTables
from lora_core.engine.blocks import BlockPool
from lora_core.engine.compilations import Compilations
from lora_core.engine.deltas import failure, overdue, token_delta, wrong_logits
from lora_core.engine.drain import Drain
from lora_core.engine.end_of_text import eos_token_ids
from lora_core.engine.engine_account import EngineAccount
from lora_core.engine.grammars import Grammars
from lora_core.engine.kernel_variants import Progress
from lora_core.engine.late_rows import without_late_rows
from lora_core.engine.memory_sizes import memory_faults
from lora_core.engine.open_requests import OpenRequests
from lora_core.engine.prompt_scores import score_prompts
from lora_core.engine.request import Limits, Request, ScheduledBatch, check
from lora_core.engine.runner import ModelRunner
from lora_core.engine.sampler import Choice, sample
from lora_core.engine.scheduler import Scheduler
from lora_core.engine.steps_ahead import StepsAhead
from lora_core.engine.warm_up import ignore_progress, warm_up_requests
from lora_core.errors import AdapterError, AdapterLost, ConfigError, InvalidRequest, LoRAFleetError
from lora_core.messages import EngineReady, GenerateRequest, TokenDelta, TokenLogprobs
from lora_core.types import LoRAStatus
from lora_core.workload import CacheCounts, Workload

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
        self._open = OpenRequests()
        self._compilations = Compilations()
        self._arrivals = itertools.count()
        self._randomness = torch.Generator()
        self._randomness.seed()
        runs_ahead = engine_config.async_scheduling
        self._ahead = StepsAhead(
            self._scheduler,
            self,
            self._randomness,
            is_on=self.runner.can_run_ahead
            and (self.runner.device.type == "cuda" if runs_ahead is None else runs_ahead),
        )
        self._clock = clock
        self._drain = Drain(lora_config.drain_timeout_s)
        self._account = EngineAccount(self.manager, clock)

    @property
    def num_running(self) -> int:
        """Requests that hold a seat and KV blocks."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a seat, blocks, a slot, or the compilation of their constraint."""
        return self._scheduler.num_waiting + len(self._compilations)

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
            self._open.refuse(message.request_id, error)
            return
        self._open.add(request)
        self._ahead.watch(request, self._limits.vocab_size)
        self._account.came(request)
        if request.sampling.constraint is None:
            self._scheduler.add(request)
        else:
            # Tenants take turns, and where there are none, adapters do.
            caller = request.cache_salt or request.adapter
            self._compilations.add(request, self._grammars.compile(request.sampling.constraint, caller))

    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds, now; no delta follows. An unknown id is ignored."""
        self._open.take_back(request_id)
        request = self._open.find(request_id)
        if request is not None:
            self._drop(request)

    def check_ranks(self) -> None:
        """Raise EngineDead if a process that shares the model has ended; `step` does, too."""
        self.runner.check_ranks()

    def close(self) -> None:
        """End the processes that share the model; may be called again. No step can follow."""
        self.runner.close()

    def reset_adapter(self, name: str, reason: str) -> None:
        """End the requests of an adapter with AdapterLost, and have the next one find it read and written anew.

        What it has computed is as suspect as its slot was, and is not used again.
        """
        for request in self._open:
            if request.adapter is not None and request.adapter.name == name:
                self._drop(request, AdapterLost(reason))
        self.manager.reset_adapter(name)
        self._blocks.forget_name(name)

    def workload(self) -> Workload:
        """What was done since the last call, and is to be done now."""
        num_queried, num_hit = self.prefix_cache_counts
        cache = CacheCounts(
            usage=self._blocks.usage,
            num_queried_tokens=num_queried,
            num_hit_tokens=num_hit,
            num_preemptions=sum(self.preemption_counts),
        )
        return self._account.take(cache)

    def has_work(self) -> bool:
        """Whether `step` has something to do or to say; adapters on their way into slots are something to do."""
        return bool(self._open) or self._open.has_refusals or self.manager.is_busy

    def step(self) -> list[TokenDelta]:
        """Run one batch, and return the tokens it produced and the requests that failed since the last step.

        A request fails here, with finish reason "error", when its adapter is needed from files that are gone or changed
        (AdapterLost), or when its adapter was unloaded or replaced and it has not ended `drain_timeout_s` later
        (AdapterUnloaded), or when its constraint does not compile or cannot be followed (InvalidRequest), or was not
        compiled in time (EngineError). With nothing to run, it waits a few milliseconds for what is being read or
        compiled.

        With async scheduling the tokens are those of the step before, which the device has computed meanwhile.

        Returns:
            At most one delta for each request that is running; a finished one is forgotten here.
        """
        self._queue_compiled()
        self._end_overdue_requests()
        for ref in self.manager.take_dropped():
            self._blocks.forget_adapter(ref)
        if self._ahead.flight is not None and not self._may_run_ahead():
            return self._with_refused(self._ahead.land())
        self.manager.advance(self._account.write_budget_s)
        batch = self._schedule()
        if not batch.rows and self._ahead.flight is not None:
            return self._with_refused(self._ahead.land())
        if not batch.rows and self.manager.is_writing:
            # Nobody is kept waiting by it.
            self.manager.advance(None)
            batch = self._schedule()
        self._account.begins(batch)
        deltas: list[TokenDelta] = []
        if batch.rows:
            with self._account.timed(batch):
                deltas = self._run(batch)
        elif not self._open.has_refusals and self.has_work():
            self._wait()
        return self._with_refused(deltas)

    def warm_up(self, progress: Progress = ignore_progress) -> None:
        """Build all that steps need, so that no user pays for it: kernels for every shape, then graphs.

        In between, short prompts and decode steps run, through an adapter too if one is loaded. Called before the first
        request.
        """
        assert not self._open, "warm_up runs before the first request"
        self.runner.compile_kernels(progress)
        names = (None, *itertools.islice(self.manager.loras, 1))
        for request in warm_up_requests(self.ready(), self.runner.warm_up_tokens, names):
            self.add_request(request)
        tokenizer = self._grammars.prepare()
        # The longest prompt takes the most memory of all steps.
        with memory_faults(self.runner.plan):
            while self._open:
                self.step()
        tokenizer.result()
        self.runner.capture_graphs(progress)
        # Not what users ask for.
        self._account.forget_work()

    def check_invariants(self) -> None:
        """Assert that requests, blocks, slots, pins and counts agree; costs time: for tests, and while nobody waits."""
        self.manager.check()
        self._scheduler.check()
        known = len(self._open)
        queued = self._scheduler.num_running + self._scheduler.num_waiting + len(self._compilations)
        assert known == queued, f"{known} requests are known and {queued} are queued or running"

    def _accept(self, message: GenerateRequest) -> Request:
        self._open.check_id(message.request_id)
        check(message, self._limits)
        # Last, because from here on the adapter must be released.
        adapter = None if message.lora_name is None else self.manager.acquire(message.lora_name)
        return Request.of(message, adapter, arrival=next(self._arrivals), eos_token_ids=self._eos_token_ids)

    def _schedule(self) -> ScheduledBatch:
        """The next batch; the requests it gives up are answered by this step."""
        batch = self._scheduler.schedule()
        for request, error in batch.lost:
            self._forget(request, error)
        return batch

    def _end_overdue_requests(self) -> None:
        """End the requests of unloaded adapters that have had their time."""
        retired = self.manager.retired()
        if not retired and self._drain.is_idle:
            return
        late = self._drain.overdue(retired, self._clock())
        for request in self._open:
            if request.adapter in late:
                self._drop(request, overdue(request, self._drain.timeout_s))

    def _run(self, batch: ScheduledBatch) -> list[TokenDelta]:
        """Compute a batch of at least one row, and choose the next token of each row that is due."""
        batch = ScheduledBatch(self.manager.sort_lora_batch(batch.rows))
        flight = self._ahead.flight
        logits = self.runner.run(batch) if flight is None else self.runner.run(batch, flight)
        # A step that follows one in flight reads its tokens, whatever has begun meanwhile.
        if flight is not None or self._may_run_ahead():
            return self._ahead.take_off(batch, logits)
        batch, logits = without_late_rows(batch, score_prompts(batch.rows, logits), self._grammars)
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
                if request.sampler.constraint is not None and request in self._open
            ]
        )
        return deltas

    def _may_run_ahead(self) -> bool:
        """Whether a step may be left in flight. Writing a slot waits for the device, which would be for all of it."""
        return self._ahead.may_begin and not self.manager.is_busy

    def is_known(self, request: Request) -> bool:
        """Whether it has not ended."""
        return request in self._open

    def _advance(self, request: Request, choice: Choice | None) -> TokenDelta:
        """Append the next token to a request's answer, and end the request if that was the last one."""
        if choice is None:
            return self.fail_for_logits(request)
        constraint = request.sampler.constraint
        if constraint is not None and constraint.error is not None:
            self._finish(request)
            return failure(request.request_id, constraint.error, InvalidRequest.__name__)
        request.token_ids.append(choice.token_id)
        request.sampler.take(choice.token_id)
        return self.answer(request, len(request.token_ids), choice.logprobs)

    def answer(self, request: Request, num_tokens: int, logprobs: TokenLogprobs | None = None) -> TokenDelta:
        """Tell of the last of a request's first `num_tokens` tokens, and end the request if it ends the answer."""
        reason = request.finish_reason(self._eos_token_ids, num_tokens)
        timeline = self._account.has_token(request, is_last=reason is not None)
        if reason is not None:
            self._finish(request)
        return token_delta(request, num_tokens, reason, logprobs, timeline)

    def fail_for_logits(self, request: Request) -> TokenDelta:
        """End a request whose logits are not finite."""
        self._scheduler.fail(request)
        self._forget(request)
        return wrong_logits(request)

    def _with_refused(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """The deltas of a step, and those of requests that were refused since the last one."""
        # What a rank that has ended took part in may be wrong.
        self.check_ranks()
        return deltas + self._open.take_refusals()

    def _queue_compiled(self) -> None:
        """Queue the requests whose constraints have been compiled, and refuse those whose cannot be."""
        for request, error in self._compilations.take_done():
            if error is not None:
                self._forget(request, error)
                continue
            # The queue is in order of arrival, and others have come to it meanwhile.
            request.arrival = next(self._arrivals)
            self._scheduler.add(request)

    def _wait(self) -> None:
        """With nothing to run: wait a little for what others do."""
        if self._compilations:
            self._compilations.wait(LONGEST_WAIT_S)
        else:
            self.manager.wait(LONGEST_WAIT_S)

    def _drop(self, request: Request, error: LoRAFleetError | None = None) -> None:
        """Forget a request, wherever it is, and free what it holds; its user is told the error, if there is one."""
        if not self._compilations.cancel(request):
            self._scheduler.abort(request)
        self._forget(request, error)

    def _finish(self, request: Request) -> None:
        # It may have been put back since its last token was begun.
        self._scheduler.abort(request)
        self._forget(request)

    def _forget(self, request: Request, error: LoRAFleetError | None = None) -> None:
        """Take note that a request, which holds nothing but its adapter, has ended."""
        self._open.end(request)
        self._ahead.forget(request, is_last=not self._open)
        self._account.ended(request)
        if request.adapter is not None:
            self.manager.release(request.adapter)
        if error is not None:
            self._open.refuse(request.request_id, error)
