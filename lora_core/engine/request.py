"""One request's state from arrival to its last token, and the rows a step runs for it."""

import math
from dataclasses import dataclass, field

import torch

from lora_core.errors import AdapterLost, InvalidRequest
from lora_core.messages import FinishReason, GenerateRequest, SamplingParams
from lora_core.types import AdapterRef

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
"""What `torch.Generator.manual_seed` takes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one engine can serve, in tokens; a request past any of them is refused when it arrives."""

    max_model_len: int
    """Longest prompt plus answer."""
    kv_cache_tokens: int
    """Tokens the whole KV cache holds."""
    vocab_size: int


@dataclass(eq=False, kw_only=True)
class Request:
    """A request inside the engine. It is compared by identity and changed only by the step thread.

    `token_ids[:num_computed]` have their keys and values in the blocks of `block_table`; a preempted request gives its
    blocks back, keeps its tokens, and computes them anew when it runs again.
    """

    request_id: str
    token_ids: list[int]
    """The prompt, then every token generated so far."""
    num_prompt_tokens: int
    arrival: int
    """Rises with each request the engine takes; lower is served first and preempted last."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    adapter: AdapterRef | None = None
    """The adapter generation it runs through; None is the base model."""
    generator: torch.Generator | None = None
    """The request's own randomness, when it has a seed; one draw for each sampled token."""
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    """KV blocks it owns, in token order."""
    passed_over_s: float | None = None
    """Clock reading when it first waited for an adapter slot, since it last joined the queue."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens not yet in the KV cache; 1 for a request that decodes."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_tokens_left(self) -> int:
        """Tokens of work until it ends at the latest: those not computed, and those it may still generate."""
        return self.num_uncomputed + self.sampling.max_tokens - self.num_output_tokens

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the answer ends with its last token: "stop", "length", or None while it goes on."""
        last = self.token_ids[-1]
        if last in self.sampling.stop_token_ids or (last in eos_token_ids and not self.sampling.ignore_eos):
            return "stop"
        return "length" if self.num_output_tokens >= self.sampling.max_tokens else None


@dataclass(frozen=True)
class ScheduledRow:
    """The next `num_tokens` tokens of one request: `token_ids[num_computed : num_computed + num_tokens]`."""

    request: Request
    num_tokens: int

    @property
    def adapter(self) -> AdapterRef | None:
        return self.request.adapter

    @property
    def samples(self) -> bool:
        """Whether the row ends with the request's last known token, so that its logits choose the next one."""
        return self.num_tokens == self.request.num_uncomputed


@dataclass(frozen=True)
class ScheduledBatch:
    """What one step runs, one row a request, and the requests it gives up."""

    rows: list[ScheduledRow]
    lost: list[tuple[Request, AdapterLost]] = field(default_factory=list)
    """Waiting requests whose adapter cannot be had any more, and why; the scheduler has forgotten them."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


def check(message: GenerateRequest, limits: Limits) -> None:
    """Check every range of a request.

    Raises:
        InvalidRequest: it can never be served; the sentence gives what was found and what is allowed.
    """
    _check_sampling(message.sampling, limits)
    if not message.prompt_token_ids:
        raise InvalidRequest("the prompt is empty; it needs at least one token")
    _check_token_ids("prompt token id", message.prompt_token_ids, limits)
    _check_token_ids("stop_token_ids entry", message.sampling.stop_token_ids, limits)

    num_prompt, max_tokens = len(message.prompt_token_ids), message.sampling.max_tokens
    for limit, what, setting in (
        (limits.max_model_len, "the model's context", "max_model_len"),
        (limits.kv_cache_tokens, "the KV cache", "kv_cache_tokens"),
    ):
        if num_prompt + max_tokens > limit:
            raise InvalidRequest(
                f"the prompt's {num_prompt} tokens plus max_tokens {max_tokens} are {num_prompt + max_tokens}, and "
                f"{what} holds {limit}; shorten the prompt, lower max_tokens, or raise {setting}"
            )


def _check_sampling(sampling: SamplingParams, limits: Limits) -> None:
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {sampling.max_tokens}; it must be at least 1")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequest(f"temperature is {sampling.temperature}; it must be a finite number, 0 or more")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p is {sampling.top_p}; it must be above 0 and at most 1")
    if sampling.top_k < 0:
        raise InvalidRequest(f"top_k is {sampling.top_k}; it must be at least 0, which keeps every token")
    if sampling.seed is not None and not MIN_SEED <= sampling.seed <= MAX_SEED:
        raise InvalidRequest(f"seed is {sampling.seed}; it must be from -2**63 to 2**64 - 1")


def _check_token_ids(what: str, token_ids: list[int] | tuple[int, ...], limits: Limits) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(
                f"{what} {token_id} is not in the model's vocabulary; ids run from 0 to {limits.vocab_size - 1}"
            )
