"""`FolderLooks`: looks at adapters' folders, whose storage may never answer, apart from the event loop."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from cluster.fingerprint import folder_fingerprint
from deployments.journal_place import one_spelling
from lora_core.errors import RequestTimeout

PATIENCE_S = 20.0
"""Longest wait for one look: longer than storage takes that is only busy."""

THREADS = "look-at-folder"
"""Name of the threads that look."""

Seen = TypeVar("Seen")


class FolderLooks:
    """A look at a path that is under way is shared, so that storage that hangs costs a thread for each path, however
    often it is asked for. Such a thread ends with the storage's answer, or with the process.

    Args:
        patience_s: Longest wait; unset: `PATIENCE_S`.
    """

    def __init__(self, patience_s: float | None = None) -> None:
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._under_way: dict[tuple[Callable[[str], Any], str], asyncio.Future[Any]] = {}

    async def spelling(self, path: str) -> str:
        """`one_spelling` of a path. Raises RequestTimeout."""
        return await self.see(one_spelling, path)

    async def fingerprint(self, path: str) -> str | None:
        """`folder_fingerprint` of a path. Raises RequestTimeout."""
        return await self.see(folder_fingerprint, path)

    async def see(self, look: Callable[[str], Seen], path: str) -> Seen:
        """What a look at a path finds; raises what it raises.

        Args:
            look: Run on a thread of its own. Looks that are equal, at the same path, share one.
            path: Given to it.

        Raises:
            RequestTimeout: it takes longer than anybody waits.
        """
        seen: asyncio.Future[Seen] | None = self._under_way.get((look, path))
        if seen is None:
            loop = asyncio.get_running_loop()
            seen = self._under_way[look, path] = loop.create_future()
            seen.add_done_callback(lambda seen: self._forget((look, path), seen))
            # Not of a pool, whose other work would wait for a thread that hangs, and whose process could not end.
            threading.Thread(target=_run, args=(loop, seen, look, path), name=THREADS, daemon=True).start()
        await asyncio.wait([seen], timeout=self._patience_s)
        if not seen.done():
            raise RequestTimeout(
                f"the storage of {path!r} has not answered within {self._patience_s:g} s; see to what is mounted "
                "there, and load it again"
            )
        return seen.result()

    def _forget(self, key: tuple[Callable[[str], Any], str], seen: "asyncio.Future[Any]") -> None:
        del self._under_way[key]
        if not seen.cancelled():
            # Where all who asked have gone, asyncio would complain that nobody has heard of it.
            seen.exception()


def _run(loop: asyncio.AbstractEventLoop, seen: "asyncio.Future[Seen]", look: Callable[[str], Seen], path: str) -> None:
    try:
        found = look(path)
    except BaseException as error:
        _tell(loop, seen, seen.set_exception, error)
    else:
        _tell(loop, seen, seen.set_result, found)


def _tell(
    loop: asyncio.AbstractEventLoop, seen: "asyncio.Future[Any]", settle: Callable[[Any], None], what: Any
) -> None:
    def tell() -> None:
        if not seen.done():
            settle(what)

    # The loop may have been closed while the storage hung.
    if not loop.is_closed():
        loop.call_soon_threadsafe(tell)
