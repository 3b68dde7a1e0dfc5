"""`merged`: several token streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing

from deployments.token_stream import TokenStream
from lora_core.messages import TokenDelta


async def merged(streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, TokenDelta], None]:
    """Yield the items of all streams as they arrive, each with its stream's index; a closed stream gives no more.

    Leaving the iterator closes the streams; so does an error of one of them, which is raised.
    """
    if len(streams) == 1:
        # The usual case, without a task for each item.
        with closing(streams[0]) as stream:
            async for only in stream:
                yield 0, only
        return
    reads: dict[asyncio.Task[TokenDelta | None], int] = {}
    try:
        for index, stream in enumerate(streams):
            reads[asyncio.create_task(_next(stream))] = index
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=reads.__getitem__):
                index, delta = reads[task], task.result()
                del reads[task]
                if delta is not None:
                    yield index, delta
                    reads[asyncio.create_task(_next(streams[index]))] = index
    finally:
        for task in reads:
            task.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        for stream in streams:
            stream.close()


async def _next(stream: TokenStream) -> TokenDelta | None:
    return await anext(stream, None)
