"""Several prompts of one request: together, in order, bounded, and all given up when one fails."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from deployments.generation import GenerateCall, GenerateChunk
from deployments.prompt_batch import AT_ONCE, collect_all, stream_all
from lora_core.errors import InvalidRequest


class Engine:
    """Answers each call with two tokens for each of its `n`, one after the other."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.most_running = 0
        self.refused = ""
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def stream(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk, None]:
        self.counts["running"] += 1
        self.most_running = max(self.most_running, self.counts["running"])
        try:
            for place in range(2):
                await asyncio.sleep(0)
                if call.prompt == self.refused:
                    raise InvalidRequest(f"{call.prompt} is refused")
                for index in range(call.n):
                    yield GenerateChunk(text=f"{call.prompt}{index}{place}", token_ids=[1], index=index)
                await self.go_on.wait()
            self.counts["done"] += 1
        finally:
            self.counts["running"] -= 1

    async def collect(self, call: GenerateCall) -> list[GenerateChunk]:
        async with aclosing(self.stream(call)) as chunks:
            return [chunk async for chunk in chunks]


def calls(count: int, n: int = 1) -> list[GenerateCall]:
    return [GenerateCall(request_id="r", prompt=f"p{position}-", n=n) for position in range(count)]


async def answers(engine: Engine, asked: list[GenerateCall], *, streamed: bool) -> list[GenerateChunk]:
    if streamed:
        return [chunk async for chunk in stream_all(engine.stream, asked)]
    return await collect_all(engine.collect, asked)


@pytest.mark.parametrize("count", [1, 3, 3 * AT_ONCE])
@pytest.mark.parametrize("streamed", [False, True])
async def test_each_answer_has_its_own_index(count: int, streamed: bool) -> None:
    engine = Engine()
    chunks = await answers(engine, calls(count, n=2), streamed=streamed)
    texts: dict[int, str] = {}
    for chunk in chunks:
        texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
    assert texts == {
        position * 2 + index: f"p{position}-{index}0p{position}-{index}1"
        for position in range(count)
        for index in range(2)
    }
    assert engine.most_running == min(count, AT_ONCE // 2)
    assert engine.counts == {"running": 0, "done": count}


@pytest.mark.parametrize(("n", "most"), [(1, AT_ONCE), (5, AT_ONCE // 5), (AT_ONCE, 1), (4 * AT_ONCE, 1)])
@pytest.mark.parametrize("streamed", [False, True])
async def test_answers_are_bounded_and_not_prompts_alone(n: int, most: int, streamed: bool) -> None:
    engine = Engine()
    await answers(engine, calls(2 * AT_ONCE, n=n), streamed=streamed)
    assert (engine.most_running, engine.counts["done"]) == (most, 2 * AT_ONCE)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_first_failure_ends_all(streamed: bool) -> None:
    engine = Engine()
    engine.refused = "p2-"
    engine.go_on.clear()
    with pytest.raises(InvalidRequest, match="p2- is refused"):
        await answers(engine, calls(2 * AT_ONCE), streamed=streamed)
    assert engine.counts == {"running": 0}


async def test_leaving_gives_all_up() -> None:
    engine = Engine()
    engine.go_on.clear()
    async with aclosing(stream_all(engine.stream, calls(3))) as chunks:
        await anext(chunks)
        assert engine.counts["running"] == 3
    assert engine.counts["running"] == 0
    waiting = asyncio.create_task(collect_all(engine.collect, calls(3)))
    await asyncio.sleep(0.01)
    assert engine.counts["running"] == 3
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.counts["running"] == 0


async def test_a_call_that_is_cancelled_from_below_does_not_hang_the_others() -> None:
    async def cancelled(call: GenerateCall) -> AsyncGenerator[GenerateChunk, None]:
        if call.prompt == "p1-":
            raise asyncio.CancelledError
        yield GenerateChunk(text="a", token_ids=[1])

    with pytest.raises(asyncio.CancelledError):
        _ = [chunk async for chunk in stream_all(cancelled, calls(3))]
