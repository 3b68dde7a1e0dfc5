"""`Traffic`: the planned requests sent when they are due, or by so many users one after another."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from openai import AsyncOpenAI

from deployments.bench_serve.exchange import NOT_SENT, Exchange, Outcome, not_sent
from deployments.bench_serve.plan import Planned
from deployments.bench_serve.settings import Sending

OUT_OF_TIME = "not sent: out of time"


class Progress(NamedTuple):
    """How far a run is."""

    num_done: int
    num_in_flight: int


class Traffic:
    """One run against one server.

    Args:
        client: Of the server; it must not try again by itself, for that hides what failed.
        sending: How requests are sent.
        watch: Told of each request that ends.
    """

    def __init__(self, client: AsyncOpenAI, sending: Sending, watch: Callable[[Progress], None]) -> None:
        self._client = client
        self._sending = sending
        self._watch = watch
        self._start = 0.0
        self._in_flight: set[Exchange] = set()
        self._heard_s: dict[str, float] = {}
        self._outcomes: list[Outcome] = []

    async def run(self, planned: Sequence[Planned], num_users: int) -> list[Outcome]:
        """Send everything, and return how each request went, in the order of the plan.

        Args:
            planned: Requests that are all due at some time, in that order, or all when a user is free.
            num_users: In the latter case.
        """
        self._start = time.perf_counter()
        if planned and planned[0].due_s is None:
            requests = iter(planned)
            await asyncio.gather(*(self._be_user(requests) for _ in range(num_users)))
        else:
            await self._send_when_due(planned)
        return sorted(self._outcomes, key=lambda outcome: outcome.index)

    async def _send_when_due(self, planned: Sequence[Planned]) -> None:
        # The loop holds tasks weakly.
        tasks: set[asyncio.Task[None]] = set()
        for one in planned:
            assert one.due_s is not None, "all of a plan's requests are due at some time"
            if one.due_s < self._sending.max_seconds:
                await asyncio.sleep(max(0.0, one.due_s - self._now()))
            if len(self._in_flight) >= self._sending.max_in_flight:
                self._note(not_sent(one, self._is_cold(one.model), self._now(), NOT_SENT))
            elif self._is_out_of_time(one):
                self._note(not_sent(one, self._is_cold(one.model), self._now(), OUT_OF_TIME))
            else:
                task = asyncio.create_task(self._exchange(one))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                # Its task begins before the next request is looked at: only then is it under way.
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    async def _be_user(self, requests: Iterator[Planned]) -> None:
        for one in requests:
            if self._is_out_of_time(one):
                self._note(not_sent(one, self._is_cold(one.model), self._now(), OUT_OF_TIME))
            else:
                await self._exchange(one)

    async def _exchange(self, planned: Planned) -> None:
        is_cold = self._is_cold(planned.model)
        exchange = Exchange(self._client, planned, self._sending, self._start)
        self._in_flight.add(exchange)
        try:
            outcome = await exchange.run(is_cold)
        finally:
            self._in_flight.discard(exchange)
        if outcome.error is None:
            self._heard_s[planned.model] = self._now()
        self._note(outcome)

    def _is_cold(self, model: str) -> bool:
        """Whether nothing has been heard of a model yet, or not for long; of answers under way, too."""
        running = [one.times[-1] for one in self._in_flight if one.model == model and one.times]
        heard = max([*running, self._heard_s.get(model, -1.0)])
        if heard < 0:
            return True
        after_s = self._sending.cold_after_s
        return after_s is not None and self._now() - heard > after_s

    def _is_out_of_time(self, planned: Planned) -> bool:
        due = self._now() if planned.due_s is None else planned.due_s
        return due >= self._sending.max_seconds or self._now() >= self._sending.max_seconds

    def _note(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._watch(Progress(len(self._outcomes), len(self._in_flight)))

    def _now(self) -> float:
        return time.perf_counter() - self._start
