"""Notices that Serve takes away the replica that this code runs in. Serve itself tells nobody but handles."""

import asyncio
from collections.abc import Callable

from deployments.ray_internals import is_leaving

LOOK_S = 0.25
"""Pause between two looks."""


async def watch_leaving(tell: Callable[[], None]) -> None:
    """Call `tell` once, soon after this replica has got its last request, and end."""
    while True:
        await asyncio.sleep(LOOK_S)
        if is_leaving():
            return tell()
