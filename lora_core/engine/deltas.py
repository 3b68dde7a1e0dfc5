"""What an engine says of a request: its next token, or why it has failed."""

from lora_core.engine.request import Request
from lora_core.errors import AdapterUnloaded
from lora_core.messages import FinishReason, Timeline, TokenDelta, TokenLogprobs


def token_delta(
    request: Request,
    num_tokens: int,
    reason: FinishReason | None,
    logprobs: TokenLogprobs | None,
    timeline: Timeline | None = None,
) -> TokenDelta:
    """The last of a request's first `num_tokens` tokens; with the first of an answer, what is known of the prompt.

    Args:
        request: The request.
        num_tokens: Its tokens up to this one.
        reason: Why the answer ends with it; None where it goes on.
        logprobs: Of the token, if they are asked for.
        timeline: When it got where, where that is noted and to be told now.
    """
    is_first = num_tokens == request.num_prompt_tokens + 1
    scores_prompt = is_first and request.sampling.prompt_logprobs is not None
    return TokenDelta(
        request.request_id,
        [request.token_ids[num_tokens - 1]],
        reason,
        logprobs=None if logprobs is None else [logprobs],
        prompt_logprobs=request.sampler.prompt_scores if scores_prompt else None,
        num_cached_tokens=(request.num_cached_tokens or 0) if is_first else 0,
        timeline=timeline,
    )


def failure(request_id: str, error: str, error_type: str = "EngineError") -> TokenDelta:
    """The end of a request that failed; `error_type` is the class of the error that its user gets."""
    return TokenDelta(request_id, [], "error", error, error_type)


def wrong_logits(request: Request) -> TokenDelta:
    """The end of a request whose logits are not finite."""
    model = "the base model" if request.adapter is None else f"LoRA adapter {request.adapter.name!r}"
    return failure(request.request_id, f"{model} gave logits that are not finite (NaN or infinity)")


def overdue(request: Request, timeout_s: float) -> AdapterUnloaded:
    """What the user of a request is told whose adapter was unloaded `timeout_s` ago."""
    assert request.adapter is not None, "only adapters are unloaded"
    return AdapterUnloaded(
        f"LoRA adapter {request.adapter.name!r} was unloaded or replaced, and the request did not end within "
        f"{timeout_s:g} s of that; send it again, or raise lora_config.drain_timeout_s"
    )
