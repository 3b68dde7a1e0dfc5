"""`lora-fleet bench serve`: the command line of a run."""

from pathlib import Path
from typing import Annotated

import typer

from deployments.bench_serve.settings import MAX_IN_FLIGHT, MAX_REQUESTS, Api, Arrivals, Lengths, Load, Sending, Targets
from deployments.fleet_commands import DEFAULT_URL, Exit, Json, Key, Url, dumped, stdout

bench_commands = typer.Typer(no_args_is_help=True)


@bench_commands.callback()
def bench() -> None:
    """Measure a running server."""


@bench_commands.command()
def serve(
    url: Url = DEFAULT_URL,
    key: Key = None,
    models: Annotated[
        Path | None,
        typer.Option(help="File of adapters' names, one a line, the most popular first; unset: /v1/models."),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Name of the base model; unset: as /v1/models tells.")] = None,
    base_share: Annotated[float, typer.Option(min=0, max=1, help="Share of requests for the base model.")] = 0.0,
    zipf: Annotated[float, typer.Option(min=0, max=10, help="Exponent of adapters' popularity; 0: all alike.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, max=MAX_REQUESTS, help="How many requests.")] = 200,
    arrivals: Annotated[Arrivals, typer.Option(help="When they come.")] = Arrivals.POISSON,
    rate: Annotated[float, typer.Option(min=1e-3, max=1e5, help="Requests a second; not of closed arrivals.")] = 4.0,
    burstiness: Annotated[
        float, typer.Option(min=0.01, max=100, help="Of bursts: shape of the gamma distribution; Poisson's is 1.")
    ] = 0.25,
    users: Annotated[int, typer.Option(min=1, max=MAX_IN_FLIGHT, help="Of closed arrivals: who ask by turns.")] = 8,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with `prompt` or `messages`, perhaps `max_tokens`; unset: made up.")
    ] = None,
    prompt_words: Annotated[str, typer.Option(help="Words of made-up prompts, about as many tokens: 64 or 32:128.")] = (
        "64"
    ),
    answer_tokens: Annotated[str, typer.Option(help="Most tokens of answers: 64 or 32:128.")] = "64",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of full length, where the server knows vLLM's ignore_eos.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Of all requests.")] = 0.0,
    api: Annotated[Api, typer.Option(help="/v1/chat/completions, or /v1/completions.")] = Api.CHAT,
    ttft_ms: Annotated[float, typer.Option(min=0, help="Target: longest wait for the first token.")] = 2000.0,
    inter_token_ms: Annotated[float, typer.Option(min=0, help="Target: longest mean from token to token.")] = 200.0,
    adapter_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of an adapter's answers within both for it to be within.")
    ] = 0.9,
    cold_after: Annotated[
        float | None, typer.Option(min=0, help="An adapter not heard of for so many seconds is cold again.")
    ] = None,
    max_in_flight: Annotated[
        int, typer.Option(min=1, max=MAX_IN_FLIGHT, help="What is due beyond it is not sent, and missed.")
    ] = 256,
    max_seconds: Annotated[float, typer.Option(min=0.1, help="Nothing is sent after so long.")] = 600.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Longest wait for a whole answer, in seconds.")] = 120.0,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 0,
    min_good_share: Annotated[
        float | None, typer.Option(min=0, max=1, help="With fewer good answers the command ends with status 4.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write summary and all requests to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write plots to this PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """Send many adapters' requests to an OpenAI-style server, and report how long its users waited.

    An answer is good that keeps both targets. A request is cold that is sent before its adapter has answered anything
    in this run; its wait holds whatever the server does to get the adapter. Times count from when a request is due.

    Ends with 1 if nothing was answered or a file cannot be used, 3 if no server is there, 4 with too few good answers.
    """
    load = Load(
        requests, arrivals, rate, burstiness, users, zipf, base_share, _lengths("--prompt-words", prompt_words),
        _lengths("--answer-tokens", answer_tokens), seed,
    )  # fmt: skip
    sending = Sending(api, max_in_flight, timeout, max_seconds, cold_after, temperature, ignore_eos)
    targets = Targets(ttft_ms, inter_token_ms, adapter_share)
    # They take longer to import than most commands take altogether.
    from deployments.bench_serve.run import Run
    from deployments.bench_serve.tables import summary_view

    run = Run(url, key, load, sending, targets)
    summary = run.measured(models=models, base=base, prompts=prompts, save=save, plot=plot)
    if as_json:
        typer.echo(dumped(run.told(summary)))
    else:
        stdout().print(summary_view(summary, targets))
    if not summary.num_answered:
        raise typer.Exit(Exit.REFUSED)
    if min_good_share is not None and summary.good_share < min_good_share:
        raise typer.Exit(Exit.NOT_EVERYWHERE)


def _lengths(option: str, text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None
