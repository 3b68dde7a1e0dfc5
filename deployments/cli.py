"""`lora-fleet`: the command line."""

import json
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from deployments.bench_serve.command import bench_commands
from deployments.chat_command import chat_commands
from deployments.doctor.command import doctor_commands
from deployments.fleet_commands import Json, commands, dumped
from deployments.local_cluster import ENVIRONMENT, JOINING
from lora_core.errors import LoRAFleetError

console = Console(stderr=True, highlight=False)
cli = typer.Typer(add_completion=False, no_args_is_help=True)
cli.add_typer(commands)
cli.add_typer(chat_commands)
cli.add_typer(doctor_commands)
cli.add_typer(bench_commands, name="bench")


@cli.callback()
def fleet() -> None:
    """Serve many LoRA adapters of one base model."""


@cli.command()
def up(
    config: Annotated[Path, typer.Argument(help="Configuration, as for `serve run`.")] = Path("cluster/config.yaml"),
    port: Annotated[int | None, typer.Option(help="Listen on this port instead of the configured one.")] = None,
    num_cpus: Annotated[int | None, typer.Option(help="CPUs Ray may hand out; unset: the machine's.")] = None,
    as_json: Json = False,
) -> None:
    """Start a Ray cluster on this machine, deploy the configuration on it, and run until stopped.

    Prints the address once every replica is healthy; with --json as one line, with all that is to be known of the
    server. Ends with the reason and status 1 if the deployment fails.
    """
    os.environ.update(ENVIRONMENT)
    # Ray reads its environment when it is imported.
    from deployments.launcher import deployed
    from deployments.serve_config import has_keys

    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, _interrupt)
    try:
        with deployed(config, port=port, num_cpus=num_cpus, report=_report) as served:
            settings, with_key = served.config.settings, has_keys(served.config.settings, os.environ)
            adapters = [path.partition("=")[0] for path in settings.lora_config.lora_paths]
            if as_json:
                facts = {"url": served.url, "model": settings.base_name, "adapters": adapters, "with_key": with_key}
                ray = {"address": served.cluster.address, "environment": JOINING}
                typer.echo(dumped({**facts, "metrics": f"{served.url}/metrics", "log": str(served.log), "ray": ray}))
            else:
                print_requests(served.url, settings.base_name, adapters, with_key=with_key)
            variables = " ".join(f"{name}={value}" for name, value in JOINING.items())
            _report(f"for other Ray programs: {variables}, ray.init({served.cluster.address!r})")
            _report(f"metrics for Prometheus: {served.url}/metrics")
            _report(f"logs: {served.log}; stop with Ctrl-C")
            served.wait()
    except LoRAFleetError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        _report("stopped")


def print_requests(url: str, base: str, adapters: list[str], *, with_key: bool) -> None:
    """Print the address, and requests to paste: the base model, an adapter, a streamed one; all with a key, or none."""
    question = "What is the capital of France?"
    first, last = (adapters[0], adapters[-1]) if adapters else (base, base)
    typer.echo(f"\nServing {base} with {len(adapters)} adapters at {url}\n")
    for model, stream in ((base, False), (first, False), (last, True)):
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0}
        options = "-N " if stream else ""
        options += '-H "Authorization: Bearer $LORA_FLEET_KEY" ' if with_key else ""
        text = json.dumps({**body, "stream": True} if stream else body)
        typer.echo(f"curl {options}{url}/v1/chat/completions -H 'Content-Type: application/json' -d '{text}'\n")


def _report(line: str) -> None:
    console.print(f"[dim]lora-fleet:[/] {escape(line)}", soft_wrap=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    # Once: the cluster is being taken down from here on, and a second signal would leave parts of it running.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the console script."""
    cli()
