"""`Generator` with a real engine process: prompts in, chunks of text out."""

import asyncio
import contextlib
import pickle
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from deployments.engine_client import EngineClient
from deployments.generation import GenerateCall, GenerateChunk
from deployments.generator import Generator
from deployments.stream_pace import StreamPace
from deployments.tokenizer import ModelTokenizer
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.errors import AdapterNotFound, InvalidRequest
from lora_core.messages import EngineReady, SamplingParams
from lora_core.types import LoRAOperation, LoRARequest, LoRAStatus
from tests.engine.byte_model import save_byte_tokenizer
from tests.factories import make_adapter, reference_tokens, tiny_llama

CONTEXT = 160
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Grüße, 世界"}]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Served(NamedTuple):
    """One engine and what it serves."""

    base: Path
    adapter: Path
    client: EngineClient
    ready: EngineReady
    generator: Generator
    tokenizer: ModelTokenizer


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    base = tiny_llama(tmp_path_factory.mktemp("base"), vocab=257)
    save_byte_tokenizer(base)
    adapter = make_adapter(base, tmp_path_factory.mktemp("adapter"), seed=7)
    engine = EngineConfig(model=base, dtype="float32", device="cpu", max_model_len=CONTEXT, num_threads=1)
    client = EngineClient(engine, LoRAConfig(enable_lora=True, max_lora_rank=4))
    ready = await client.start(60)
    tokenizer = ModelTokenizer(base)
    yield Served(base, adapter, client, ready, Generator(client, ready, tokenizer), tokenizer)
    await client.close()


def call(**fields: Any) -> GenerateCall:
    return GenerateCall(request_id="r", **{"sampling": GREEDY, **fields})


async def answer(generator: Generator, **fields: Any) -> list[GenerateChunk]:
    return [chunk async for chunk in generator.generate(call(**fields))]


