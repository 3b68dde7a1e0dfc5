"""Answers as OpenAI's own client reads them: a real engine process, the routes, and the client, without a fleet."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any, cast

import openai
import pytest
import pytest_asyncio
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk, ChatCompletionTokenLogprob
from pydantic import BaseModel

from tests.engine.byte_model import END
from tests.engine.openai_service import MAX_NUM_SEQS, MESSAGES, RENDERED, Served, assert_idle, serving
from tests.factories import reference_logits

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("base")) as found:
        yield found


def text_of(data: list[list[int]]) -> str:
    """Tokens' bytes as one text; the end of text is not part of it."""
    whole = b"".join(bytes(one) for one in data)
    return whole.removesuffix(b"<end>").decode(errors="replace")


def assert_same_scores(found: list[ChatCompletionTokenLogprob], expected: list[ChatCompletionTokenLogprob]) -> None:
    """The same tokens and likeliest tokens; what shares a step with them changes log-probabilities in the last bits."""
    for one, other in zip(found, expected, strict=True):
        pairs: list[tuple[Any, Any]] = [(one, other), *zip(one.top_logprobs, other.top_logprobs, strict=True)]
        for mine, right in pairs:
            assert (mine.token, mine.bytes) == (right.token, right.bytes)
            assert mine.logprob == pytest.approx(right.logprob, abs=1e-4)


async def test_logprobs_of_a_chat(served: Served) -> None:
    chat = await served.client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=24, temperature=0, logprobs=True, top_logprobs=4,
        logit_bias={str(END): -100},
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    choice = chat.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    token_ids = cast(Any, choice).token_ids
    assert len(content) == len(token_ids) == 24
    prompt = served.tokenizer.encode(RENDERED)
    expected = reference_logits(served.base, None, prompt + token_ids).log_softmax(-1)[len(prompt) - 1 : -1]
    for one, row, token_id in zip(content, expected, token_ids, strict=True):
        assert one.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
        assert one.bytes == list(served.tokenizer.token_bytes(token_id))
    assert text_of([one.bytes or [] for one in content]) == choice.message.content


async def test_a_streamed_chat_tells_what_a_whole_one_does(served: Served) -> None:
    asked: dict[str, Any] = {
        "model": "m", "messages": MESSAGES, "max_tokens": 40, "seed": 3, "n": 3, "logprobs": True, "top_logprobs": 2,
        "presence_penalty": 0.5, "logit_bias": {"65": 3}, "extra_body": {"min_p": 0.01, "repetition_penalty": 1.1},
    }  # fmt: skip
    whole = await served.client.chat.completions.create(**asked)
    stream = await served.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason
        assert all(one.finish_reason is None for one in own[:-1])
        told = [token for one in own if one.logprobs for token in one.logprobs.content or ()]
        assert choice.logprobs is not None
        assert_same_scores(told, choice.logprobs.content or [])
    # Their chunks alternate, as they are ready.
    indexes = [chunk.choices[0].index for chunk in chunks[:-1]]
    assert indexes != sorted(indexes)
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == len(served.tokenizer.encode(RENDERED))
    assert whole.usage.completion_tokens == sum(
        len((one.logprobs and one.logprobs.content) or []) for one in whole.choices
    )


async def test_the_first_of_n_is_the_only_one_of_one(served: Served) -> None:
    async def texts(n: int, **fields: Any) -> list[str]:
        answer = await served.client.completions.create(model="m", prompt="Once", max_tokens=20, n=n, **fields)
        return [choice.text for choice in answer.choices]

    five, one, again = await asyncio.gather(texts(5, seed=11), texts(1, seed=11), texts(5, seed=11))
    assert five == again
    assert five[:1] == one
    assert len(set(five)) == 5
    assert not set(five[1:]) & set(await texts(5, seed=12))
    assert len(set(await texts(3, temperature=0))) == 1
    assert len(set(await texts(3))) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_completion_with_echo(served: Served, stream: bool) -> None:
    prompt = "Grüße"
    fields: dict[str, Any] = {
        "model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 2, "echo": True,
    }  # fmt: skip
    if stream:
        chunks: list[Completion] = [one async for one in await served.client.completions.create(**fields, stream=True)]
        choices = [chunk.choices[0] for chunk in chunks]
    else:
        choices = (await served.client.completions.create(**fields)).choices
    text = "".join(choice.text for choice in choices)
    logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for one in logprobs for token in one.tokens or ()]
    values = [value for one in logprobs for value in one.token_logprobs or ()]
    tops = [top for one in logprobs for top in one.top_logprobs or ()]
    offsets = [offset for one in logprobs for offset in one.text_offset or ()]
    assert text.startswith(prompt)
    prompt_ids = served.tokenizer.encode(prompt)
    assert len(tokens) == len(values) == len(tops) == len(offsets) == len(prompt_ids) + 16
    assert values[0] is None
    assert tops[0] is None
    assert tokens[:4] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc"]
    # A character of two tokens: both start where it does.
    assert offsets[:6] == [0, 1, 2, 2, 3, 3]
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:") and token != "<end>":
            assert text[offset] == token
    expected = reference_logits(served.base, None, prompt_ids).log_softmax(-1)
    assert values[1 : len(prompt_ids)] == pytest.approx(
        [float(row[token_id]) for row, token_id in zip(expected, prompt_ids[1:], strict=False)], abs=1e-4
    )
    for value, top, token in zip(values[1:], tops[1:], tokens[1:], strict=True):
        assert len(top) in (2, 3)
        assert top[token] == value


