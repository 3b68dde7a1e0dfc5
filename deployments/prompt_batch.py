"""Several calls that one request makes: their answers together, as if they were one."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import msgspec

from deployments.generation import GenerateCall, GenerateChunk

AT_ONCE = 16
"""Answers of one request to several prompts that are under way at a time, or those to one prompt where they are more;
the others follow as these end. One request cannot fill the queue, and a bound on requests at a time is not lifted by
much by sending several prompts in each."""


async def collect_all(
    collect: Callable[[GenerateCall], Awaitable[list[GenerateChunk]]], calls: Sequence[GenerateCall]
) -> list[GenerateChunk]:
    """The whole answers to all calls.

    Args:
        collect: Answers one call.
        calls: All with the same `n`; answer i of call c has the index `c * n + i`.

    Raises:
        Exception: what the first call to fail has failed with; the others are given up.
    """
    if len(calls) == 1:
        return await collect(calls[0])
    places = _places(calls)

    async def ask(position: int, call: GenerateCall) -> list[GenerateChunk]:
        async with places:
            return [_placed(chunk, position, call) for chunk in await collect(call)]

    tasks = [asyncio.create_task(ask(position, call)) for position, call in enumerate(calls)]
    try:
        return [chunk for chunks in await asyncio.gather(*tasks) for chunk in chunks]
    finally:
        await _give_up(tasks)


async def stream_all(
    stream: Callable[[GenerateCall], AsyncGenerator[GenerateChunk, None]], calls: Sequence[GenerateCall]
) -> AsyncGenerator[GenerateChunk, None]:
    """The answers to all calls, chunk by chunk as they arrive; indexes and errors as for `collect_all`.

    Closing the iterator gives up all calls.
    """
    if len(calls) == 1:
        async with aclosing(stream(calls[0])) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    places = _places(calls)
    arrivals: asyncio.Queue[GenerateChunk | asyncio.Task[None]] = asyncio.Queue()

    async def read(position: int, call: GenerateCall) -> None:
        async with places, aclosing(stream(call)) as chunks:
            async for chunk in chunks:
                arrivals.put_nowait(_placed(chunk, position, call))

    tasks = [asyncio.create_task(read(position, call)) for position, call in enumerate(calls)]
    for task in tasks:
        task.add_done_callback(arrivals.put_nowait)
    num_open = len(tasks)
    try:
        while num_open:
            arrival = await arrivals.get()
            if isinstance(arrival, GenerateChunk):
                yield arrival
                continue
            num_open -= 1
            arrival.result()
    finally:
        await _give_up(tasks)


def _places(calls: Sequence[GenerateCall]) -> asyncio.Semaphore:
    """Places for calls that are under way."""
    return asyncio.Semaphore(max(1, AT_ONCE // calls[0].n))


def _placed(chunk: GenerateChunk, position: int, call: GenerateCall) -> GenerateChunk:
    return msgspec.structs.replace(chunk, index=position * call.n + chunk.index)


async def _give_up(tasks: Sequence["asyncio.Task[list[GenerateChunk]] | asyncio.Task[None]"]) -> None:
    """End what still runs, and see it ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
