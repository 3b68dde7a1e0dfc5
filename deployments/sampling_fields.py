"""The sampling fields of a generation body, and what they ask of the engine.

Names and meanings are those of OpenAI's API reference; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`ignore_eos`, `stop_token_ids`, `prompt_logprobs`, `structured_outputs` and `return_token_ids` are vLLM's extensions.
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from deployments.body import Body, JsonObject, NonEmpty
from lora_core.engine.sampling_ranges import MAX_CONSTRAINT_LENGTH, MAX_STOP_TOKEN_IDS
from lora_core.messages import Constraint, SamplingParams

MAX_BIASES = 1024
"""Most entries of `logit_bias`."""

ANY_OBJECT = Constraint("json_schema", '{"type": "object"}')
"""What `response_format: {"type": "json_object"}` asks for."""

MAX_COUNT = 2**31 - 1
"""More of anything than one answer can have."""

MAX_STOPS, LONGEST_STOP = 16, 1024
"""Stop strings, and characters of one: they are looked for at every token."""

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
TokenId = Count
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_STOP)]
NumLogprobs = Annotated[int, Field(ge=0, le=20)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _bias_key(key: str) -> str:
    if re.fullmatch(r"0|[1-9][0-9]{0,17}", key, re.ASCII) is None:
        raise ValueError(f'the key {key[:40]!r} is not a token id; expected digits, as in {{"1234": -5}}')
    return key


def _few_biases(value: Any) -> Any:
    """Refuse too many before any of them is looked at."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"it has {len(value)} entries; it may have up to {MAX_BIASES}")
    return value


BiasKey = Annotated[str, AfterValidator(_bias_key)]
Biases = Annotated[dict[BiasKey, float], Field(max_length=MAX_BIASES), BeforeValidator(_few_biases)]


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With `include_usage`, each chunk tells the usage of its choice so far, too (vLLM's)."""
    include_obfuscation: bool | None = None


class NamedSchema(Body):
    """The schema of a `response_format`. Every constraint is kept exactly, whether or not `strict` is set."""

    name: NonEmpty
    # A pydantic model has methods of the names `schema` and, below, `json`.
    content: JsonObject = Field(default={}, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_where_named(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema goes with type "json_schema", and only with it')
        return self

    def constraint(self) -> Constraint | None:
        """What the answer's text must be."""
        if self.json_schema is not None:
            return Constraint("json_schema", json.dumps(self.json_schema.content))
        return ANY_OBJECT if self.type == "json_object" else None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`, with exactly one of its fields."""

    content: JsonObject | NonEmpty | None = Field(default=None, alias="json")
    """A schema, as an object or as text."""
    regex: NonEmpty | None = None
    choice: Annotated[list[NonEmpty], Field(min_length=1, fail_fast=True)] | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        given = [field for field in (self.content, self.regex, self.choice, self.json_object) if field is not None]
        if len(given) != 1:
            raise ValueError(f"{len(given)} constraints are given; expected one of json, regex, choice and json_object")
        return self

    def constraint(self) -> Constraint:
        """What the answer's text must be."""
        if self.content is not None:
            schema = self.content if isinstance(self.content, str) else json.dumps(self.content)
            return Constraint("json_schema", schema)
        if self.regex is not None:
            return Constraint("regex", self.regex)
        if self.choice is not None:
            return Constraint("regex", "|".join(map(re.escape, self.choice)))
        return ANY_OBJECT


class SamplingFields(Body):
    """What chat and plain completions share."""

    model: NonEmpty
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    max_tokens: Positive | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs comes with a whole answer; leave out stream or prompt_logprobs")
        if sum(constraint is not None for constraint in (self._formatted(), self._structured())) > 1:
            raise ValueError("response_format and structured_outputs are both given; leave one out")
        constraint = self.constraint()
        if constraint is not None and len(constraint.source) > MAX_CONSTRAINT_LENGTH:
            raise ValueError(
                f"the {constraint.kind} has {len(constraint.source)} characters; it may have up to "
                f"{MAX_CONSTRAINT_LENGTH}"
            )
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with a chunk that holds its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a streamed answer holds the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    @property
    def num_prompts(self) -> int:
        """Prompts that are answered side by side."""
        return 1

    def sampling(self, num_logprobs: int | None, num_prompt_logprobs: int | None) -> SamplingParams:
        """The engine's view of the sampling fields; the default temperature is OpenAI's, 1.

        Args:
            num_logprobs: How many of the likeliest tokens are told with each one of the answer; None tells none at all.
            num_prompt_logprobs: The same for the prompt's tokens.
        """
        return SamplingParams(
            min_tokens=self.min_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((int(token_id), value) for token_id, value in (self.logit_bias or {}).items()),
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=num_logprobs,
            prompt_logprobs=num_prompt_logprobs,
            constraint=self.constraint(),
        )

    def constraint(self) -> Constraint | None:
        """What the answer's text must be."""
        return self._formatted() or self._structured()

    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, however they were given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _formatted(self) -> Constraint | None:
        return None if self.response_format is None else self.response_format.constraint()

    def _structured(self) -> Constraint | None:
        return None if self.structured_outputs is None else self.structured_outputs.constraint()
