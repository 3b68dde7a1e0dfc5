"""One request and its answer, as a user with a clock sees them."""

import asyncio
import time
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
import msgspec
import openai

from deployments.bench_serve.plan import Planned
from deployments.bench_serve.settings import Api, Sending
from deployments.openai_client import refusal

NOT_SENT = "not sent: too many under way"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request went. Times are seconds from the run's start."""

    index: int
    model: str
    is_cold: bool
    """It was sent before its adapter had answered anything in this run, or after a long silence of it."""
    due_s: float
    sent_s: float
    """Later than due by as much as this client was late."""
    first_s: float | None = None
    """When the first piece of the answer came."""
    end_s: float
    num_tokens: int = 0
    """As the server counts them; pieces, where it does not."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server had computed before."""
    gaps_s: list[float] = []
    """Times between one piece and the next, each of which may hold several tokens."""
    is_counted: bool = False
    """Whether the server counted the tokens."""
    error: str | None = None
    """Its kind, if it failed."""
    message: str = ""
    """What was said of the error."""

    @property
    def ttft_s(self) -> float | None:
        """From when it was due, so that a server that holds up its client gains nothing by it."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def inter_token_s(self) -> float | None:
        """Mean time from one token to the next; None of answers with fewer than two."""
        if self.first_s is None or self.num_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.num_tokens - 1)


class Usage(NamedTuple):
    """What a server counts."""

    prompt_tokens: int
    num_tokens: int
    cached_tokens: int | None


class Exchange:
    """A request under way.

    Args:
        client: Of the server.
        planned: The request.
        sending: How it is sent.
        start: The run's, by `time.perf_counter`.
    """

    def __init__(self, client: openai.AsyncOpenAI, planned: Planned, sending: Sending, start: float) -> None:
        self._client = client
        self._planned = planned
        self._sending = sending
        self._start = start
        self._sent_s = time.perf_counter() - start
        self.times: list[float] = []
        """When each piece came, from the run's start."""
        self._usage: Usage | None = None

    @property
    def model(self) -> str:
        """Whom it asks."""
        return self._planned.model

    async def run(self, is_cold: bool) -> Outcome:
        """Send it, read the answer to its end, and say how it went; a failure is an outcome, too."""
        kind = message = None
        try:
            # The client's own limit is from one piece to the next.
            await asyncio.wait_for(self._read(), self._sending.timeout_s)
        except (asyncio.TimeoutError, openai.APITimeoutError):
            kind, message = "timeout", f"no whole answer within {self._sending.timeout_s:g} s (--timeout)"
        # Some releases of the client let its library's errors through once an answer has begun.
        except (openai.APIConnectionError, httpx.HTTPError) as error:
            kind, message = "connection", str(error.__cause__ or error)
        except openai.APIStatusError as error:
            kind, message = f"HTTP {error.status_code}", refusal(error)
        except openai.APIError as error:
            kind, message = "broken off", refusal(error)
        except ValueError as error:
            kind, message = "no JSON", str(error)
        if kind is None and not self.times and self._usage is None:
            kind, message = "no answer", "the stream ended without a piece of an answer"
        return self._outcome(is_cold, kind, message or "")

    def _outcome(self, is_cold: bool, error: str | None, message: str) -> Outcome:
        times, usage = self.times, self._usage
        now = time.perf_counter() - self._start
        due = self._planned.due_s
        return Outcome(
            index=self._planned.index,
            model=self._planned.model,
            is_cold=is_cold,
            due_s=self._sent_s if due is None else due,
            sent_s=self._sent_s,
            # An answer may be of tokens without text; then its end is the first that is seen of it.
            first_s=times[0] if times else None if error else now,
            end_s=times[-1] if times and error is None else now,
            num_tokens=len(times) if usage is None else usage.num_tokens,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            gaps_s=[after - before for before, after in pairwise(times)],
            is_counted=usage is not None,
            error=error,
            message=message,
        )

    async def _read(self) -> None:
        planned, sending = self._planned, self._sending
        fields: dict[str, Any] = {
            "model": planned.model, "max_tokens": planned.max_tokens, "temperature": sending.temperature,
            "stream": True, "stream_options": {"include_usage": True}, **planned.prompt.fields(sending.api),
        }  # fmt: skip
        if sending.ignore_eos:
            fields["extra_body"] = {"ignore_eos": True}
        is_chat = sending.api is Api.CHAT
        create: Any = self._client.chat.completions.create if is_chat else self._client.completions.create
        async with await create(**fields) as stream:
            async for chunk in stream:
                now = time.perf_counter() - self._start
                if chunk.usage is not None:
                    self._usage = _usage(chunk.usage)
                if any(_has_text(choice, is_chat) for choice in chunk.choices):
                    self.times.append(now)


def not_sent(planned: Planned, is_cold: bool, now_s: float, reason: str) -> Outcome:
    """Of a request that was due and could not be sent."""
    due = now_s if planned.due_s is None else planned.due_s
    return Outcome(
        index=planned.index, model=planned.model, is_cold=is_cold, due_s=due, sent_s=now_s, end_s=now_s, error=reason
    )


def _has_text(choice: Any, is_chat: bool) -> bool:
    """Whether a piece has something of the answer in it: text, a thought, a call."""
    if not is_chat:
        return bool(choice.text)
    delta = choice.delta
    thought = getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None)
    return bool(delta.content or thought or delta.tool_calls)


def _usage(usage: Any) -> Usage:
    details = getattr(usage, "prompt_tokens_details", None)
    return Usage(usage.prompt_tokens, usage.completion_tokens, getattr(details, "cached_tokens", None))
