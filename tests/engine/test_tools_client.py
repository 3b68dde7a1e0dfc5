"""Tools as OpenAI's own client uses them: a real engine held to write a call, and the routes, without a fleet."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Literal, cast

import httpx
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from deployments.engine_client import EngineClient
from deployments.generator import Generator
from deployments.http_api import Service, http_app
from deployments.tokenizer import ModelTokenizer
from deployments.tool_calls import TAGGED_JSON
from lora_core.config import EngineConfig, LoRAConfig
from tests.engine.byte_model import END, byte_model
from tests.engine.openai_service import Direct

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = (
    "{# " + TAGGED_JSON + " between <tool_call> tags #}"
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.city }}{% endfor %}"
    "{% endfor %}<assistant>"
)
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
MESSAGES: Any = [{"role": "user", "content": "Ulm?"}]
ONE = r'<tool_call>\{"name": "weather", "arguments": \{"city": "[A-Z]{3}"\}\}</tool_call>'


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """Of one engine: with a template that says how calls are written, and with one that does not."""
    base = byte_model(tmp_path_factory.mktemp("base"))
    config = EngineConfig(model=base, dtype="float32", device="cpu", max_model_len=512, num_threads=1)
    engine = EngineClient(config, LoRAConfig())
    ready = await engine.start(60)
    async with AsyncExitStack() as stack:
        found = []
        for template in (TEMPLATE, TEMPLATE.replace(TAGGED_JSON, "as it likes")):
            (base / "chat_template.jinja").write_text(template)
            app = http_app(cast(Service, Direct(Generator(engine, ready, ModelTokenizer(base)))))
            http = await stack.enter_async_context(httpx.AsyncClient(transport=httpx.ASGITransport(app)))
            found.append(
                openai.AsyncOpenAI(
                    base_url="http://fleet/v1", api_key="none", http_client=cast(Any, http), max_retries=0
                )
            )
        yield found
    await engine.close()


@pytest.fixture
def client(clients: list[openai.AsyncOpenAI]) -> openai.AsyncOpenAI:
    return clients[0]


@pytest.fixture
def mute(clients: list[openai.AsyncOpenAI]) -> openai.AsyncOpenAI:
    return clients[1]


def held_to(regex: str) -> dict[str, Any]:
    """What makes a model without a mind write what one with a mind would."""
    return {
        "model": "m", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, "seed": 5,
        "extra_body": {"structured_outputs": {"regex": regex}},
    }  # fmt: skip


async def test_calls_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    asked = held_to(f"I look\\. {ONE}{ONE}")
    whole = (await client.chat.completions.create(**asked)).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I look. ")
    calls = [cast(Any, call).function for call in whole.message.tool_calls or []]
    assert [call.name for call in calls] == ["weather", "weather"]
    assert all(len(json.loads(call.arguments)["city"]) == 3 for call in calls)
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look. "
    streamed = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in streamed] == [0, 1]
    assert [cast(Any, call.function).arguments for call in streamed] == [call.arguments for call in calls]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_one_call_where_no_more_are_wanted(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**held_to(ONE + ONE), parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or []) == 1


async def test_without_tools_the_same_text_is_text(client: openai.AsyncOpenAI) -> None:
    for change in ({"tools": openai.omit}, {"tool_choice": "none"}):
        answer = (await client.chat.completions.create(**{**held_to(ONE), **change})).choices[0]
        assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
        assert (answer.message.content or "").startswith("<tool_call>")


async def test_a_conversation_goes_on_with_results(client: openai.AsyncOpenAI) -> None:
    first = (await client.chat.completions.create(**held_to(ONE))).choices[0].message
    calls = first.tool_calls or []
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}
    messages: Any = [*MESSAGES, first.model_dump(exclude_none=True), result]
    answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, max_tokens=1)
    city = json.loads(cast(Any, calls[0]).function.arguments)["city"]
    prompt = f"<tool>weather<user>Ulm?<assistant>weather{city}<tool>rain<assistant>"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)


CALENDAR: Any = {
    "type": "function",
    "function": {
        "name": "calendar",
        "parameters": {
            "$defs": {"Day": {"enum": ["Monday", "Tuesday"]}},
            "type": "object",
            "properties": {"day": {"$ref": "#/$defs/Day"}, "hour": {"type": "integer", "minimum": 0, "maximum": 23}},
            "required": ["day", "hour"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


def asked(**fields: Any) -> dict[str, Any]:
    tools = [CALENDAR, CLOCK]
    return {"model": "m", "messages": MESSAGES, "tools": tools, "max_tokens": 300, "temperature": 1.5, **fields}


def assert_fits(function: Any) -> None:
    arguments = json.loads(function.arguments)
    if function.name == "calendar":
        assert arguments["day"] in ("Monday", "Tuesday")
        assert 0 <= arguments["hour"] <= 23
    else:
        assert (function.name, arguments["zone"]) in (("clock", "UTC"), ("clock", "CET"))


async def test_a_call_that_is_required_is_made(client: openai.AsyncOpenAI) -> None:
    called = set()
    for seed in range(6):
        fields = asked(tool_choice="required", parallel_tool_calls=False, seed=seed)
        whole = (await client.chat.completions.create(**fields)).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        (call,) = [cast(Any, call).function for call in whole.message.tool_calls or []]
        assert_fits(call)
        called.add(call.name)
        chunks = [chunk async for chunk in await client.chat.completions.create(**fields, stream=True)]
        (streamed,) = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
        assert cast(Any, streamed.function).model_dump() == {"name": call.name, "arguments": call.arguments}
    assert called == {"calendar", "clock"}


async def test_several_calls_may_be_made_where_one_is_required(client: openai.AsyncOpenAI) -> None:
    counts = []
    for seed in range(4):
        # The end of text is left to chance, or else comes after the first one.
        answer = await client.chat.completions.create(
            **asked(tool_choice="required", seed=seed, logit_bias={str(END): -4})
        )
        if answer.choices[0].finish_reason == "tool_calls":
            calls = [cast(Any, call).function for call in answer.choices[0].message.tool_calls or []]
            for call in calls:
                assert_fits(call)
            counts.append(len(calls))
    assert max(counts) > 1


async def test_the_function_that_is_named_is_called(client: openai.AsyncOpenAI) -> None:
    for name in ("calendar", "clock"):
        choice: Any = {"type": "function", "function": {"name": name}}
        answer = (await client.chat.completions.create(**asked(tool_choice=choice, seed=1))).choices[0]
        (call,) = [cast(Any, call).function for call in answer.message.tool_calls or []]
        assert call.name == name
        assert_fits(call)
        # As OpenAI has it where the model had no choice.
        assert answer.finish_reason == "stop"


class Clock(BaseModel):
    zone: Literal["UTC", "CET"]


async def test_calls_are_parsed_by_the_clients_own_helper(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        **asked(tools=[openai.pydantic_function_tool(Clock)], tool_choice="required", parallel_tool_calls=False, seed=3)
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Clock)


async def test_a_tool_that_is_strict_leaves_text_as_it_is(client: openai.AsyncOpenAI) -> None:
    strict: Any = {**CLOCK, "function": {**CLOCK["function"], "strict": True}}
    # Left alone, the random model writes what is no text.
    fields = asked(max_tokens=20, temperature=0, logit_bias={str(ord(letter) - ord("!")): 80 for letter in "ab<c"})
    free, held = [
        (await client.chat.completions.create(**{**fields, "tools": tools})).choices[0].message
        for tools in ([CLOCK], [strict])
    ]
    assert (held.content, held.tool_calls) == (free.content, None)
    assert held.content


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tools": openai.omit, "tool_choice": "required"}, "tool_choice asks for a call, which needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "wether"}}},
            "tool_choice names 'wether', and tools has calendar, clock",
        ),
        ({"tool_choice": "any"}, "tool_choice: "),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "leave one out"),
        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f", "strict": True,
                            "parameters": {"properties": {"a": {"type": "array", "uniqueItems": True}}},
                        },
                    }
                ]
            },
            "uniqueItems",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_asked_is_refused_by_name(
    client: openai.AsyncOpenAI, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**{**asked(), **change})
    assert words in str(caught.value)


async def test_what_the_schema_says_beyond_what_is_known_is_left_out_of_account(client: openai.AsyncOpenAI) -> None:
    tool = {**CLOCK, "function": {**CLOCK["function"], "parameters": {**CLOCK["function"]["parameters"], "not": {}}}}
    answer = await client.chat.completions.create(
        **asked(tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=1)
    )
    assert answer.choices[0].message.tool_calls


async def test_a_model_whose_calls_nobody_can_tell_cannot_be_held_to_them(mute: openai.AsyncOpenAI) -> None:
    answer = await mute.chat.completions.create(**asked(max_tokens=3))
    assert answer.choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="nothing says in which form the base model writes them"):
        await mute.chat.completions.create(**asked(tool_choice="required"))
