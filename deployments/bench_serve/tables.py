"""A run's summary as tables for a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deployments.bench_serve.settings import Targets
from deployments.bench_serve.summary import Spread, Summary, Times


def summary_view(summary: Summary, targets: Targets) -> Group:
    """What was reached, how long users waited, and what was wrong."""
    return Group(*_lines(summary, targets), _times_table(summary), *_faults(summary))


def _lines(summary: Summary, targets: Targets) -> Iterator[Text]:
    yield Text(
        f"goodput {summary.goodput_rps:.2f} requests/s: {summary.num_good} of {summary.num_requests} answers "
        f"({summary.good_share:.1%}) within {targets.ttft_ms:g} ms to the first token and "
        f"{targets.inter_token_ms:g} ms from token to token",
        style="bold",
    )
    yield Text(
        f"{summary.num_answered} answered in {summary.duration_s:.1f} s: {summary.requests_per_s:.2f} requests/s, "
        f"{summary.tokens_per_s:.1f} tokens/s ({'' if summary.tokens_are_counted else 'at least '}"
        f"{summary.answer_tokens} tokens{_prompt_words(summary)})"
    )
    yield Text(
        f"{summary.num_adapters_within} of {summary.num_adapters_asked} adapters within their targets "
        f"({summary.adapters_within_share:.1%}; {targets.adapter_share:.0%} of an adapter's answers must be good)"
    )


def _prompt_words(summary: Summary) -> str:
    if summary.prompt_tokens is None:
        return ""
    cached = summary.cached_prompt_tokens
    return f" for {summary.prompt_tokens} of prompts" + (f", {cached} of them cached" if cached is not None else "")


def _times_table(summary: Summary) -> RenderableType:
    table = Table("ms", "requests", "count", "mean", "p50", "p90", "p99", "max", box=None, pad_edge=False)
    for label, field in (
        ("first token", "ttft_ms"),
        ("token to token", "inter_token_ms"),
        ("piece to piece", "gap_ms"),
    ):
        for kind, times in (("warm", summary.warm), ("cold", summary.cold), ("all", summary.all)):
            table.add_row(label, kind, *_cells(times, field))
    return table


def _cells(times: Times, field: str) -> list[str]:
    spread: Spread | None = getattr(times, field)
    if spread is None:
        return ["0", "", "", "", "", ""]
    figures = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return [str(spread.count), *(f"{figure:.1f}" for figure in figures)]


def _faults(summary: Summary) -> Iterator[Text]:
    for adapter in summary.worst_adapters:
        ttft = "" if adapter.ttft_p50_ms is None else f", median to the first token {adapter.ttft_p50_ms:.0f} ms"
        yield Text(f"{adapter.model}: {adapter.num_good} of {adapter.num_requests} good{ttft}", style="yellow")
    for kind, fault in summary.faults.items():
        yield Text(f"{fault.count} x {kind}{': ' if fault.message else ''}{fault.message}", style="bold red")
    if not summary.tokens_are_counted:
        yield Text(
            "the server counts no tokens of streams (usage): pieces were counted, which may hold several",
            style="yellow",
        )
    if summary.is_client_late and summary.client_late_ms is not None:
        yield Text(
            f"this client was late ({summary.client_late_ms.p99:.0f} ms at the 99th percentile): times hold its own "
            "delay; send fewer requests, or from another machine",
            style="bold red",
        )