async def test_prompt_logprobs_are_vllms(served: Served) -> None:
    answer = await served.client.completions.create(
        model="m", prompt="Hallo", max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 1}
    )
    told = cast(Any, answer.choices[0]).prompt_logprobs
    prompt_ids = served.tokenizer.encode("Hallo")
    assert told[0] is None
    for one, token_id, letter in zip(told[1:], prompt_ids[1:], "allo", strict=True):
        assert one[str(token_id)]["decoded_token"] == letter
        assert len(one) in (1, 2)
        assert max(entry["logprob"] for entry in one.values()) >= one[str(token_id)]["logprob"]
    chat = await served.client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert len(cast(Any, chat).prompt_logprobs) == len(served.tokenizer.encode(RENDERED))


class City(BaseModel):
    name: str
    size: int


async def test_a_parsed_chat(served: Served) -> None:
    """OpenAI's helper sends a strict schema, and parses what comes back."""
    # Left alone, the random model writes strings without end.
    closing = {str(served.tokenizer.encode(sign)[0]): 12 for sign in '"}'}
    for seed in range(3):
        chat = await served.client.chat.completions.parse(
            model="m", messages=MESSAGES, response_format=City, max_tokens=200, seed=seed, logit_bias=closing
        )
        assert chat.choices[0].finish_reason == "stop"
        assert isinstance(chat.choices[0].message.parsed, City)


async def test_constrained_choices_stream(served: Served) -> None:
    stream = await served.client.chat.completions.create(
        model="m", messages=MESSAGES, n=4, seed=1, stream=True, stop=["!"],
        extra_body={"structured_outputs": {"choice": ["yes.", "no", "perhaps! not"]}},
    )  # fmt: skip
    texts: dict[int, str] = dict.fromkeys(range(4), "")
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(texts.values()) <= {"yes.", "no", "perhaps"}
    assert len(set(texts.values())) > 1


async def test_any_json_object(served: Served) -> None:
    bias = {str(served.tokenizer.encode(sign)[0]): 15 for sign in '"}'}
    chat = await served.client.chat.completions.create(
        model="m", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=200, logit_bias=bias, seed=2
    )
    assert isinstance(json.loads(chat.choices[0].message.content or ""), dict)


async def test_min_tokens_holds_off_ends_and_stop_strings(served: Served) -> None:
    # Every answer wants to end at once, and says "A" all the time.
    bias = {str(END): 100, str(served.tokenizer.encode("A")[0]): 90}
    fields: dict[str, Any] = {"model": "m", "prompt": "x", "max_tokens": 30, "temperature": 0, "logit_bias": bias}
    at_once = await served.client.completions.create(**fields)
    assert at_once.choices[0].text == ""
    later = await served.client.completions.create(**fields, extra_body={"min_tokens": 9})
    assert later.choices[0].text == "A" * 9
    assert later.choices[0].finish_reason == "stop"
    stopped = await served.client.completions.create(
        **fields, stop=["AA"], extra_body={"min_tokens": 9, "ignore_eos": True, "stop_token_ids": [END]}
    )
    assert stopped.choices[0].text == "A" * 9


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": MAX_NUM_SEQS + 1}, "n is 7; it must be from 1 to 6"),
        ({"max_tokens": 5, "extra_body": {"min_tokens": 6}}, "min_tokens is 6 and max_tokens 5"),
        ({"logit_bias": {"257": 1}}, "logit_bias key 257"),
        ({"max_tokens": 0}, "max_tokens is 0, which goes with echo: true alone"),
        ({"logit_bias": {"1": 101}}, "from -100 to 100"),
        ({"extra_body": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "regex does not compile"),
        ({"extra_body": {"structured_outputs": {"json": "{"}}}, "not a JSON object"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}, "ignore_eos": True}}, "ignore_eos"),
        ({"n": 2, "extra_body": {"structured_outputs": {"json": {"type": "x"}}}}, "json_schema does not compile"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_served_is_refused(
    served: Served, fields: dict[str, Any], words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.completions.create(model="m", prompt="x", stream=stream, **fields)
    assert words in str(caught.value)
    assert caught.value.type == "invalid_request_error"


async def test_closing_a_stream_ends_all_its_choices(served: Served) -> None:
    stream = await served.client.completions.create(
        model="m", prompt="x", n=4, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await assert_idle(served)


async def test_a_request_without_them_sends_no_logprobs(served: Served) -> None:
    answer = await served.client.completions.create(model="m", prompt="x", max_tokens=3)
    assert answer.choices[0].logprobs is None
    assert "prompt_logprobs" not in answer.choices[0].model_dump()
    none = await served.client.completions.create(model="m", prompt="x", max_tokens=3, logprobs=0)
    assert none.choices[0].logprobs is not None
    assert none.choices[0].logprobs.top_logprobs is None
    assert all(value <= 0 and math.isfinite(value) for value in none.choices[0].logprobs.token_logprobs or [1])
