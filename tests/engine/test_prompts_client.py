"""Prompts in every form that OpenAI's client sends them in, several at a time, echoed and scored; without a fleet."""

from collections.abc import AsyncIterator
from typing import Any, cast

import openai
import pytest
import pytest_asyncio

from tests.engine.openai_service import MESSAGES, RENDERED, Served, assert_idle, serving
from tests.factories import reference_logits

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("base")) as found:
        yield found


PROMPTS = ["Once upon", "Grüße", "a", "The 3rd of them"]


@pytest.mark.parametrize("as_ids", [False, True])
async def test_several_prompts_are_answered_as_each_alone(served: Served, as_ids: bool) -> None:
    prompts: Any = [served.tokenizer.encode(text) for text in PROMPTS] if as_ids else PROMPTS
    fields: dict[str, Any] = {"model": "m", "max_tokens": 7, "n": 2, "seed": 5, "logprobs": 1}
    alone = [await served.client.completions.create(prompt=prompt, **fields) for prompt in prompts]
    together = await served.client.completions.create(prompt=prompts, **fields)
    assert [choice.index for choice in together.choices] == list(range(8))
    assert [choice.text for choice in together.choices] == [choice.text for one in alone for choice in one.choices]
    assert together.usage is not None
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(together.usage, count) == sum(getattr(one.usage, count) for one in alone), count
    stream = await served.client.completions.create(
        prompt=prompts, **fields, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = dict.fromkeys(range(8), "")
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [choice.text for choice in together.choices]
    streamed = chunks[-1].usage
    assert streamed is not None
    assert (streamed.prompt_tokens, streamed.completion_tokens) == (
        together.usage.prompt_tokens, together.usage.completion_tokens,
    )  # fmt: skip


async def test_one_wrong_prompt_of_several_is_a_refusal(served: Served) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="257"):
            await served.client.completions.create(model="m", prompt=[[257], [257], [257]], stream=stream)
    await assert_idle(served)


async def test_more_prompts_than_run_at_once(served: Served) -> None:
    prompts = [chr(97 + index % 26) * (1 + index % 5) for index in range(40)]
    answer = await served.client.completions.create(model="m", prompt=prompts, max_tokens=2, temperature=0)
    again = [
        await served.client.completions.create(model="m", prompt=prompts[index], max_tokens=2, temperature=0)
        for index in (0, 17, 39)
    ]
    assert [answer.choices[index].text for index in (0, 17, 39)] == [one.choices[0].text for one in again]
    assert len(answer.choices) == 40


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_loglikelihoods_of_texts(served: Served, max_tokens: int) -> None:
    """As evaluation harnesses ask for them: token ids in a batch, echoed with their log-probabilities."""
    prompts = [served.tokenizer.encode(text) for text in PROMPTS]
    answer = await served.client.completions.create(
        model="m", prompt=prompts, max_tokens=max_tokens, temperature=0, logprobs=1, echo=True, seed=1234
    )
    for text, prompt, choice in zip(PROMPTS, prompts, answer.choices, strict=True):
        assert choice.logprobs is not None
        told = choice.logprobs.token_logprobs or []
        assert len(told) == len(choice.logprobs.top_logprobs or []) == len(prompt) + max_tokens
        expected = reference_logits(served.base, None, prompt).log_softmax(-1)
        assert told[0] is None
        assert told[1 : len(prompt)] == pytest.approx(
            [float(row[token_id]) for row, token_id in zip(expected, prompt[1:], strict=False)], abs=1e-4
        )
        tops = (choice.logprobs.top_logprobs or [])[1 : len(prompt)]
        for value, top, row in zip(told[1:], tops, expected, strict=False):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
            assert value in top.values()
        assert choice.text.startswith(text)
        assert (choice.text == text, choice.finish_reason) == (max_tokens == 0, "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens * len(prompts)


async def test_usage_so_far_comes_with_each_chunk_where_it_is_asked_for(served: Served) -> None:
    stream = await served.client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=6, n=2, seed=1, stream=True,
        stream_options=cast(Any, {"include_usage": True, "continuous_usage_stats": True}),
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    counted: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks[:-1]:
        assert chunk.usage is not None
        assert chunk.usage.prompt_tokens == len(served.tokenizer.encode(RENDERED))
        counted[chunk.choices[0].index].append(chunk.usage.completion_tokens)
    for counts in counted.values():
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, 6)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


async def test_null_is_as_good_as_left_out(served: Served) -> None:
    names = (
        "temperature", "top_p", "n", "stop", "seed", "logprobs", "max_tokens", "stream", "stream_options", "logit_bias",
        "presence_penalty", "frequency_penalty", "user",
    )  # fmt: skip
    more = ("top_k", "min_p", "ignore_eos", "return_token_ids", "prompt_logprobs", "min_tokens", "stop_token_ids")
    nulls: dict[str, Any] = dict.fromkeys((*names, *more, "response_format", "structured_outputs"))
    answer = await served.client.completions.create(model="m", prompt="x", extra_body={**nulls, "max_tokens": 2})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    nulls.update(dict.fromkeys(("tools", "tool_choice", "top_logprobs", "metadata", "store", "service_tier")))
    chat = await served.client.chat.completions.create(
        model="m", messages=MESSAGES, extra_body={**nulls, "max_tokens": 2}
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 2


async def test_closing_a_stream_ends_all_its_prompts(served: Served) -> None:
    stream = await served.client.completions.create(
        model="m", prompt=["x", "y", "z"], max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await assert_idle(served)
