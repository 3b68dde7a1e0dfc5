"""Tokens gather while a stream rests; the first, the last, and whatever ends a stream do not wait."""

import asyncio
import contextlib

import pytest

from deployments.stream_pace import CHUNK_S, CORE_SHARE, WHOLE_S, StreamPace
from deployments.token_stream import TokenStream
from lora_core.errors import EngineDead
from lora_core.messages import TokenDelta

LONG_S = 600.0


class Reader:
    """One stream and its consumer."""

    def __init__(self) -> None:
        self.abandoned: list[str] = []
        self.stream = TokenStream("r", self.abandoned.append)

    def feed(self, *token_ids: int, end: bool = False) -> None:
        self.stream.feed(TokenDelta("r", list(token_ids), "stop" if end else None))

    def read(self) -> "asyncio.Task[TokenDelta]":
        async def one() -> TokenDelta:
            return await anext(self.stream)

        return asyncio.create_task(one())

    async def waits(self, read: "asyncio.Task[TokenDelta]") -> bool:
        return not (await asyncio.wait([read], timeout=0.05))[0]


async def test_the_first_tokens_do_not_wait_and_later_ones_gather() -> None:
    reader = Reader()
    reader.feed(1)
    assert (await reader.read()).token_ids == [1]
    reader.stream.rest(LONG_S)
    read = reader.read()
    for token_id in (2, 3, 4):
        reader.feed(token_id)
        assert await reader.waits(read)
    reader.feed(5, end=True)
    delta = await read
    assert (delta.token_ids, delta.finish_reason) == ([2, 3, 4, 5], "stop")


async def test_a_rest_that_is_over_delays_nothing() -> None:
    reader = Reader()
    reader.stream.rest(0.05)
    reader.feed(1)
    assert (await reader.read()).token_ids == [1]
    reader.feed(2)
    assert (await reader.read()).token_ids == [2]


async def test_what_fails_a_stream_ends_its_rest_after_the_tokens_that_came() -> None:
    reader = Reader()
    reader.stream.rest(LONG_S)
    reader.feed(1)
    read = reader.read()
    assert await reader.waits(read)
    reader.stream.fail(EngineDead("gone"))
    assert (await read).token_ids == [1]
    with pytest.raises(EngineDead):
        await reader.read()


async def test_a_stream_that_failed_while_nobody_read_does_not_rest() -> None:
    reader = Reader()
    reader.feed(1)
    reader.stream.rest(LONG_S)
    reader.stream.fail(EngineDead("gone"))
    assert (await reader.read()).token_ids == [1]


async def test_a_consumer_that_is_cancelled_while_the_stream_rests_gives_it_up() -> None:
    reader = Reader()
    reader.stream.rest(LONG_S)
    reader.feed(1)
    read = reader.read()
    assert await reader.waits(read)
    read.cancel()
    await asyncio.gather(read, return_exceptions=True)
    assert reader.abandoned == ["r"]


def test_the_more_streams_there_are_the_more_tokens_gather_up_to_a_bound() -> None:
    pace = StreamPace(longest_s=0.02)
    with pace.counted():
        assert pace.window_s(is_read=True) == CHUNK_S / CORE_SHARE
        with pace.counted():
            assert pace.window_s(is_read=True) == 2 * CHUNK_S / CORE_SHARE
            with contextlib.suppress(ZeroDivisionError), contextlib.ExitStack() as streams:
                for _ in range(4):
                    streams.enter_context(pace.counted())
                assert pace.window_s(is_read=True) == 0.02
                assert pace.window_s(is_read=False) == WHOLE_S
                raise ZeroDivisionError
        assert pace.window_s(is_read=True) == CHUNK_S / CORE_SHARE
    assert StreamPace(longest_s=0.0).window_s(is_read=True) == 0.0
