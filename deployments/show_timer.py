"""`ShowTimer`: has metrics shown soon after they have changed, and not at each change."""

import asyncio
from collections.abc import Callable

SHOWN_EVERY_S = 1.0


class ShowTimer:
    """Calls `show` on the running event loop, at most once in `SHOWN_EVERY_S`.

    Args:
        show: What shows them. Where no loop runs, it is called at once.
    """

    def __init__(self, show: Callable[[], None]) -> None:
        self._show = show
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Note that something is to be shown."""
        if self._timer is not None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._show()
            return
        self._timer = loop.call_later(SHOWN_EVERY_S, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._show()
