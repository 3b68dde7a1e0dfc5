"""`Summary`: what a run says of a server, from the outcomes of its requests."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from deployments.bench_serve.exchange import Outcome
from deployments.bench_serve.settings import Targets

SHOWN_ADAPTERS = 10
"""Of those that miss their targets, the worst."""

LATE_MS = 20.0
"""A client that is later than this sends another load than the one that was asked for."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How a time is spread over those it was taken of; milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """What users of one kind of request wait for; None where there is nothing to tell it from."""

    ttft_ms: Spread | None
    """To the first token, from when the request was due."""
    inter_token_ms: Spread | None
    """From one token to the next: the mean of each answer."""
    gap_ms: Spread | None
    """From one piece of an answer to the next, each of which may hold several tokens."""


class AdapterFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter's requests."""

    model: str
    num_requests: int
    num_good: int
    ttft_p50_ms: float | None


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of one kind."""

    count: int
    message: str
    """Of the first."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is told of a run."""

    duration_s: float
    """From when the first request was due until the last answer's end."""
    num_requests: int
    num_answered: int
    num_good: int
    """Answered within the targets."""
    good_share: float
    requests_per_s: float
    """Answered ones."""
    goodput_rps: float
    """Good ones."""
    tokens_per_s: float
    """Of answers."""
    prompt_tokens: int | None
    answer_tokens: int
    tokens_are_counted: bool
    """Whether the server counted them; otherwise they are pieces of streams, and times from token to token too long."""
    cached_prompt_tokens: int | None
    warm: Times
    cold: Times
    all: Times
    num_cold: int
    num_adapters_asked: int
    num_adapters_within: int
    adapters_within_share: float
    worst_adapters: list[AdapterFigures]
    """Those that miss their targets, by their share of good answers."""
    faults: dict[str, Fault]
    """By kind."""
    client_late_ms: Spread | None
    """How much later than due this client sent."""
    is_client_late: bool
    """Whether that is so much that the figures are the client's rather than the server's."""


def summarize(outcomes: Sequence[Outcome], targets: Targets) -> Summary:
    """Sum up a run of at least one request."""
    answered = [one for one in outcomes if one.error is None]
    good = [one for one in answered if is_good(one, targets)]
    duration_s = max(one.end_s for one in outcomes) - min(one.due_s for one in outcomes)
    # Even a run that failed at once took some time.
    per_s = 1 / max(duration_s, 1e-6)
    adapters = _by_adapter(outcomes, targets)
    within = [one for one in adapters if one.num_good >= targets.adapter_share * one.num_requests]
    missing = sorted(
        (one for one in adapters if one not in within), key=lambda one: (one.num_good / one.num_requests, one.model)
    )
    sent = [one for one in outcomes if one.first_s is not None or one.error is None]
    late = _spread([(one.sent_s - one.due_s) for one in sent])
    return Summary(
        duration_s=duration_s,
        num_requests=len(outcomes),
        num_answered=len(answered),
        num_good=len(good),
        good_share=len(good) / len(outcomes),
        requests_per_s=len(answered) * per_s,
        goodput_rps=len(good) * per_s,
        tokens_per_s=sum(one.num_tokens for one in answered) * per_s,
        prompt_tokens=_total([one.prompt_tokens for one in answered]),
        answer_tokens=sum(one.num_tokens for one in answered),
        tokens_are_counted=all(one.is_counted for one in answered),
        cached_prompt_tokens=_total([one.cached_tokens for one in answered]),
        warm=_times(one for one in answered if not one.is_cold),
        cold=_times(one for one in answered if one.is_cold),
        all=_times(answered),
        num_cold=sum(one.is_cold for one in outcomes),
        num_adapters_asked=len(adapters),
        num_adapters_within=len(within),
        adapters_within_share=len(within) / len(adapters),
        worst_adapters=missing[:SHOWN_ADAPTERS],
        faults=_faults(outcomes),
        client_late_ms=late,
        is_client_late=late is not None and late.p99 > max(LATE_MS, targets.ttft_ms / 10),
    )


def is_good(outcome: Outcome, targets: Targets) -> bool:
    """Whether an answer came, and kept both targets."""
    if outcome.error is not None or outcome.ttft_s is None:
        return False
    inter_token_s = outcome.inter_token_s
    return outcome.ttft_s * 1e3 <= targets.ttft_ms and (
        inter_token_s is None or inter_token_s * 1e3 <= targets.inter_token_ms
    )


def _times(outcomes: Iterable[Outcome]) -> Times:
    outcomes = list(outcomes)
    return Times(
        ttft_ms=_spread([one.ttft_s for one in outcomes]),
        inter_token_ms=_spread([one.inter_token_s for one in outcomes]),
        gap_ms=_spread([gap for one in outcomes for gap in one.gaps_s]),
    )


def _spread(seconds: Sequence[float | None]) -> Spread | None:
    known = 1e3 * np.array([one for one in seconds if one is not None])
    if not known.size:
        return None
    p50, p90, p99 = (float(one) for one in np.percentile(known, (50, 90, 99)))
    return Spread(count=int(known.size), mean=float(known.mean()), p50=p50, p90=p90, p99=p99, max=float(known.max()))


def _by_adapter(outcomes: Sequence[Outcome], targets: Targets) -> list[AdapterFigures]:
    of_each: dict[str, list[Outcome]] = {}
    for one in outcomes:
        of_each.setdefault(one.model, []).append(one)
    figures = []
    for model, asked in of_each.items():
        ttft = _spread([one.ttft_s for one in asked if one.error is None])
        num_good = sum(is_good(one, targets) for one in asked)
        figures.append(
            AdapterFigures(
                model=model, num_requests=len(asked), num_good=num_good, ttft_p50_ms=None if ttft is None else ttft.p50
            )
        )
    return figures


def _faults(outcomes: Sequence[Outcome]) -> dict[str, Fault]:
    counts = Counter(one.error for one in outcomes if one.error is not None)
    first = {one.error: one.message for one in reversed(outcomes) if one.error is not None}
    return {kind: Fault(count=count, message=first[kind]) for kind, count in counts.most_common()}


def _total(counts: Sequence[int | None]) -> int | None:
    """None where nothing was told at all."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
