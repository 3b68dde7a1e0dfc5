"""One request's state from arrival to its last token, and the rows a step runs for it."""

from dataclasses import dataclass, field

from lora_core.engine.block_hashes import BlockHashes
from lora_core.engine.sampler_state import SamplerState
from lora_core.engine.sampling_ranges import check_sampling, check_token_ids
from lora_core.errors import AdapterLost, InvalidRequest
from lora_core.messages import FinishReason, GenerateRequest, SamplingParams
from lora_core.types import AdapterRef

PENDING = -1
"""Stands at the end of a request's tokens for one that is chosen, and that the host does not know yet."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one engine can serve; a request past any of it is refused when it arrives."""

    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    kv_cache_tokens: int
    """Tokens the whole KV cache holds."""
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    """The tokens with which the model ends an answer."""


@dataclass(eq=False, kw_only=True)
class Request:
    """A request inside the engine. It is compared by identity and changed only by the step thread.

    `token_ids[:num_computed]` have their keys and values in the blocks of `block_table`. A preempted request gives its
    blocks back, keeps its tokens, and when it runs again computes those anew that it does not find in the prefix cache.
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
    sampler: SamplerState = field(default_factory=SamplerState)
    num_computed: int = 0
    num_settled: int = 0
    """Of these, from the first: how many are known to have been computed, from tokens that are all known."""
    num_releases: int = 0
    """How often it gave its blocks back: what a step computed for it counts only if it did not since."""
    block_table: list[int] = field(default_factory=list)
    """KV blocks it owns, in token order."""
    may_share_blocks: bool = True
    """Whether it may start behind what others have computed; not one that needs the logits of its whole prompt."""
    cache_salt: str = ""
    """Shares blocks with requests of the same salt alone."""
    num_cached_tokens: int | None = None
    """Prompt tokens that were in the prefix cache when it started for the first time; None before that."""
    block_hashes: BlockHashes = field(init=False)
    is_parked: bool = False
    """Whether it waits, and has kept the blocks of `block_table` and what is computed in them."""
    num_remembered: int = 0
    """Blocks of `block_table`, from the first, that the prefix cache has been told of."""
    queued_s: float = 0.0
    """Clock reading when it last joined the queue."""
    num_outputs_before: int = 0
    """Tokens that had been generated when it last began to run."""
    is_traced: bool = False
    """Whether it is noted when it got where."""

    @classmethod
    def of(
        cls, message: GenerateRequest, adapter: AdapterRef | None, *, arrival: int, eos_token_ids: frozenset[int]
    ) -> "Request":
        """From a message that `check` has passed.

        Args:
            message: What is asked for.
            adapter: The adapter it names, acquired for it.
            arrival: As the attribute.
            eos_token_ids: The tokens with which the model ends an answer.
        """
        sampling = message.sampling
        return cls(
            request_id=message.request_id,
            token_ids=list(message.prompt_token_ids),
            num_prompt_tokens=len(message.prompt_token_ids),
            arrival=arrival,
            sampling=sampling,
            adapter=adapter,
            cache_salt=message.cache_salt,
            is_traced=message.is_traced,
            sampler=SamplerState.start(sampling, message.prompt_token_ids, eos_token_ids),
            # The logits of the whole prompt are needed, and shared blocks have none.
            may_share_blocks=sampling.prompt_logprobs is None,
        )

    def __post_init__(self) -> None:
        self.block_hashes = BlockHashes(self.adapter, self.cache_salt)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens not yet in the KV cache; 1 for a request that decodes."""
        return len(self.token_ids) - self.num_computed

    @property
    def has_progressed(self) -> bool:
        """Whether it has generated a token since it last began to run."""
        return self.num_output_tokens > self.num_outputs_before

    @property
    def may_go_on(self) -> bool:
        """Whether it may still generate a token, as far as its length says."""
        return self.num_output_tokens < self.sampling.max_tokens

    @property
    def num_tokens_left(self) -> int:
        """Tokens of work until it ends at the latest: those not computed, and those it may still generate."""
        return self.num_uncomputed + self.sampling.max_tokens - self.num_output_tokens

    def finish_reason(self, eos_token_ids: frozenset[int], num_tokens: int | None = None) -> FinishReason | None:
        """Why the answer ends with its last token: "stop", "length", or None while it goes on.

        Args:
            eos_token_ids: The tokens with which the model ends an answer.
            num_tokens: Looks at so many tokens only, of which the last one is known; unset: all.
        """
        num_tokens = len(self.token_ids) if num_tokens is None else num_tokens
        last = self.token_ids[num_tokens - 1]
        if last in self.sampling.stop_token_ids or (last in eos_token_ids and not self.sampling.ignore_eos):
            return "stop"
        return "length" if num_tokens - self.num_prompt_tokens >= self.sampling.max_tokens else None


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

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of all its tokens are needed, because prompt tokens that follow them have no score yet."""
        request = self.request
        return (
            request.sampling.prompt_logprobs is not None
            and len(request.sampler.prompt_scores) < request.num_prompt_tokens - 1
        )


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
    check_sampling(message.sampling, limits.vocab_size, limits.eos_token_ids)
    if not message.prompt_token_ids:
        raise InvalidRequest("the prompt is empty; it needs at least one token")
    check_token_ids("prompt token id", message.prompt_token_ids, limits.vocab_size)

    num_prompt, max_tokens = len(message.prompt_token_ids), message.sampling.max_tokens
    for limit, what, setting in (
        (limits.max_model_len, "the model's context", "engine.max_model_len"),
        (limits.kv_cache_tokens, "the KV cache", "engine.kv_cache_tokens"),
    ):
        if num_prompt + max_tokens > limit:
            raise InvalidRequest(
                f"the prompt's {num_prompt} tokens plus max_tokens {max_tokens} are {num_prompt + max_tokens}, and "
                f"{what} holds {limit}; shorten the prompt, lower max_tokens, or ask the operator of this server to "
                f"raise {setting}"
            )
