"""Several streams read as one: in order each, ended together, and closed whatever happens."""

import asyncio
from contextlib import aclosing

import pytest

from deployments.merged_streams import merged
from deployments.token_stream import TokenStream
from lora_core.errors import EngineDead
from lora_core.messages import TokenDelta, TokenLogprobs


class Streams:
    """Some open streams, and which of them their readers gave up."""

    def __init__(self, count: int) -> None:
        self.abandoned: list[str] = []
        self.all = [TokenStream(str(index), self.abandoned.append) for index in range(count)]

    def feed(self, index: int, *token_ids: int, end: bool = False) -> None:
        self.all[index].feed(TokenDelta(str(index), list(token_ids), "stop" if end else None))


@pytest.mark.parametrize("count", [1, 3])
async def test_each_stream_is_read_to_its_end(count: int) -> None:
    streams = Streams(count)
    found: dict[int, list[int]] = {index: [] for index in range(count)}

    async def produce() -> None:
        for token_id in range(5):
            for index in range(count):
                if token_id <= 4 - index:
                    streams.feed(index, 10 * index + token_id, end=token_id == 4 - index)
            await asyncio.sleep(0)

    producing = asyncio.create_task(produce())
    async with aclosing(merged(streams.all)) as items:
        async for index, delta in items:
            found[index] += delta.token_ids
    await producing
    for index in range(count):
        assert found[index] == [10 * index + token_id for token_id in range(5 - index)]
    assert streams.abandoned == []


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_gives_up_what_has_not_ended(count: int) -> None:
    streams = Streams(count)
    streams.feed(0, 1)
    async with aclosing(merged(streams.all)) as items:
        assert await anext(items) == (0, TokenDelta("0", [1]))
    assert sorted(streams.abandoned) == [str(index) for index in range(count)]


async def test_an_error_of_one_is_raised_and_gives_up_the_others() -> None:
    streams = Streams(3)
    streams.all[1].fail(EngineDead("gone"))
    with pytest.raises(EngineDead, match="gone"):
        async for _ in merged(streams.all):
            pass
    assert sorted(streams.abandoned) == ["0", "2"]


async def test_a_cancelled_reader_gives_up_all() -> None:
    streams = Streams(2)

    async def read() -> None:
        async with aclosing(merged(streams.all)) as items:
            async for _ in items:
                pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert sorted(streams.abandoned) == ["0", "1"]


async def test_what_arrived_unread_is_joined() -> None:
    (stream,) = Streams(1).all
    first = [TokenLogprobs(-1.0, [3], [-1.0])]
    stream.feed(TokenDelta("0", [1], logprobs=first, prompt_logprobs=[TokenLogprobs(-2.0)], num_cached_tokens=4))
    stream.feed(TokenDelta("0", [2], logprobs=[TokenLogprobs(-3.0)]))
    stream.feed(TokenDelta("0", [3], "length", logprobs=[TokenLogprobs(-4.0)]))
    joined = await anext(stream)
    assert (joined.token_ids, joined.finish_reason, joined.num_cached_tokens) == ([1, 2, 3], "length", 4)
    assert [one.logprob for one in joined.logprobs or ()] == [-1.0, -3.0, -4.0]
    assert [one.logprob for one in joined.prompt_logprobs or ()] == [-2.0]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
