"""Steps that run ahead of what the host knows: at most one is in flight while the next one is scheduled."""

from typing import Protocol

import torch
from torch import Tensor

from lora_core.engine.ahead import AheadTokens, can_run_ahead
from lora_core.engine.flight import Flight, FlightRow
from lora_core.engine.request import Request, ScheduledBatch
from lora_core.engine.scheduler import Scheduler
from lora_core.messages import TokenDelta


class Answers(Protocol):
    """What becomes of tokens that have arrived; the engine."""

    def is_known(self, request: Request) -> bool:
        """Whether a request has not ended."""
        ...

    def answer(self, request: Request, num_tokens: int) -> TokenDelta:
        """Tell of the last of a request's first `num_tokens` tokens, and end the request if it ends the answer."""
        ...

    def fail_for_logits(self, request: Request) -> TokenDelta:
        """End a request whose logits are not finite."""
        ...


class StepsAhead:
    """Keeps the step in flight, and notes what steps have computed when they land; for the step thread."""

    def __init__(self, scheduler: Scheduler, answers: Answers, randomness: torch.Generator, *, is_on: bool) -> None:
        """With nothing in flight.

        Args:
            scheduler: Is told of what is launched and of what is computed.
            answers: Takes the tokens.
            randomness: Of requests without a seed.
            is_on: Whether steps may be left in flight at all.
        """
        self._scheduler = scheduler
        self._answers = answers
        self._randomness = randomness
        self._is_on = is_on
        # Those whose next token depends on the last one in ways that only the host knows.
        self._serial: set[Request] = set()
        self.flight: Flight | None = None
        """The step in flight."""

    def watch(self, request: Request, vocab_size: int) -> None:
        """Take note of a request that has come, until `forget`."""
        if not can_run_ahead(request.sampling, request.sampler, vocab_size):
            self._serial.add(request)

    def forget(self, request: Request, *, is_last: bool) -> None:
        """Take note that a request has ended; with the last one, what is in flight concerns nobody."""
        self._serial.discard(request)
        if is_last:
            self.flight = None

    @property
    def may_begin(self) -> bool:
        """Whether all requests allow that a step is left in flight."""
        return self._is_on and not self._serial

    def take_off(self, batch: ScheduledBatch, logits: Tensor) -> list[TokenDelta]:
        """Choose a computed batch's tokens on the device, and leave it in flight; the one before lands."""
        requests = [row.request for row in batch.rows if row.samples]
        tokens = AheadTokens(
            logits,
            [request.sampling for request in requests],
            [request.sampler for request in requests],
            self._randomness,
        )
        landing, self.flight = self.flight, Flight(batch, tokens)
        self._scheduler.launch(batch)
        self.flight.expect_tokens()
        return [] if landing is None else self._land(landing)

    def land(self) -> list[TokenDelta]:
        """Wait for the step in flight, with none behind it."""
        landing, self.flight = self.flight, None
        assert landing is not None, "no step is in flight"
        return self._land(landing)

    def _land(self, flight: Flight) -> list[TokenDelta]:
        """Take note of what a step has computed, for those requests that have not ended meanwhile."""
        for row in flight.rows:
            if row.counts and self._answers.is_known(row.request) and not flight.is_dropped(row.request):
                self._scheduler.settle(row.request, row.stop)
        deltas = []
        for row, (token_id, was_wrong) in flight.land():
            if not self._answers.is_known(row.request):
                continue
            if was_wrong:
                self._take_back(row)
            if token_id is None:
                deltas.append(self._answers.fail_for_logits(row.request))
            else:
                row.request.token_ids[row.stop] = token_id
                deltas.append(self._answers.answer(row.request, row.stop + 1))
        return deltas

    def _take_back(self, row: FlightRow) -> None:
        """Let the step in flight count for nothing to a request whose last token it had wrong."""
        request = row.request
        wrong = None if self.flight is None else self.flight.drop(request)
        if wrong is not None and wrong.counts:
            request.num_computed = wrong.start
        del request.token_ids[row.stop + 1 :]
