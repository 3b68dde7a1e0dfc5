"""What travels between the ingress and a replica: one call to generate, and the chunks that answer it."""

from typing import Any

import msgspec

from lora_core import errors
from lora_core.messages import FinishReason, SamplingParams, Timeline
from lora_core.portable import portable


@portable
class CallRules(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer's tool calls are held to, token by token."""

    functions: list[str]
    """Names of tools of which it may hold calls."""
    strict: list[str] = []
    """Of these, those whose arguments must meet their schema in all that it says; the others, in all that is known how
    to hold an answer to."""
    is_needed: bool
    """The answer is calls, and nothing else; otherwise there may be text, and no call."""
    most_calls: int | None = None
    """Unset: several."""


@portable
class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue, as messages, text or token ids: exactly one of the three is set."""

    request_id: str
    lora_name: str | None = None
    """The adapter; unset is the base model."""
    messages: list[dict[str, Any]] | None = None
    """A chat, rendered with the model's own chat template."""
    tools: list[dict[str, Any]] = []
    """Functions the model may call, told by the chat template."""
    one_tool_call: bool = False
    """Of several calls in an answer only the first is told."""
    call_rules: CallRules | None = None
    """Unset: the model calls what it likes, as it likes, or nothing."""
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    """Answers to this one prompt; with a seed, the first has that seed and each other one its own."""
    echo: bool = False
    """Each answer's text begins with the prompt's; `sampling.prompt_logprobs` are then told with its tokens."""
    max_tokens: int | None = None
    """Most tokens to generate; unset fills what the context leaves. Takes the place of `sampling.max_tokens`. With 0,
    which goes with `echo`, there is no token in the answer, and its prompt is computed all the same."""
    default_max_tokens: int | None = None
    """Where `max_tokens` is unset: no more than this, nor than the context leaves."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these that appears in its text."""
    epoch: int = 0
    """The replica must have applied adapter changes up to this epoch first (read your own writes)."""
    streamed: bool = True
    """Whether somebody reads the answer as it comes; otherwise it is sent in few chunks."""
    cache_salt: str = ""
    """Its prefix is shared with calls of the same salt alone."""
    replica: str = ""
    """Serve's unique id of the one replica that is to answer; empty: whichever is placed best."""
    traceparent: str = ""
    """Of the span it belongs to, as the W3C writes it; empty: it is not traced."""


@portable
class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Ends an answer, mostly before its first chunk: what an adapter or the call itself is to blame for. Raised by
    whoever asked.

    A value and not an exception on the way: Ray Serve logs every exception that leaves a replica, with its trace.
    """

    kind: str
    """Name of a class in `lora_core.errors`."""
    message: str

    def error(self) -> errors.LoRAFleetError:
        """The exception it stands for."""
        kind: type[errors.LoRAFleetError] = getattr(errors, self.kind)
        return kind(self.message)


@portable
class ScoredToken(msgspec.Struct, frozen=True):
    """A token in words, with the natural logarithm of its probability."""

    token_id: int
    data: bytes
    """UTF-8, perhaps a part of a character."""
    logprob: float | None
    """None for a prompt's first token, which follows nothing."""
    top: list["ScoredToken"] = []
    """The likeliest tokens in its place."""
    special: bool = False
    """Not part of any text: it stands for itself, as `<|im_end|>` does."""


@portable
class SlotSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's adapter slots at one moment, of the adapters that admit requests there."""

    replica_id: str
    sequence: int
    """Of the residency report that says the same; of two snapshots of a replica the higher one is newer."""
    resident: tuple[str, ...]
    """Names in a slot."""
    loading: tuple[str, ...] = ()
    """Names on their way into one."""
    num_slots_used: int = 0
    """Slots taken by any generation."""
    num_busy: int = 0
    """Adapters that the replica has requests for, or that are pinned, wherever they are: as of this reply."""


@portable
class ToolCall(msgspec.Struct, frozen=True):
    """One function that the model wants called."""

    id: str
    name: str
    arguments: str
    """JSON."""


@portable
class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The next piece of an answer: whole characters of text, and the tokens that have arrived since the last one."""

    text: str
    token_ids: list[int]
    index: int = 0
    """Which of the call's `n` answers it belongs to."""
    scores: list[ScoredToken] | None = None
    """With `sampling.logprobs`, one for each of `token_ids`."""
    prompt_scores: list[ScoredToken] | None = None
    """With `sampling.prompt_logprobs`, one for each prompt token; in an answer's first chunk."""
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were in the engine's prefix cache."""
    reasoning: str = ""
    """With tools, where the model's response template names it: what it thought."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls it wants made; in the last chunk."""
    completion_tokens: int = 0
    """Tokens generated up to and with this chunk."""
    timeline: Timeline | None = None
    """Of a traced call's answer: when its request got where in the engine, so far."""
    snapshot: SlotSnapshot | None = None
    """In the first chunk of a reply: the replica's slots when it was made."""
