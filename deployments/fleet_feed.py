"""`FleetFeed`: the fleet as it changes, asked for once however many look at it."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing

import msgspec

from cluster.picture import FleetPicture
from deployments import http_errors
from deployments.bell import Bell

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Time between two questions to the router actor."""

STREAM_S = 300.0
"""A stream ends after so long, and whoever still looks begins another: so a key that was taken away is asked for."""

WAIT_S = 60.0
"""Longest wait for news before looking again whether there are any; without effect on what is seen."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment, as it is sent: every part is JSON already, once for all who look."""

    fleet: bytes
    """A `FleetPicture` without its replicas."""
    replicas: Mapping[str, bytes]
    fault: str | None = None
    """Why it is not of now."""


class FleetFeed:
    """Asks while somebody looks, and not otherwise.

    Args:
        ask: Gives the fleet as it is now.
        period_s: Time between two questions.
    """

    def __init__(self, ask: Callable[[], Awaitable[FleetPicture]], period_s: float = PERIOD_S) -> None:
        self._ask = ask
        self._period_s = period_s
        self._num_viewers = 0
        self._asking: asyncio.Task[None] | None = None
        self._frame: Frame | None = None
        self._news = Bell()

    async def frames(self) -> AsyncGenerator[Frame, None]:
        """The newest frame each time one is taken, and each once: who is slow misses some."""
        self._num_viewers += 1
        asking = self._asking = self._asking or asyncio.create_task(self._ask_forever(), name="ask-fleet")
        seen: Frame | None = None
        try:
            while True:
                if self._frame is None or self._frame is seen:
                    await self._news.wait(WAIT_S)
                    continue
                seen = self._frame
                yield seen
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                asking.cancel()
                # Whoever looks next sees nothing of before.
                self._asking = self._frame = None

    async def _ask_forever(self) -> None:
        while True:
            try:
                frame = _frame(await self._ask())
            except Exception as error:
                frame = self._with_fault(error)
            self._frame = frame
            self._news.ring()
            await asyncio.sleep(self._period_s)

    def _with_fault(self, error: Exception) -> Frame:
        """The last frame, no longer of now."""
        last = self._frame or Frame(fleet=b"null", replicas={})
        fault = str(http_errors.fault_of(error)[1]["error"]["message"])
        if last.fault != fault:
            logger.warning("the fleet cannot be shown (%s): %s", type(error).__name__, json.dumps(fault))
        return msgspec.structs.replace(last, fault=fault)


async def fleet_events(feed: FleetFeed, stream_s: float = STREAM_S) -> AsyncGenerator[bytes, None]:
    """One viewer's server-sent events, for so long.

    The data of each is a JSON object: {"whole": whether what was sent before no longer counts, "fleet": a
    `FleetPicture` without its replicas, or null where none is known, "replicas": {id: those that differ from what was
    sent before}, "gone": [ids], "fault": null, or why the rest is not of now}.
    """
    ends_at, sent = time.monotonic() + stream_s, None
    async with aclosing(feed.frames()) as frames:
        async for frame in frames:
            yield _event(frame, sent)
            sent = frame
            if time.monotonic() >= ends_at:
                return


def _frame(picture: FleetPicture) -> Frame:
    replicas = {name: msgspec.json.encode(replica) for name, replica in picture.replicas.items()}
    rest = {name: value for name, value in msgspec.structs.asdict(picture).items() if name != "replicas"}
    return Frame(fleet=msgspec.json.encode(rest), replicas=replicas)


def _event(frame: Frame, sent: Frame | None) -> bytes:
    before = {} if sent is None else sent.replicas
    data = {
        "whole": sent is None,
        "fleet": msgspec.Raw(frame.fleet),
        "replicas": {name: msgspec.Raw(told) for name, told in frame.replicas.items() if before.get(name) != told},
        "gone": [name for name in before if name not in frame.replicas],
        "fault": frame.fault,
    }
    # JSON has no line breaks but escaped ones.
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
