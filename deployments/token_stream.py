"""`TokenStream`: the tokens of one request, as they arrive from the engine process."""

import asyncio
from collections.abc import Callable

import msgspec

from lora_core.errors import LoRAFleetError
from lora_core.messages import TokenDelta


class TokenStream:
    """An async iterator over one request's tokens, for one consumer.

    Each item holds everything that has arrived since the last one. The item with a finish reason is the last. A
    stream that is closed, dropped, or whose consumer is cancelled before that tells the engine to forget its request.

    Args:
        request_id: Of the request.
        abandon: Called with the request id when nobody will read the rest.
    """

    def __init__(self, request_id: str, abandon: Callable[[str], None]) -> None:
        self._request_id = request_id
        self._abandon = abandon
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        # What has arrived and was not read yet.
        self._arrivals: TokenDelta | None = None
        self._error: LoRAFleetError | None = None
        self._open = True
        self._rests_until = 0.0
        self._complete: asyncio.Future[None] | None = None

    def feed(self, delta: TokenDelta) -> None:
        """Take tokens from the engine."""
        self._arrivals = delta if self._arrivals is None else _joined(self._arrivals, delta)
        self._arrived.set()
        if delta.finish_reason is not None:
            self._end_rest()

    def fail(self, error: LoRAFleetError) -> None:
        """End the stream with an exception, after the tokens that have arrived."""
        self._error = error
        self._arrived.set()
        self._end_rest()

    def rest(self, seconds: float) -> None:
        """Let tokens gather: the next item is not given before this time has passed, unless it is the last."""
        self._rests_until = self._loop.time() + seconds

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> TokenDelta:
        if not self._open:
            raise StopAsyncIteration
        try:
            await self._arrived.wait()
            await self._gather()
        except asyncio.CancelledError:
            self.close()
            raise
        self._arrived.clear()
        delta, self._arrivals = self._arrivals, None
        if delta is None:
            self._open = False
            assert self._error is not None, "something has arrived, or the stream has failed"
            raise self._error
        if delta.finish_reason is not None:
            self._open = False
        elif self._error is not None:
            self._arrived.set()
        return delta

    def close(self) -> None:
        """Stop reading; the engine forgets the request within a step."""
        if self._unfinished():
            self._abandon(self._request_id)
        self._open = False

    async def _gather(self) -> None:
        rest_s = self._rests_until - self._loop.time()
        if rest_s <= 0 or not self._unfinished():
            return
        self._complete = self._loop.create_future()
        # Not a timeout around the wait: that would take a task for each item.
        timer = self._loop.call_later(rest_s, self._end_rest)
        try:
            await self._complete
        finally:
            timer.cancel()
            self._complete = None

    def _end_rest(self) -> None:
        if self._complete is not None and not self._complete.done():
            self._complete.set_result(None)

    def _unfinished(self) -> bool:
        return self._open and self._error is None and (self._arrivals is None or self._arrivals.finish_reason is None)

    def __del__(self) -> None:
        # The last reference may go on any thread, even after the loop.
        if self._unfinished() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abandon, self._request_id)


def _joined(first: TokenDelta, then: TokenDelta) -> TokenDelta:
    return msgspec.structs.replace(
        then,
        token_ids=first.token_ids + then.token_ids,
        logprobs=[*(first.logprobs or ()), *(then.logprobs or ())] or None,
        prompt_logprobs=first.prompt_logprobs or then.prompt_logprobs,
        num_cached_tokens=max(first.num_cached_tokens, then.num_cached_tokens),
        timeline=then.timeline or first.timeline,
    )
