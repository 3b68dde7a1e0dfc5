"""The OpenAI-style request bodies this server reads, and the objects it answers with.

Field names and meanings are those of OpenAI's API reference; `top_k`, `ignore_eos`, `stop_token_ids` and
`return_token_ids` are vLLM's extensions. A field this server cannot honour is refused by name, unless OpenAI itself
gives it no influence on the answer.
"""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from deployments.generation import GenerateCall, GenerateChunk
from lora_core.messages import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of /v1/completions; chat answers fill the context."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "best_of": (1, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "echo": (False, None),
    "suffix": ("", None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "refusal": (None,),
    "tool_calls": ([], None),
    "function_call": (None,),
    "audio": (None,),
    "annotations": ([], None),
}
"""Fields not served yet, each with the values that ask nothing of it."""

NO_INFLUENCE = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
)
"""Fields accepted and ignored: they never change an answer."""


class Body(BaseModel):
    """A JSON body: wrong types, unknown fields and unserved features are refused by name."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _set_aside(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in NEUTRAL_VALUES.items():
            if name in data and name not in cls.model_fields and not _asks_nothing(data[name], neutral):
                raise ValueError(f"{name} is not supported by this server; leave it out")
        aside = {*NEUTRAL_VALUES, *NO_INFLUENCE} - set(cls.model_fields)
        return {key: value for key, value in data.items() if key not in aside}


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # To Python, True is 1 and False is 0; to a reader of the API they are not.
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


NonEmpty = Annotated[str, StringConstraints(min_length=1)]


class SamplingFields(Body):
    """What chat and plain completions share."""

    model: NonEmpty
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: NonEmpty | Annotated[list[NonEmpty], Field(max_length=16)] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _options_need_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with a chunk that holds its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> SamplingParams:
        """The engine's view of the sampling fields; the default temperature is OpenAI's, 1."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )

    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, however they were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TextPart(Body):
    """One piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _only_assistants_may_be_silent(self) -> "ChatMessage":
        if not self.content and self.content != "" and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} needs content")
        return self

    def rendered(self) -> dict[str, Any]:
        """The message as chat templates expect it: text joined, `developer` under its older name, `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatCompletionRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    def call(self, request_id: str, lora_name: str | None, epoch: int) -> GenerateCall:
        """What a replica is asked."""
        return GenerateCall(
            request_id=request_id,
            lora_name=lora_name,
            messages=[message.rendered() for message in self.messages],
            sampling=self.sampling(),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stop_strings(),
            epoch=epoch,
        )


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: NonEmpty | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]

    def call(self, request_id: str, lora_name: str | None, epoch: int) -> GenerateCall:
        """What a replica is asked."""
        return GenerateCall(
            request_id=request_id,
            lora_name=lora_name,
            prompt=self.prompt if isinstance(self.prompt, str) else None,
            prompt_token_ids=None if isinstance(self.prompt, str) else self.prompt,
            sampling=self.sampling(),
            max_tokens=self.max_tokens,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            stop=self.stop_strings(),
            epoch=epoch,
        )


GenerationRequest = ChatCompletionRequest | CompletionRequest


class LoadAdapterRequest(Body):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: NonEmpty
    lora_path: NonEmpty
    load_inplace: bool = False
    """Replace what has the name (vLLM's spelling)."""


class AdapterNameRequest(Body):
    """Body of POST /v1/unload_lora_adapter, /v1/pin_lora_adapter and /v1/unpin_lora_adapter."""

    lora_name: NonEmpty


class Answer:
    """The objects that answer one request, whole or in chunks: they share an id, a time and a model."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._chat = isinstance(request, ChatCompletionRequest)
        self.id = ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())

    async def chunks(self, pieces: AsyncIterator[GenerateChunk]) -> AsyncIterator[dict[str, Any]]:
        """The streamed answer: the role (chat only), the text, and the usage where it was asked for."""
        last = None
        async for piece in pieces:
            if last is None and self._chat:
                yield self._chunk({"delta": {"role": "assistant", "content": ""}})
            last = piece
            yield self._piece(piece)
        if self._request.include_usage and last is not None:
            yield {**self._envelope(stream=True), "choices": [], "usage": _usage(last)}

    def whole(self, pieces: list[GenerateChunk]) -> dict[str, Any]:
        """The answer in one object. `pieces` is not empty."""
        text, last = "".join(piece.text for piece in pieces), pieces[-1]
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": last.finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if self._request.return_token_ids:
            choice["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        return {**self._envelope(stream=False), "choices": [choice], "usage": _usage(last)}

    def _piece(self, piece: GenerateChunk) -> dict[str, Any]:
        choice: dict[str, Any] = {"finish_reason": piece.finish_reason}
        if self._chat:
            choice["delta"] = {"content": piece.text} if piece.text else {}
        else:
            choice["text"] = piece.text
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return self._chunk(choice)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        filled = {"index": 0, "logprobs": None, "finish_reason": None, **choice}
        usage: dict[str, Any] = {"usage": None} if self._request.include_usage else {}
        return {**self._envelope(stream=True), "choices": [filled], **usage}

    def _envelope(self, *, stream: bool) -> dict[str, Any]:
        chat = "chat.completion.chunk" if stream else "chat.completion"
        kind = chat if self._chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self._created, "model": self._request.model}


def _usage(last: GenerateChunk) -> dict[str, int]:
    return {
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.completion_tokens,
        "total_tokens": last.prompt_tokens + last.completion_tokens,
    }


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error envelope."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_card(name: str, *, root: str, parent: str | None, created: int) -> dict[str, Any]:
    """One entry of GET /v1/models: `root` is where the weights come from, `parent` the base an adapter builds on."""
    return {"id": name, "object": "model", "created": created, "owned_by": "lora-fleet", "root": root, "parent": parent}
