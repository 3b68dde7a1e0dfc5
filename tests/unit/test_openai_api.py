"""Request bodies: what is read, what is refused and under which name; and the objects that answer."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from deployments.answer import Answer
from deployments.generation import GenerateChunk
from deployments.http_api import events
from deployments.ingress import parse_body
from deployments.openai_api import ChatCompletionRequest, CompletionRequest
from deployments.token_count import TokenCount, most_tokens
from lora_core.errors import EngineDead, InvalidRequest
from lora_core.messages import SamplingParams

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def test_chat_fields_reach_the_engine() -> None:
    body = {
        **CHAT, "temperature": 0, "top_p": 0.5, "top_k": -1, "seed": 7, "stop": "x", "max_completion_tokens": 9,
        "stop_token_ids": [3], "user": "u", "n": 1, "logprobs": False, "presence_penalty": 0.0,
    }  # fmt: skip
    request = parse_body(body)
    assert isinstance(request, ChatCompletionRequest)
    call = request.call("id", "pirate", 4)
    assert (call.lora_name, call.epoch, call.max_tokens, call.stop) == ("pirate", 4, 9, ("x",))
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.5, 0, 7)
    assert sampling.stop_token_ids == (3,)
    assert call.messages == [{"role": "user", "content": "hi"}]


def test_every_sampling_field_reaches_the_engine() -> None:
    body = {
        **TEXT, "n": 3, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": -2, "frequency_penalty": 0.5,
        "logit_bias": {"7": -100, "0": 0.5}, "min_tokens": 4, "ignore_eos": True, "logprobs": 2, "echo": True,
        "prompt_logprobs": 1, "max_tokens": 9,
    }  # fmt: skip
    call = parse_body(body).call("id", None, 0)
    assert (call.n, call.echo, call.max_tokens) == (3, True, 9)
    assert call.sampling == SamplingParams(
        min_p=0.1, repetition_penalty=1.5, presence_penalty=-2, frequency_penalty=0.5, min_tokens=4, ignore_eos=True,
        logit_bias=((7, -100), (0, 0.5)), logprobs=2, prompt_logprobs=2,
    )  # fmt: skip
    chat = parse_body({**CHAT, "logprobs": True, "top_logprobs": 5, "prompt_logprobs": 1}).call("id", None, 0)
    assert (chat.sampling.logprobs, chat.sampling.prompt_logprobs) == (5, 1)
    assert parse_body({**CHAT, "logprobs": True}).call("id", None, 0).sampling.logprobs == 0
    assert parse_body({**TEXT, "echo": True}).call("id", None, 0).sampling.prompt_logprobs is None


@pytest.mark.parametrize(
    ("field", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}},
            "json_schema",
            '{"type": "array"}',
        ),
        ({"structured_outputs": {"json": {"type": "array"}}}, "json_schema", '{"type": "array"}'),
        ({"structured_outputs": {"json": "{}"}}, "json_schema", "{}"),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a|b"}}, "regex", "a|b"),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, "regex", r"a\.b|c"),
    ],
)
def test_constraints_reach_the_engine(field: dict[str, Any], kind: str, source: str) -> None:
    constraint = parse_body({**CHAT, **field}).call("id", None, 0).sampling.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.source) == (kind, source)


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nested"):
        parse_body({**CHAT, "structured_outputs": {"json": schema}})


def test_defaults() -> None:
    chat, text = parse_body(CHAT).call("id", None, 0), parse_body(TEXT).call("id", None, 0)
    assert (chat.max_tokens, chat.default_max_tokens) == (None, None)
    assert (text.max_tokens, text.default_max_tokens) == (None, 16)
    assert chat.sampling.temperature == 1.0


def test_message_forms() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse_body({"model": "m", "messages": [{"role": "developer", "content": parts}]})
    assert request.call("id", None, 0).messages == [{"role": "system", "content": "ab"}]


def test_prompt_may_be_token_ids() -> None:
    call = parse_body({"model": "m", "prompt": [1, 2]}).call("id", None, 0)
    assert (call.prompt, call.prompt_token_ids) == (None, [1, 2])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": -0.1}, "temperature: Input should be greater than or equal to 0, found -0.1"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, 'found "hot"'),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "found a list of 17"),
        ({"stop": "\ud800"}, 'found "\\ud800"'),
        ({"seed": "x" * 1000}, 'found "' + "x" * 39 + "..."),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 0}, "n: "),
        ({"n": True}, "n: "),
        ({"logprobs": 0}, "logprobs: "),
        ({"top_logprobs": 3}, "top_logprobs is only allowed when logprobs is true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: "),
        ({"prompt_logprobs": 21}, "prompt_logprobs: "),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs comes with a whole answer"),
        ({"echo": True}, "echo is not supported"),
        ({"min_p": 1.1}, "min_p: "),
        ({"min_tokens": -1}, "min_tokens: "),
        ({"repetition_penalty": 0}, "repetition_penalty: "),
        ({"presence_penalty": 2.5}, "presence_penalty: "),
        ({"frequency_penalty": -2.5}, "frequency_penalty: "),
        ({"logit_bias": {"x": 1}}, "the key 'x' is not a token id"),
        ({"logit_bias": {"01": 1}}, "the key '01' is not a token id"),
        ({"logit_bias": {"1\n": 1}}, "the key '1\\n' is not a token id"),
        ({"logit_bias": {"\u0661": 1}}, "is not a token id"),
        ({"stop_token_ids": [1] * 1025}, "at most 1024"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens is 3 and max_completion_tokens is 4"),
        ({"logit_bias": {"1": "high"}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias: Input should be a valid dictionary, found a list of 1"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, 'json_schema goes with type "json_schema"'),
        ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "json_schema goes with"),
        ({"structured_outputs": {}}, "0 constraints are given"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "2 constraints are given"),
        ({"structured_outputs": {"regx": "a"}}, "unknown key 'regx'; did you mean 'regex'?"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "response_format and structured_outputs",
        ),
        ({"guided_json": {}}, 'write structured_outputs: {"json": ...}'),
        ({"messages": [{"role": "user"}]}, "needs content"),
        ({"messages": [{"role": "user", "content": None}]}, "needs content"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "tool_calls.0.id"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": "x",
                        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
                    }
                ]
            },
            "tool_calls are an assistant's",
        ),
        ({"tools": [{}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice asks for a call, which needs tools"),
        ({"tool_choice": "any", "tools": []}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
        ({"reasoning_effort": "high"}, "reasoning_effort is not supported"),
        ({"functions": [{"name": "f"}]}, "functions is not supported"),
        ({"temprature": 1}, "unknown key 'temprature'; did you mean 'temperature'?"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": "hi"}, "messages"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body({**CHAT, **change})
    assert named in str(caught.value)


def test_a_history_as_clients_keep_it_is_read() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
    }
    messages = [*CHAT["messages"], answer, {"role": "tool", "content": "x", "tool_call_id": "1"}]
    call = parse_body({**CHAT, "messages": messages, "stream": None}).call("id", None, 0)
    assert [message["role"] for message in call.messages or ()] == ["user", "assistant", "tool"]


def test_refusals_name_the_field_and_not_the_type_it_failed() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body({**CHAT, "stop": ""})
    assert str(caught.value).startswith("stop: ")
    assert "constrained" not in str(caught.value)


@pytest.mark.parametrize("body", [None, [], "x"])
def test_a_body_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected a dict"):
        parse_body(body)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "is an empty text; it needs at least one character"),
        ([], "is an empty list; it needs at least one token id"),
        ([-1], "has -1 in place 0; expected a token id, from 0 on"),
        ([3, 1.5], "has 1.5 in place 1"),
        ([3, True], "has true in place 1"),
        ([3, "a"], 'has "a" in place 1'),
        (None, "is null; expected a text"),
        (3, "is 3; expected a text"),
        ({}, "is an object; expected a text"),
        (["a", ""], "entry 1 is an empty text"),
        ([[1], []], "entry 1 is an empty list"),
        ([[1], [2, -2]], "entry 1 has -2 in place 1"),
        ([[1], "a"], 'entry 1 is "a", and entry 0 is a list of 1; send one kind'),
        (["a", 3], 'entry 1 is 3, and entry 0 is "a"'),
        ([[[1]]], "entry 0 has a list of 1 in place 0"),
        (["x" * 60, None], "entry 1 is null, and entry 0 is"),
    ],
)
def test_wrong_prompts_are_refused(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body({"model": "m", "prompt": prompt})
    assert str(caught.value).startswith("prompt: ")
    assert words in str(caught.value)


def test_prompts_are_bounded_with_their_answers() -> None:
    with pytest.raises(InvalidRequest, match=r"513 entries and n is 2, together 1026 answers; .* up to 1024"):
        parse_body({"model": "m", "prompt": ["a"] * 513, "n": 2})
    assert parse_body({"model": "m", "prompt": ["a"] * 1024}).num_prompts == 1024


def test_each_prompt_is_a_call_of_its_own() -> None:
    request = parse_body({"model": "m", "prompt": ["a", "b"], "n": 3})
    calls = [request.call("id", "pirate", 4, index) for index in range(request.num_prompts)]
    assert [(call.prompt, call.n, call.lora_name) for call in calls] == [("a", 3, "pirate"), ("b", 3, "pirate")]
    ids = parse_body({"model": "m", "prompt": [[1, 2], [3]]})
    assert [ids.call("id", None, 0, index).prompt_token_ids for index in range(2)] == [[1, 2], [3]]


def test_usage_counts_each_prompt_once() -> None:
    request = parse_body({"model": "m", "prompt": ["a", "b"], "n": 2})
    chunks = [
        GenerateChunk(
            text="", token_ids=[1], index=index, finish_reason="stop", prompt_tokens=10 + index // 2,
            cached_tokens=index, completion_tokens=1 + index,
        )
        for index in range(4)
    ]  # fmt: skip
    assert Answer(request).whole(chunks)["usage"] == {
        "prompt_tokens": 21, "completion_tokens": 10, "total_tokens": 31, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    count = TokenCount(2)
    count.add(chunks)
    assert count.total == 31
    assert most_tokens(parse_body({"model": "m", "prompt": ["a", "b"], "n": 2, "max_tokens": 7})) == 28


@pytest.mark.parametrize(
    "ignored",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "s"},
        {"prediction": {"type": "content", "content": "x"}, "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"reasoning_effort": None, "verbosity": "medium", "modalities": ["text"], "functions": [], "audio": None},
    ],
)
def test_what_changes_no_answer_is_ignored(ignored: dict[str, Any]) -> None:
    assert parse_body({**CHAT, **ignored}).call("id", None, 0) == parse_body(CHAT).call("id", None, 0)


def test_what_an_assistant_thought_goes_back_to_the_template() -> None:
    said = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2", "type": "text"}
    call = parse_body({**CHAT, "messages": [*CHAT["messages"], said]}).call("id", None, 0)
    assert (call.messages or [])[1] == {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}


def pieces() -> list[GenerateChunk]:
    return [
        GenerateChunk(text="Ar", token_ids=[5], prompt_tokens=3, cached_tokens=2, completion_tokens=1),
        GenerateChunk(
            text="r!", token_ids=[6, 2], finish_reason="stop", prompt_tokens=3, cached_tokens=2, completion_tokens=3
        ),
    ]


async def stream() -> AsyncGenerator[GenerateChunk, None]:
    for piece in pieces():
        yield piece


async def broken_stream() -> AsyncGenerator[GenerateChunk, None]:
    yield pieces()[0]
    raise EngineDead("the replica is gone")


def test_whole_answer() -> None:
    answer = Answer(ChatCompletionRequest.model_validate({**CHAT, "return_token_ids": True})).whole(pieces())
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Arr!"}
    assert answer["choices"][0]["token_ids"] == [5, 6, 2]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_streamed_chunks_with_usage() -> None:
    request = parse_body({**CHAT, "stream": True, "stream_options": {"include_usage": True}})
    chunks = [chunk async for chunk in Answer(request).chunks(stream())]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == "Arr!"
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_events_end_with_done_only_when_complete() -> None:
    request = CompletionRequest.model_validate({**TEXT, "stream": True})
    pieces_left = stream()
    written = [event async for event in events(request, await anext(pieces_left), pieces_left)]
    assert written[-1] == "data: [DONE]\n\n"
    pieces_left = broken_stream()
    written = [event async for event in events(request, await anext(pieces_left), pieces_left)]
    assert '"error"' in written[-1]
    assert "the replica is gone" in written[-1]
    assert not any("[DONE]" in event for event in written)


async def test_a_client_that_leaves_closes_the_stream_below() -> None:
    closed = []

    async def watched() -> AsyncGenerator[GenerateChunk, None]:
        try:
            while True:
                yield pieces()[0]
        finally:
            closed.append(True)

    request = CompletionRequest.model_validate({**TEXT, "stream": True})
    below = watched()
    above = events(request, await anext(below), below)
    await anext(above)
    await above.aclose()  # type: ignore[attr-defined]
    assert closed
