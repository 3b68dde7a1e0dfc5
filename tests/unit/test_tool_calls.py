"""Tools: how a chat's template is told of them, and how calls are read out of answers, in any pieces."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_parsing import ResponseParser

from deployments.answer import Answer
from deployments.generation import GenerateChunk, ToolCall
from deployments.ingress import parse_body
from deployments.openai_api import ChatCompletionRequest
from deployments.tokenizer import ModelTokenizer
from deployments.tool_calls import TAGGED_JSON, TAGGED_JSON_RESPONSES, Spoken, ToolReader, tool_reader
from lora_core.errors import InvalidRequest
from tests.unit.test_tokenizer import TEMPLATE, save_tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
WITH_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + TEMPLATE
TAGGED = "{# " + TAGGED_JSON + " between <tool_call> tags #}" + WITH_TOOLS

THINKING: dict[str, Any] = {
    "start_anchor": "[assistant]",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {},
        "tool_calls": {
            "open_pattern": r"\[CALL (?P<name>\w+)\]",
            "close": "[END]",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def tagged_reader() -> ToolReader:
    return ToolReader(lambda: ResponseParser(TAGGED_JSON_RESPONSES, prefix="", tools=[TOOL]))


def read(reader: ToolReader, pieces: list[str]) -> list[Spoken]:
    """What each piece came to, and the end."""
    return [reader.read(piece, final=index == len(pieces) - 1) for index, piece in enumerate(pieces)]


def whole(spoken: list[Spoken]) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [(call.name, json.loads(call.arguments)) for one in spoken for call in one.calls]
    return "".join(one.text for one in spoken), "".join(one.reasoning for one in spoken), calls


ANSWER = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call> Done.'
)
CALLS = [("weather", {"city": "Köln", "days": 2}), ("weather", {})]


@given(st.lists(st.integers(0, len(ANSWER)), max_size=12))
def test_calls_are_read_however_the_text_is_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(ANSWER)]
    spoken = read(tagged_reader(), [ANSWER[start:end] for start, end in itertools.pairwise(edges)])
    text, reasoning, calls = whole(spoken)
    assert calls == CALLS
    assert (reasoning, text.split()) == ("", ["Let", "me", "look.", "Done."])
    ids = [call.id for one in spoken for call in one.calls]
    assert len(set(ids)) == 2


def test_text_before_a_call_is_streamed() -> None:
    spoken = read(tagged_reader(), ["Let me ", "look.<tool", "_call>", '{"name": "weather"}</tool_call>'])
    assert [one.text for one in spoken] == ["Let me ", "look.", "", ""]
    assert [call.arguments for call in spoken[-1].calls] == ["{}"]


@pytest.mark.parametrize(
    "answer",
    [
        "No call at all.", "a <tool b", "<tool_call>", 'x <tool_call>{"name": "weather", "argu',
        "<tool_call>hm</tool_call> y",
        '<tool_call>{"no": "name"}</tool_call>', '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call> and <tool_call>{</tool_call>', "",
        "<tool_call>" + "[" * 3000 + "]" * 3000 + "</tool_call>",
        '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "weather\\udfff", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_is_no_call_stays_text_to_the_last_character(answer: str, size: int) -> None:
    pieces = [answer[start : start + size] for start in range(0, len(answer), size)] or [""]
    assert whole(read(tagged_reader(), pieces)) == (answer, "", [])


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_an_authors_own_template_is_followed(size: int) -> None:
    answer = "<think>Hm, rain?</think>I look.[CALL weather]<city>Ulm</city><days>3</days>[END]"
    reader = ToolReader(lambda: ResponseParser(THINKING, prefix="[user]x[assistant]", tools=[TOOL]))
    pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
    text, reasoning, calls = whole(read(reader, pieces))
    assert (text, reasoning) == ("I look.", "Hm, rain?")
    assert calls == [("weather", {"city": "Ulm", "days": 3})], "3 is a number, as the tool's schema says"


def test_a_thought_that_the_template_begins_is_no_text() -> None:
    reader = ToolReader(lambda: ResponseParser(THINKING, prefix="[user]x[assistant]<think>", tools=[TOOL]))
    assert whole(read(reader, ["Hm.", "</think>Yes."])) == ("Yes.", "Hm.", [])


def test_templates_are_told_of_tools(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path, WITH_TOOLS))
    text = tokenizer.render_chat([{"role": "user", "content": "x"}], [TOOL])
    assert json.loads(text.partition("<begin>")[0]) == TOOL
    assert tool_reader(tokenizer, text, [TOOL]) is None, "nothing says how the model answers"


def test_a_template_without_tools_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="knows no tools"):
        ModelTokenizer(save_tokenizer(tmp_path)).render_chat([{"role": "user", "content": "x"}], [TOOL])


def test_which_answers_are_read(tmp_path: Path) -> None:
    tagged = ModelTokenizer(save_tokenizer(tmp_path / "a", TAGGED))
    assert tool_reader(tagged, "", [TOOL]) is not None
    folder = save_tokenizer(tmp_path / "b", WITH_TOOLS)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": THINKING}))
    own = tool_reader(ModelTokenizer(folder), "[user]x[assistant]", [TOOL])
    assert own is not None
    assert whole(read(own, ["[CALL weather]<city>Ulm</city>[END]"]))[2] == [("weather", {"city": "Ulm"})]


CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def test_tools_and_calls_reach_the_template() -> None:
    made = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    broken = {"id": "c2", "function": {"name": "weather", "arguments": "{"}}
    messages = [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [made, broken]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]  # fmt: skip
    call = parse_body({**CHAT, "messages": messages, "tools": [TOOL], "parallel_tool_calls": False}).call("id", None, 0)
    assert call.tools == [TOOL]
    assert call.one_tool_call
    rendered = call.messages or []
    assert [one["function"]["arguments"] for one in rendered[1]["tool_calls"]] == [{"city": "Ulm"}, "{"]
    assert rendered[2] == {"role": "tool", "content": "rain", "tool_call_id": "c1"}
    assert parse_body({**CHAT, "tools": [TOOL], "tool_choice": "none"}).call("id", None, 0).tools == []
    bare = {"type": "function", "function": {"name": "now"}}
    told = parse_body({**CHAT, "tools": [bare]}).call("id", None, 0).tools[0]["function"]
    assert told == {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}


def chunk(text: str = "", *calls: ToolCall, end: Any = None, reasoning: str = "") -> GenerateChunk:
    return GenerateChunk(
        text=text, token_ids=[1], finish_reason=end, tool_calls=calls, reasoning=reasoning, prompt_tokens=1,
        completion_tokens=1,
    )  # fmt: skip


async def test_answers_with_calls_in_openais_objects() -> None:
    request = ChatCompletionRequest.model_validate({**CHAT, "tools": [TOOL]})
    call = ToolCall("call_1", "weather", '{"city": "Ulm"}')
    told = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    choice = Answer(request).whole([chunk("", call, end="stop")])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": [told]}
    cut = Answer(request).whole([chunk("a"), chunk("b", call, end="length", reasoning="Hm.")])["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"] == {
        "role": "assistant", "content": "ab", "reasoning_content": "Hm.", "tool_calls": [told],
    }  # fmt: skip

    async def pieces() -> Any:
        yield chunk("a")
        yield chunk("", call, call, end="stop", reasoning="Hm.")

    deltas = [one["choices"][0] async for one in Answer(request).chunks(pieces())]
    assert deltas[1]["delta"] == {"content": "a"}
    assert deltas[2]["delta"] == {
        "reasoning_content": "Hm.", "tool_calls": [{"index": 0, **told}, {"index": 1, **told}],
    }  # fmt: skip
    assert [one["finish_reason"] for one in deltas] == [None, None, "tool_calls"]
