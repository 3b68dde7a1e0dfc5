"""Messages between a replica and its engine process, msgpack over the replica's private ZMQ sockets.

Requests go one way (`GenerateRequest`, `AbortRequest`), events the other (`EngineEvent`, a tagged union). LoRA
operations have a channel of their own (`lora_core.channel`).
"""

from typing import Literal

import msgspec

from lora_core.portable import portable
from lora_core.types import AdapterRef
from lora_core.workload import Workload

FinishReason = Literal["stop", "length", "abort", "error"]


ConstraintKind = Literal["json_schema", "regex", "grammar"]


@portable
class Constraint(msgspec.Struct, frozen=True):
    """What an answer's text must be, from its first character to its last."""

    kind: ConstraintKind
    source: str
    """A JSON schema as JSON, a regular expression that the whole text matches, or a grammar as llguidance reads it
    (Lark's syntax)."""


@portable
class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when to stop.

    Ranges are checked by `lora_core.engine.request.check`; `lora_core.engine.sampler` says in which order all this
    applies.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    """Before this many, no token that would end the answer is chosen."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    """Keeps tokens at least this many times as likely as the likeliest one; 0 keeps every token."""
    repetition_penalty: float = 1.0
    """Of tokens in the prompt or the answer; 1 is none, higher is less of the same."""
    presence_penalty: float = 0.0
    """Of tokens in the answer."""
    frequency_penalty: float = 0.0
    """Of tokens in the answer, for each time."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these distinct token ids."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch."""
    stop_token_ids: tuple[int, ...] = ()
    """End the answer, beside the model's own end-of-text ids; not part of the answer's text."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """With each token, its log-probability and those of this many likeliest ones."""
    prompt_logprobs: int | None = None
    """The same of each prompt token, with the first delta."""
    constraint: Constraint | None = None


class GenerateRequest(msgspec.Struct, frozen=True, tag="generate", omit_defaults=True):
    """Continue a prompt, through an adapter or (name unset) the base model."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    lora_name: str | None = None
    cache_salt: str = ""
    """Its prefix is shared with requests of the same salt alone: how long another tenant's text took is not told."""
    is_traced: bool = False
    """Whether its first and last tokens come with a `Timeline`."""


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Forget a request; nothing more is sent for it. Unknown ids are ignored."""

    request_id: str


class ProtectAdapters(msgspec.Struct, frozen=True, tag="protect"):
    """Take the slots of these adapters only where no other can be had, until another such message comes."""

    names: list[str]


class ResetAdapter(msgspec.Struct, frozen=True, tag="reset"):
    """End the requests of an adapter, and bring it into a slot from its folder anew when the next one comes."""

    name: str
    reason: str
    """A sentence for those whose requests end: AdapterLost."""


EngineRequest = GenerateRequest | AbortRequest | ProtectAdapters | ResetAdapter


@portable
class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at one place in a text: softmax of the model's own logits."""

    logprob: float
    """Of the token that is there."""
    top_ids: list[int] = []
    """The likeliest tokens, in falling order, as many as were asked for."""
    top_logprobs: list[float] = []


@portable
class Timeline(msgspec.Struct, frozen=True, omit_defaults=True):
    """When a request got where, in nanoseconds of Unix time; 0 where it has not yet."""

    came_ns: int
    """It came to the engine."""
    slot_ns: int = 0
    """Its adapter was in a slot; as it came, where it was in one already or none is needed."""
    started_ns: int = 0
    """Its first step began."""
    first_token_ns: int = 0
    last_token_ns: int = 0


class TokenDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request, and why it ended, when it did.

    `error` comes with finish_reason "error": `error_type` is the class name in `lora_core.errors` to raise for it.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_type: str = "EngineError"
    logprobs: list[TokenLogprobs] | None = None
    """One for each token id, where the request asks for them."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One for each prompt token but the first, which follows nothing; with the first new token."""
    num_cached_tokens: int = 0
    """Prompt tokens that were in the prefix cache; with the first new token."""
    timeline: Timeline | None = None
    """Of a traced request so far; with the first and the last new token."""


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Sent once, when the engine can take requests."""

    max_model_len: int
    num_slots: int
    """Adapter slots; 0 with LoRA off."""
    vocab_size: int
    eos_token_ids: list[int]
    kv_cache_tokens: int
    max_num_seqs: int
    """Most requests that run at once."""


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Sent instead of ready, or before the process ends on a fault it cannot survive."""

    reason: str


class StepOutput(msgspec.Struct, frozen=True, tag="step"):
    """What one step produced, for all its requests; an empty one is a heartbeat."""

    step: int
    deltas: list[TokenDelta] = []
    num_running: int = 0
    num_waiting: int = 0


@portable
class Residency(msgspec.Struct, frozen=True, tag="residency"):
    """Where adapters that admit requests are; sent with a rising sequence number after every change: before a slot is
    written that another adapter has lost, and after one is complete.

    What is loaded, and what is in memory, may be many: each is left out where it is as it was in the report before.
    """

    sequence: int
    resident: list[AdapterRef]
    """In a slot."""
    loaded: list[AdapterRef] | None
    """All of them, also those whose tensors are only in their folder; None: as before."""
    in_memory: list[AdapterRef] | None = []
    """In host memory, whether or not in a slot, too; None: as before."""
    loading: list[AdapterRef] = []
    """On their way into a slot."""
    num_slots_used: int = 0
    """Slots that hold any generation, those being written or drained included."""

    def over(self, before: "Residency | None") -> "Residency | None":
        """This report with what it leaves out taken from the one before; None where that is not known."""
        if self.loaded is not None and self.in_memory is not None:
            return self
        if before is None or before.loaded is None or before.in_memory is None:
            return None
        loaded = before.loaded if self.loaded is None else self.loaded
        in_memory = before.in_memory if self.in_memory is None else self.in_memory
        return msgspec.structs.replace(self, loaded=loaded, in_memory=in_memory)

    def without(self, known: "Residency | None") -> "Residency":
        """This full report without what whoever has `known` knows already."""
        if known is None:
            return self
        loaded = None if self.loaded == known.loaded else self.loaded
        in_memory = None if self.in_memory == known.in_memory else self.in_memory
        return msgspec.structs.replace(self, loaded=loaded, in_memory=in_memory)


EngineEvent = EngineReady | EngineFailed | StepOutput | Residency | Workload
