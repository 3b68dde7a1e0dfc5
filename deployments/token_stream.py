"""`TokenStream`: the tokens of one request, as they arrive from the engine process."""

import asyncio
from collections.abc import Callable

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
        self._token_ids: list[int] = []
        self._last: TokenDelta | None = None
        self._error: LoRAFleetError | None = None
        self._open = True

    def feed(self, delta: TokenDelta) -> None:
        """Take tokens from the engine."""
        self._token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self._last = delta
        self._arrived.set()

    def fail(self, error: LoRAFleetError) -> None:
        """End the stream with an exception, after the tokens that have arrived."""
        self._error = error
        self._arrived.set()

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> TokenDelta:
        if not self._open:
            raise StopAsyncIteration
        try:
            await self._arrived.wait()
        except asyncio.CancelledError:
            self.close()
            raise
        self._arrived.clear()
        token_ids, self._token_ids = self._token_ids, []
        if self._last is not None:
            self._open = False
            last = self._last
            return TokenDelta(self._request_id, token_ids, last.finish_reason, last.error, last.error_type)
        if self._error is not None:
            if token_ids:
                self._arrived.set()
                return TokenDelta(self._request_id, token_ids)
            self._open = False
            raise self._error
        return TokenDelta(self._request_id, token_ids)

    def close(self) -> None:
        """Stop reading; the engine forgets the request within a step."""
        if self._unfinished():
            self._abandon(self._request_id)
        self._open = False

    def _unfinished(self) -> bool:
        return self._open and self._last is None and self._error is None

    def __del__(self) -> None:
        # The last reference may go on any thread, even after the loop.
        if self._unfinished() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abandon, self._request_id)
