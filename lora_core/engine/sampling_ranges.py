"""What sampling parameters may be: every range, and the pairs that contradict each other."""

from collections.abc import Sequence

from lora_core.errors import InvalidRequest
from lora_core.messages import SamplingParams

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
"""What `torch.Generator.manual_seed` takes."""
MAX_LOGPROBS = 20
"""Most likeliest tokens told with each token: OpenAI's limit."""
MAX_STOP_TOKEN_IDS = 1024
"""They are looked through at every token."""
MAX_CONSTRAINT_LENGTH = 64 * 1024
"""Characters of a schema or regular expression."""

RANGES: dict[str, tuple[float, float]] = {
    "top_p": (0, 1),
    "min_p": (0, 1),
    # Beyond these, logits times penalty leave what fp32 can tell apart.
    "repetition_penalty": (0.01, 100),
    # OpenAI's.
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
MIN_BIAS, MAX_BIAS = -100, 100
"""OpenAI's range of a token's `logit_bias`."""


def check_sampling(sampling: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
    """Check every value, in whatever way the request came.

    Args:
        sampling: The values.
        vocab_size: Of the model's logits.
        eos_token_ids: The tokens with which the model ends an answer.

    Raises:
        InvalidRequest: one can never be served; the sentence gives what was found and what is allowed.
    """
    _check_lengths(sampling)
    if not 0 <= sampling.temperature < float("inf"):
        raise InvalidRequest(f"temperature is {sampling.temperature}; it must be a finite number, 0 or more")
    for name, (low, high) in RANGES.items():
        value = getattr(sampling, name)
        # Not `value < low or value > high`, which NaN would pass.
        if not low <= value <= high:
            raise InvalidRequest(f"{name} is {value}; it must be from {low} to {high}")
    if sampling.top_p == 0:
        raise InvalidRequest("top_p is 0; it must be above 0 and at most 1")
    if sampling.top_k < 0:
        raise InvalidRequest(f"top_k is {sampling.top_k}; it must be at least 0, which keeps every token")
    if sampling.seed is not None and not MIN_SEED <= sampling.seed <= MAX_SEED:
        raise InvalidRequest(f"seed is {sampling.seed}; it must be from -2**63 to 2**64 - 1")
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not 0 <= count <= min(MAX_LOGPROBS, vocab_size):
            raise InvalidRequest(f"{name} is {count}; it must be from 0 to {min(MAX_LOGPROBS, vocab_size)}")
    _check_stops(sampling, vocab_size, eos_token_ids)
    _check_bias(sampling, vocab_size)
    _check_constraint(sampling)


def check_token_ids(what: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest for the first id that is not in the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{what} {token_id} is not in the model's vocabulary; ids run from 0 to {vocab_size - 1}"
            )


def _check_lengths(sampling: SamplingParams) -> None:
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {sampling.max_tokens}; it must be at least 1")
    if sampling.min_tokens < 0:
        raise InvalidRequest(f"min_tokens is {sampling.min_tokens}; it must be at least 0")
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens} and max_tokens {sampling.max_tokens}; lower min_tokens or raise "
            "max_tokens"
        )


def _check_stops(sampling: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids has {len(sampling.stop_token_ids)} entries; it may have up to {MAX_STOP_TOKEN_IDS}"
        )
    check_token_ids("stop_token_ids entry", sampling.stop_token_ids, vocab_size)
    ending = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    if sampling.min_tokens and len(ending) == vocab_size:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}, and every token of the model's vocabulary would end the answer "
            "before that; leave out min_tokens, or name fewer stop_token_ids"
        )


def _check_bias(sampling: SamplingParams, vocab_size: int) -> None:
    check_token_ids("logit_bias key", [token_id for token_id, _ in sampling.logit_bias], vocab_size)
    for token_id, value in sampling.logit_bias:
        if not MIN_BIAS <= value <= MAX_BIAS:
            raise InvalidRequest(f"logit_bias of token {token_id} is {value}; it must be from {MIN_BIAS} to {MAX_BIAS}")
    if len({token_id for token_id, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        raise InvalidRequest("logit_bias names a token id twice; give each once")


def _check_constraint(sampling: SamplingParams) -> None:
    if sampling.constraint is None:
        return
    length = len(sampling.constraint.source)
    if length > MAX_CONSTRAINT_LENGTH:
        raise InvalidRequest(
            f"the {sampling.constraint.kind} has {length} characters; it may have up to {MAX_CONSTRAINT_LENGTH}"
        )
    if sampling.ignore_eos:
        raise InvalidRequest(
            "ignore_eos is set on a constrained answer, which can only end with the end-of-text token; leave one out"
        )
