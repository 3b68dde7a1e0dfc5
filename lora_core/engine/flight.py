"""A step in flight: its tokens are being chosen on the device while the host schedules the next one."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lora_core.engine.ahead import AheadTokens, Landed
from lora_core.engine.request import PENDING, Request, ScheduledBatch
from lora_core.engine.step_buffers import PendingTokens
from lora_core.engine.step_input import StepInput


class FlightRow(NamedTuple):
    """What a step computes for one request.

    Attributes:
        request: The request.
        start: Its tokens that were computed before.
        stop: Its tokens that are computed with the step; the token that it chooses comes to this place.
        num_releases: The request's, when the step was launched.
    """

    request: Request
    start: int
    stop: int
    num_releases: int

    @property
    def counts(self) -> bool:
        """Whether the request still has the blocks that the step writes to."""
        return self.num_releases == self.request.num_releases


class Flight:
    """One launched step: the rows it computes, and those of them that choose a token, in the order of `tokens`."""

    def __init__(self, batch: ScheduledBatch, tokens: AheadTokens) -> None:
        """Note what a batch computes; called before its requests take note of that."""
        self.rows = [
            FlightRow(
                row.request,
                row.request.num_computed,
                row.request.num_computed + row.num_tokens,
                row.request.num_releases,
            )
            for row in batch.rows
        ]
        self._tokens = tokens
        self._sampling = [row for row, scheduled in zip(self.rows, batch.rows, strict=True) if scheduled.samples]
        self._places = {row.request: place for place, row in enumerate(self._sampling)}
        self._dropped: set[Request] = set()

    def expect_tokens(self) -> None:
        """Put `PENDING` in the place of each token that is chosen."""
        for row in self._sampling:
            row.request.token_ids.append(PENDING)

    def pending(self, step: StepInput, batch: ScheduledBatch) -> PendingTokens:
        """Where the next step reads the tokens of this one.

        Args:
            step: The next step.
            batch: The same.
        """
        rows = np.flatnonzero(step.token_ids == PENDING)
        owners = np.searchsorted(np.cumsum(step.q_lens), rows, side="right").tolist()
        places = [self._places[batch.rows[owner].request] for owner in owners]
        return PendingTokens(self._tokens.inputs, rows, np.array(places, dtype=np.int64))

    def land(self) -> Iterator[tuple[FlightRow, Landed]]:
        """Wait for the device, and give the token of each row that has chosen one and was not dropped."""
        for row, landed in zip(self._sampling, self._tokens.wait(), strict=True):
            if row.request not in self._dropped:
                yield row, landed

    def drop(self, request: Request) -> FlightRow | None:
        """Let what this step computes for a request count for nothing; returns its row, if it has one."""
        self._dropped.add(request)
        return next((row for row in self.rows if row.request is request), None)

    def is_dropped(self, request: Request) -> bool:
        """Whether `drop` was called for it."""
        return request in self._dropped
