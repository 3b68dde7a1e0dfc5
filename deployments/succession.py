"""`Succession`: what a router actor does whose journal another one has opened."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import ray

from cluster.members import Members
from deployments.ray_internals import SERVE_NAMESPACE

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""How often a router that has been replaced looks at its successor."""

LOOKS = 3
"""How often in a row it must find that it serves nobody."""


class Succession:
    """While a new version of the application rolls out, its router actor opens the journal, and this one's changes are
    refused: it is about to go. But where the new version never comes to serve (its replicas do not start), or is gone
    again, this router's replicas are all there is. Then it ends its process: Serve starts it anew, it owns the journal
    again, and its replicas register with it.

    Args:
        members: The live replicas of this router.
        count: Joined replicas of the router actor of a Ray name; 0 where there is no such actor.
        end: Ends this process.
    """

    def __init__(
        self,
        members: Members,
        count: Callable[[str], Awaitable[int]],
        end: Callable[[], None],
    ) -> None:
        self._members = members
        self._count = count
        self._end = end
        self._successor = ""
        self._watching: asyncio.Task[None] | None = None

    def look_at(self, run: str) -> None:
        """Have an eye on the router of this run, which has opened the journal; not where that is no actor."""
        _, _, self._successor = run.partition("/")
        if self._successor and self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch(), name="watch-successor")

    def close(self) -> None:
        """Look no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        num_idle = 0
        while num_idle < LOOKS:
            await asyncio.sleep(LOOK_S)
            serves = await self._count(self._successor) > 0
            num_idle = 0 if serves or not self._members.num_joined else num_idle + 1
        logger.error("the router actor that took over the journal serves no replica; this one starts anew to own it")
        self._end()


async def num_joined(actor: str) -> int:
    """Joined replicas of the router actor of a Ray name; 0 where there is none, or it does not answer."""
    try:
        # Ray asks its control store and waits for the answer: not on the event loop.
        handle = await asyncio.to_thread(ray.get_actor, actor, SERVE_NAMESPACE)
        return int(await asyncio.wait_for(handle.num_joined.remote(), LOOK_S))
    except Exception as error:
        logger.warning("the router actor %r does not answer: %s: %s", actor, type(error).__name__, error)
        return 0
