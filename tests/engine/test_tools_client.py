"""Tools as OpenAI's own client uses them: a real engine held to write a call, and the routes, without a fleet."""

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import openai
import pytest
import pytest_asyncio

from deployments.engine_client import EngineClient
from deployments.generator import Generator
from deployments.http_api import Service, http_app
from deployments.tokenizer import ModelTokenizer
from deployments.tool_calls import TAGGED_JSON
from lora_core.config import EngineConfig, LoRAConfig
from tests.engine.byte_model import byte_model
from tests.engine.test_openai_client import Direct

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
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    base = byte_model(tmp_path_factory.mktemp("base"))
    (base / "chat_template.jinja").write_text(TEMPLATE)
    config = EngineConfig(model=base, dtype="float32", device="cpu", max_model_len=512, num_threads=1)
    engine = EngineClient(config, LoRAConfig())
    ready = await engine.start(60)
    app = http_app(cast(Service, Direct(Generator(engine, ready, ModelTokenizer(base)))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
        yield openai.AsyncOpenAI(base_url="http://fleet/v1", api_key="none", http_client=cast(Any, http), max_retries=0)
    await engine.close()


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


async def test_what_cannot_be_asked_is_refused_by_name(client: openai.AsyncOpenAI) -> None:
    for change in ({"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            await client.chat.completions.create(**{**held_to(ONE), **change})