def text_of(chunks: list[GenerateChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def ids_of(chunks: list[GenerateChunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def decode_after(tokenizer: ModelTokenizer, prompt: list[int], output: list[int]) -> str:
    before = str(tokenizer.backend.decode(prompt))
    return str(tokenizer.backend.decode(prompt + output))[len(before) :]


async def test_chunks_tell_how_much_of_the_prompt_was_cached(served: Served) -> None:
    prompt = [(place * 11) % 250 for place in range(40)]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    cached = []
    for _ in range(2):
        chunks = await answer(served.generator, prompt_token_ids=prompt, sampling=sampling, max_tokens=4)
        cached.append({chunk.cached_tokens for chunk in chunks})
    assert cached == [{0}, {32}]


async def test_a_chat_is_answered_in_whole_characters(served: Served) -> None:
    prompt = served.tokenizer.encode("<user>Grüße, 世界<assistant>")
    expected = reference_tokens(served.base, None, prompt, 40)
    chunks = await answer(served.generator, messages=CHAT, max_tokens=40)
    assert ids_of(chunks) == expected
    assert text_of(chunks) == decode_after(served.tokenizer, prompt, expected)
    last = chunks[-1]
    assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == ("length", len(prompt), 40)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert [chunk.completion_tokens for chunk in chunks] == [
        len(ids_of(chunks[: index + 1])) for index in range(len(chunks))
    ]
    assert len(chunks) > 1


async def test_a_prompt_as_text_and_as_token_ids(served: Served) -> None:
    prompt = served.tokenizer.encode("Once upon a time")
    as_text = await answer(served.generator, prompt="Once upon a time", max_tokens=8)
    as_ids = await answer(served.generator, prompt_token_ids=prompt, max_tokens=8)
    assert text_of(as_text) == text_of(as_ids)
    assert ids_of(as_ids) == reference_tokens(served.base, None, prompt, 8)


async def test_a_long_prompt_is_encoded_beside_the_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if some of its tokens stood for many characters.
    monkeypatch.setattr(served.tokenizer, "longest_token", 100)
    with pytest.raises(InvalidRequest, match=f"4000 tokens.*{CONTEXT}"):
        await answer(served.generator, prompt="x" * 4000)


SILENT = {"role": "user", "content": ""}
LONG_CALL = {"id": "1", "function": {"name": "f", "arguments": {"text": "x" * 4000}}}


@pytest.mark.parametrize(
    ("messages", "is_beside"),
    [
        (CHAT, False),
        ([SILENT] * 200, True),
        ([{"role": "assistant", "content": "", "tool_calls": [LONG_CALL]}], True),
        ([{"role": "assistant", "content": "", "reasoning_content": "x" * 4000}], True),
    ],
)
async def test_a_long_chat_is_rendered_beside_the_loop_whatever_is_long_in_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]], is_beside: bool
) -> None:
    render = served.tokenizer.render_chat
    threads: list[threading.Thread] = []

    def noted(*given: Any, **fields: Any) -> str:
        threads.append(threading.current_thread())
        return render(*given, **fields)

    monkeypatch.setattr(served.tokenizer, "render_chat", noted)
    # Some are too long for the context, which is found out later.
    with contextlib.suppress(InvalidRequest):
        await answer(served.generator, messages=messages, max_tokens=1)
    assert [thread is not threading.current_thread() for thread in threads] == [is_beside]


async def test_an_adapter_answers_for_itself(served: Served) -> None:
    load = LoRARequest(LoRAOperation.LOAD, "mine", str(served.adapter))
    assert (await served.client.lora(load, 20)).status is LoRAStatus.SUCCESS
    prompt = served.tokenizer.encode("Hello")
    base, mine = await asyncio.gather(
        answer(served.generator, prompt="Hello", max_tokens=20),
        answer(served.generator, prompt="Hello", max_tokens=20, lora_name="mine"),
    )
    assert ids_of(base) == reference_tokens(served.base, None, prompt, 20)
    assert ids_of(mine) == reference_tokens(served.base, served.adapter, prompt, 20)
    assert ids_of(base) != ids_of(mine)


async def test_an_unknown_adapter_is_not_found(served: Served) -> None:
    with pytest.raises(AdapterNotFound, match="nobody"):
        await answer(served.generator, prompt="Hello", lora_name="nobody", max_tokens=4)


async def test_without_a_limit_an_answer_fills_the_context(served: Served) -> None:
    prompt = served.tokenizer.encode("Hello")
    last = (await answer(served.generator, prompt="Hello"))[-1]
    assert (last.finish_reason, last.completion_tokens) == ("length", CONTEXT - len(prompt))


async def test_a_default_limit_gives_way_to_the_context(served: Served) -> None:
    for num_prompt, expected in ((5, 16), (CONTEXT - 3, 3)):
        last = (await answer(served.generator, prompt_token_ids=[1] * num_prompt, default_max_tokens=16))[-1]
        assert (last.finish_reason, last.completion_tokens) == ("length", expected)


async def test_a_prompt_no_tokens_could_fit_in_is_refused_unread(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object) -> list[int]:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(served.tokenizer, "encode", encode)
    too_long = "x" * (CONTEXT * served.tokenizer.longest_token + 1)
    with pytest.raises(InvalidRequest, match=rf"{len(too_long)} characters.*{CONTEXT} tokens"):
        await answer(served.generator, prompt=too_long)


async def test_what_a_template_writes_counts_before_it_is_encoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object) -> list[int]:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(served.tokenizer, "encode_rendered", encode)
    with pytest.raises(InvalidRequest, match=rf"characters.*{CONTEXT} tokens"):
        await answer(served.generator, messages=[SILENT] * (CONTEXT * served.tokenizer.longest_token))


async def test_the_context_may_be_filled_exactly(served: Served) -> None:
    prompt = [1] * (CONTEXT - 3)
    assert len(ids_of(await answer(served.generator, prompt_token_ids=prompt, max_tokens=3))) == 3


async def test_a_stop_string_ends_the_answer_and_the_request(served: Served) -> None:
    whole = text_of(await answer(served.generator, prompt="Hello", max_tokens=100))
    # Two characters that stand together for the first time in the middle of the answer.
    middle = next(at for at in range(8, len(whole) - 1) if whole.find(whole[at : at + 2]) == at)
    stop = whole[middle : middle + 2]
    first_step = served.client.status.step
    chunks = []
    async for chunk in served.generator.generate(call(prompt="Hello", max_tokens=150, stop=("never said", stop))):
        chunks.append(chunk)
        # Long enough for tokens after the stop string to arrive together with it, much shorter than the whole answer.
        await asyncio.sleep(0.005)
    assert text_of(chunks) == whole[:middle]
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].completion_tokens < 100
    assert decode_after(served.tokenizer, served.tokenizer.encode("Hello"), ids_of(chunks)).endswith(stop)
    assert await step_when_idle(served.client) - first_step < 140


async def test_a_stop_token_ends_the_answer_and_is_not_written(served: Served) -> None:
    prompt = served.tokenizer.encode("Hello")
    expected = reference_tokens(served.base, None, prompt, 30)
    texts = [decode_after(served.tokenizer, prompt, expected[:length]) for length in range(31)]
    # A token with a text of its own that comes up for the first time after a few others.
    at = next(at for at in range(5, 30) if expected.index(expected[at]) == at and texts[at] != texts[at + 1])
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=(expected[at],))
    chunks = await answer(served.generator, prompt="Hello", max_tokens=30, sampling=sampling)
    assert ids_of(chunks) == expected[: at + 1]
    assert text_of(chunks) == texts[at]
    assert chunks[-1].finish_reason == "stop"


