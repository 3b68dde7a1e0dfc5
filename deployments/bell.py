"""`Bell`: wakes everyone who waits for something to change."""

import asyncio


class Bell:
    """Unlike `asyncio.Condition`, it is rung from synchronous code and holds no lock."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Wake all that wait now."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next `ring`; False when it did not come within timeout_s."""
        if timeout_s <= 0:
            return False
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            # Not wait_for, which before Python 3.12 forgets a cancellation that comes together with the result.
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            self._waiting.discard(future)
        return future.done()
