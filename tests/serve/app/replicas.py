"""The replica processes of the application under test, and their recovery."""

import asyncio
import contextlib
import time

import httpx
import psutil

from cluster.schema import RouterSettings
from deployments.launcher import Served


def replica_processes(served: Served) -> list[psutil.Process]:
    """The engine replicas of this test's own cluster."""
    found = []
    for child in psutil.Process(served.cluster.pid).children(recursive=True):
        # One that has just been killed has no command line any more.
        with contextlib.suppress(psutil.Error):
            found += [child] if "EngineReplica" in "".join(child.cmdline()[:1]) else []
    return found


async def wait_until_healed(http: httpx.AsyncClient, served: Served, gone: int, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    # Until its lease ends the dead one counts, beside the process that is starting in its place.
    await asyncio.sleep(RouterSettings().lease_s)
    while time.monotonic() < deadline:
        pids = [process.pid for process in replica_processes(served)]
        health = (await http.get("/health")).json()
        if gone not in pids and len(pids) == 2 and health["replicas"] == 2:
            return
        await asyncio.sleep(0.5)
    raise AssertionError(f"not healed within {timeout_s} s: {pids} {health}")
