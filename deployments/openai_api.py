"""The OpenAI-style request bodies this server reads; `deployments.answer` has the objects it answers with."""

from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from deployments.body import Body, NonEmpty
from deployments.chat_messages import Messages
from deployments.generation import CallRules, GenerateCall
from deployments.prompt_field import MAX_ANSWERS, Prompts
from deployments.sampling_fields import Count, NumLogprobs, Positive, SamplingFields, TokenId
from deployments.text_calls import TextCall, TextTokens
from deployments.tool_fields import NamedTool, ToolChoice, Tools
from lora_core.messages import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of /v1/completions; chat answers fill the context."""


class ChatCompletionRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

    @model_validator(mode="after")
    def _one_longest_answer(self) -> "ChatCompletionRequest":
        given = {count for count in (self.max_tokens, self.max_completion_tokens) if count is not None}
        if len(given) > 1:
            raise ValueError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}, and both "
                "mean the same; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _tools_agree(self) -> "ChatCompletionRequest":
        names = [tool.function.name for tool in self.tools or ()]
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice asks for a call, which needs tools; send tools or leave out tool_choice")
        if isinstance(self.tool_choice, NamedTool) and (name := self.tool_choice.function.name) not in names:
            raise ValueError(f"tool_choice names {name!r}, and tools has {', '.join(names)}")
        if self.call_rules is not None and self.constraint() is not None:
            raise ValueError(
                "response_format or structured_outputs holds the answer to one form, and tool_choice, or a tool that "
                "is strict, to another; leave one out"
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told with each one of the answer; None tells none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def names_a_tool(self) -> bool:
        """Whether one certain function must be called."""
        return isinstance(self.tool_choice, NamedTool)

    @property
    def call_rules(self) -> CallRules | None:
        """What the answer's calls are held to; None where the model calls as it likes."""
        functions = [tool.function for tool in self.tools or ()]
        if self.tool_choice == "none":
            return None
        if isinstance(self.tool_choice, NamedTool):
            functions = [function for function in functions if function.name == self.tool_choice.function.name]
        strict = [function.name for function in functions if function.strict]
        is_needed = self.tool_choice == "required" or self.names_a_tool
        if not is_needed and not strict:
            return None
        return CallRules(
            functions=[function.name for function in functions],
            strict=strict,
            is_needed=is_needed,
            most_calls=1 if self.names_a_tool or self.parallel_tool_calls is False else None,
        )

    def call(self, request_id: str, lora_name: str | None, epoch: int, index: int = 0) -> GenerateCall:
        """What a replica is asked. A chat is one prompt, with the index 0."""
        return GenerateCall(
            request_id=request_id,
            lora_name=lora_name,
            messages=[message.rendered() for message in self.messages],
            tools=rendered_tools(self.tools, self.tool_choice),
            one_tool_call=self.parallel_tool_calls is False,
            call_rules=self.call_rules,
            sampling=self.sampling(self.num_logprobs, self.prompt_logprobs),
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self.stop_strings(),
            epoch=epoch,
        )


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Prompts
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    max_tokens: Count | None = None
    """With 0, which goes with `echo`, the prompt alone is told."""

    @model_validator(mode="after")
    def _asks_for_something(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, which goes with echo: true alone; raise it to at least 1")
        num_answers = self.num_prompts * (self.n or 1)
        if num_answers > MAX_ANSWERS:
            raise ValueError(
                f"prompt has {self.num_prompts} entries and n is {self.n or 1}, together {num_answers} answers; one "
                f"request may ask for up to {MAX_ANSWERS}: send several"
            )
        return self

    @property
    def num_prompts(self) -> int:
        """Prompts that are answered side by side."""
        return len(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told with each one of the answer; None tells none at all."""
        return self.logprobs

    @cached_property
    def _sampling(self) -> SamplingParams:
        """The same for all prompts, of which there may be a thousand."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return self.sampling(self.logprobs, max((count for count in asked if count is not None), default=None))

    def call(self, request_id: str, lora_name: str | None, epoch: int, index: int = 0) -> GenerateCall:
        """What a replica is asked for the sake of the prompt at `index`."""
        prompt = self.prompt[index]
        return GenerateCall(
            request_id=request_id,
            lora_name=lora_name,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            sampling=self._sampling,
            n=self.n or 1,
            echo=bool(self.echo),
            max_tokens=self.max_tokens,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            stop=self.stop_strings(),
            epoch=epoch,
        )


GenerationRequest = ChatCompletionRequest | CompletionRequest


class TextRequest(Body):
    """Body of POST /tokenize: a text or a chat (vLLM's fields)."""

    model: NonEmpty | None = None
    """Unset: the base model. All models have its tokenizer."""
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    """With what the tokenizer puts before a text; unset: yes for a text, no for a chat, whose template writes it."""
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> "TextRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected exactly one of prompt and messages")
        return self

    def call(self) -> TextCall:
        """What a replica is asked."""
        return TextCall(
            prompt=self.prompt,
            messages=None if self.messages is None else [message.rendered() for message in self.messages],
            tools=rendered_tools(self.tools, None),
            add_special_tokens=self.prompt is not None if self.add_special_tokens is None else self.add_special_tokens,
            add_generation_prompt=self.add_generation_prompt,
            with_names=self.return_token_strs,
        )


class TokensRequest(Body):
    """Body of POST /detokenize."""

    model: NonEmpty | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def rendered_tools(tools: Tools | None, choice: ToolChoice | None) -> list[dict[str, Any]]:
    """Tools as chat templates expect them; none where none may be called."""
    return [] if choice == "none" else [tool.rendered() for tool in tools or ()]


class LoadAdapterRequest(Body):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: NonEmpty
    lora_path: NonEmpty
    load_inplace: bool = False
    """Replace what has the name (vLLM's spelling)."""


class AdapterNameRequest(Body):
    """Body of POST /v1/unload_lora_adapter, /v1/pin_lora_adapter and /v1/unpin_lora_adapter."""

    lora_name: NonEmpty


class ErrorDetail(BaseModel):
    """What went wrong, in OpenAI's fields."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error envelope, with the id that the log and the header `X-Request-Id` have, too."""

    error: ErrorDetail
    request_id: str


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error envelope."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_card(name: str, *, root: str, parent: str | None, created: int) -> dict[str, Any]:
    """One entry of GET /v1/models: `root` is where the weights come from, `parent` the base an adapter builds on."""
    return {"id": name, "object": "model", "created": created, "owned_by": "lora-fleet", "root": root, "parent": parent}


def tokens_body(tokens: TextTokens) -> dict[str, Any]:
    """Answer of POST /tokenize, in vLLM's fields."""
    return {
        "count": len(tokens.token_ids),
        "max_model_len": tokens.max_model_len,
        "tokens": tokens.token_ids,
        "token_strs": tokens.names,
    }
