"""Bodies made to take long, or to fill an answer: each is refused for the first thing that is wrong with it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from deployments.body import MAX_DEPTH, is_too_deep
from deployments.chat_messages import MAX_ENTRIES, ChatMessage
from deployments.http_errors import describe_validation
from deployments.ingress import parse_body
from deployments.openai_api import ChatCompletionRequest, CompletionRequest, TextRequest, TokensRequest
from deployments.sampling_fields import LONGEST_STOP, MAX_COUNT
from deployments.tool_fields import MadeCall
from lora_core.errors import InvalidRequest

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
SILENT = {"role": "user", "content": ""}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"items": value}
    return value


def call_with(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def chat_of(count: int, *, kind: str) -> dict[str, Any]:
    """A chat with so many entries of one kind in it."""
    if kind == "messages":
        return {**CHAT, "messages": [SILENT] * count}
    if kind == "parts":
        return {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * (count - 1)}]}
    return {**CHAT, "messages": [{"role": "assistant", "tool_calls": [call_with("{}")] * (count - 1)}]}


@pytest.mark.parametrize("kind", ["messages", "parts", "calls"])
def test_a_chat_has_so_many_entries_and_no_more(kind: str) -> None:
    parse_body(chat_of(MAX_ENTRIES, kind=kind))
    with pytest.raises(InvalidRequest, match=f"^messages: it has {MAX_ENTRIES + 1} entries, .* up to {MAX_ENTRIES}$"):
        parse_body(chat_of(MAX_ENTRIES + 1, kind=kind))
    with pytest.raises(ValidationError, match="entries"):
        TextRequest.model_validate({"messages": [SILENT] * (MAX_ENTRIES + 1)})


def endless() -> Iterator[tuple[type[BaseModel], dict[str, Any]]]:
    """Bodies with thousands of faults."""
    many = 5000
    yield ChatCompletionRequest, {**CHAT, "messages": [{"role": "x"}] * many}
    yield ChatCompletionRequest, {**CHAT, "messages": [{"role": "user", "content": [{"type": "x"}] * many}]}
    yield ChatCompletionRequest, {**CHAT, "messages": [{"role": "assistant", "tool_calls": [{}] * many}]}
    yield ChatCompletionRequest, {**CHAT, "tools": [{}] * 128}
    yield ChatCompletionRequest, {**CHAT, "stop_token_ids": [-1] * 1024}
    yield ChatCompletionRequest, {**CHAT, "logit_bias": {f"x{index}": "y" for index in range(many)}}
    yield ChatCompletionRequest, {**CHAT, "structured_outputs": {"choice": [""] * many}}
    yield ChatCompletionRequest, {**CHAT, **{f"temperatur{index}": 1 for index in range(many)}}
    yield ChatCompletionRequest, {**CHAT, "x" * 100_000: 1}
    yield CompletionRequest, {**TEXT, "prompt": [""] * many}
    yield CompletionRequest, {**TEXT, "stop": [""] * many}
    yield TokensRequest, {"tokens": [-1] * many}


@pytest.mark.parametrize(("kind", "body"), list(endless()))
def test_of_thousands_of_faults_a_few_are_told(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 10
    assert len(describe_validation(caught.value)[0]) < 2000


def test_so_many_faults_are_told_and_the_rest_counted() -> None:
    with pytest.raises(InvalidRequest, match=r"the key 'x0' .*the key 'x15' .*; and 984 more faults$") as caught:
        parse_body({**CHAT, "logit_bias": {f"x{index}": 1 for index in range(1000)}})
    assert "'x16'" not in str(caught.value)


def test_unknown_keys_are_named_and_the_rest_counted() -> None:
    words = r"unknown key 'key0'; .*unknown key 'key7'; .*; and 92 more unknown keys$"
    with pytest.raises(InvalidRequest, match=words):
        parse_body({**CHAT, **{f"key{index}": 1 for index in range(100)}})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": MAX_COUNT + 1}, "n: Input should be less than or equal to 2147483647"),
        ({"max_tokens": 10**400}, "max_tokens: "),
        ({"max_completion_tokens": 10**400}, "max_completion_tokens: "),
        ({"min_tokens": 10**400}, "min_tokens: "),
        ({"top_k": 10**400}, "top_k: "),
        ({"stop_token_ids": [10**400]}, "stop_token_ids.0: "),
        ({"stop": "x" * (LONGEST_STOP + 1)}, "stop: String should have at most 1024 characters"),
        ({"stop": ["x" * (LONGEST_STOP + 1)]}, "String should have at most 1024 characters"),
        ({"logit_bias": {str(token_id): 1 for token_id in range(1025)}}, "logit_bias: it has 1025 entries"),
        ({"structured_outputs": {"regex": "x" * 65537}}, "the regex has 65537 characters; it may have up to 65536"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(MAX_DEPTH + 1)}}},
            "response_format.json_schema.schema: it is nested too deeply; it may have up to 128 levels",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(MAX_DEPTH + 1)}}]},
            "tools.0.function.parameters: it is nested too deeply",
        ),
    ],
)
def test_what_is_too_large_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body({**CHAT, **fields})
    assert words in str(caught.value)


def test_depth_is_counted_in_levels_of_objects_and_lists() -> None:
    assert not is_too_deep(nested(MAX_DEPTH))
    assert is_too_deep(nested(MAX_DEPTH + 1))
    assert is_too_deep([nested(MAX_DEPTH)])
    assert not is_too_deep("text")
    assert not is_too_deep([{"a": 1}] * 1000)


def test_arguments_that_no_template_could_write_stay_text() -> None:
    for levels, is_text in ((MAX_DEPTH, False), (MAX_DEPTH + 1, True), (100_000, True)):
        text = '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)
        rendered = MadeCall.model_validate(call_with(text)).rendered()["function"]["arguments"]
        assert (rendered == text) == is_text
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call_with(json.dumps({"a": 1}))]})
    assert message.rendered()["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_what_a_thousand_prompts_share_is_made_once() -> None:
    request = CompletionRequest.model_validate({**TEXT, "prompt": ["a", "b"], "logit_bias": {"1": 1}, "echo": True})
    first, second = (request.call("id", None, 0, index) for index in range(2))
    assert (first.prompt, second.prompt) == ("a", "b")
    assert first.sampling is second.sampling
    assert first.sampling.logit_bias == ((1, 1.0),)