async def test_a_closed_answer_ends_in_the_engine(served: Served) -> None:
    first_step = served.client.status.step
    chunks = served.generator.generate(call(prompt="Hello"))
    await anext(chunks)
    await chunks.aclose()
    assert await step_when_idle(served.client) - first_step < 90


async def step_when_idle(client: EngineClient) -> int:
    """Steps the engine has done when it has nothing more to do: an answer to its end takes more than 90."""
    while True:
        before = client.status
        # More than a heartbeat.
        await asyncio.sleep(0.7)
        if client.status.num_running == 0 and client.status.step == before.step:
            return before.step


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one"),
        ({"prompt": "a", "messages": CHAT}, "exactly one"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one"),
        ({"prompt": ""}, "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"messages": []}, "chat template"),
        ({"messages": [{"role": "tool", "content": ""}]}, "tools are not for me"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"prompt_token_ids": [1, 2, 257]}, r"\[2\] is 257.*0 to 256"),
        ({"prompt_token_ids": [-1]}, "-1"),
        ({"prompt_token_ids": [2**70]}, str(2**70)),
        ({"prompt_token_ids": [1] * CONTEXT}, f"{CONTEXT} tokens and the context holds {CONTEXT}"),
        ({"prompt_token_ids": [1] * 10, "max_tokens": 151}, f"10 tokens.*151.*161.*{CONTEXT}"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "a", "max_tokens": 1, "stop": ("x", "")}, "stop string is empty"),
        ({"prompt": "a", "max_tokens": 1, "sampling": SamplingParams(temperature=-1.0)}, "temperature"),
        ({"prompt": "a", "max_tokens": 1, "sampling": SamplingParams(top_k=2**70)}, "64 bits"),
        ({"prompt": "a", "max_tokens": 1, "sampling": SamplingParams(stop_token_ids=(999,))}, "999"),
    ],
)
async def test_a_call_that_cannot_be_served_is_refused(served: Served, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        await answer(served.generator, **fields)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (InvalidRequest, str(caught.value))


async def test_without_a_tokenizer_token_ids_are_understood(served: Served) -> None:
    generator = Generator(served.client, served.ready, None)
    chunks = await answer(generator, prompt_token_ids=[5, 6], max_tokens=4)
    assert ids_of(chunks) == reference_tokens(served.base, None, [5, 6], 4)
    assert text_of(chunks) == ""
    for fields in ({"prompt": "a"}, {"messages": CHAT}, {"prompt_token_ids": [5], "stop": ("x",)}):
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            await answer(generator, **fields)


async def test_tokens_that_are_there_together_travel_together(served: Served) -> None:
    chunks = served.generator.generate(call(prompt="Hello", max_tokens=100))
    sizes = []
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            sizes.append(len(chunk.token_ids))
            # Several steps long.
            await asyncio.sleep(0.05)
    assert sum(sizes) == 100
    assert max(sizes) > 3


async def test_an_answer_nobody_reads_before_its_end_comes_in_few_chunks(served: Served) -> None:
    prompt = [(place * 7) % 250 for place in range(20)]
    streamed = await answer(served.generator, prompt_token_ids=prompt, max_tokens=120)
    whole = await answer(served.generator, prompt_token_ids=prompt, max_tokens=120, streamed=False)
    assert (ids_of(whole), text_of(whole)) == (ids_of(streamed), text_of(streamed))
    assert len(whole) < 20
    stopped = await answer(served.generator, prompt_token_ids=prompt, max_tokens=120, streamed=False, stop=["e"])
    assert stopped[-1].finish_reason in ("stop", "length")


async def test_tokens_that_are_sent_together_are_the_same_tokens(served: Served) -> None:
    prompts = [[(place * factor) % 250 for place in range(20)] for factor in range(1, 9)]
    grouped = Generator(served.client, served.ready, served.tokenizer, StreamPace(longest_s=0.2))
    alone = [await answer(served.generator, prompt_token_ids=prompt, max_tokens=60) for prompt in prompts]
    together = await asyncio.gather(
        *(answer(grouped, prompt_token_ids=prompt, max_tokens=60, n=2) for prompt in prompts)
    )
    for chunks, expected in zip(together, alone, strict=True):
        for index in (0, 1):
            assert ids_of([chunk for chunk in chunks if chunk.index == index]) == ids_of(expected)
