"""`Run`: one load on one server, from the catalogue to the files that are kept."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import openai
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from deployments.bench_serve.catalogue import Catalogue, read_catalogue, served_catalogue
from deployments.bench_serve.exchange import Outcome
from deployments.bench_serve.plan import Planned, plan_requests
from deployments.bench_serve.plots import check_plots, save_plots
from deployments.bench_serve.prompts import read_prompts
from deployments.bench_serve.settings import Arrivals, Load, Sending, Targets
from deployments.bench_serve.summary import Summary, summarize
from deployments.bench_serve.traffic import Progress, Traffic
from deployments.fleet_commands import Exit
from deployments.openai_client import client_options
from deployments.talk import answering
from lora_core.errors import ConfigError


class Run:
    """What is sent where, and what is asked of it."""

    def __init__(self, url: str, key: str | None, load: Load, sending: Sending, targets: Targets) -> None:
        self._url = url
        self._key = key
        self._load = load
        self._sending = sending
        self._targets = targets

    def measured(
        self, *, models: Path | None, base: str | None, prompts: Path | None, save: Path | None, plot: Path | None
    ) -> Summary:
        """Send everything, write the files that are asked for, and sum up.

        Files that cannot be used end the command before anything is sent, and a server that is not there ends it, too.

        Args:
            models: File of names; None: what the server lists.
            base: Name of the base model; None: as the server tells.
            prompts: File of prompts; None: made-up ones.
            save: Where summary and requests are written to.
            plot: Where plots are written to.
        """
        with answering(self._url):
            try:
                if plot is not None:
                    check_plots(plot)
                for path in filter(None, (save, plot)):
                    # Not after minutes of work.
                    path.open("ab").close()
                asked = None if prompts is None else read_prompts(prompts, self._sending.api)
                planned = plan_requests(self._load, self._catalogue(models, base), asked)
                outcomes = asyncio.run(self._sent(planned))
                summary = summarize(outcomes, self._targets)
                self._keep(outcomes, summary, save, plot)
            except (ConfigError, OSError) as error:
                typer.echo(f"error: {error}", err=True)
                raise typer.Exit(Exit.REFUSED) from None
        return summary

    def told(self, summary: Summary) -> dict[str, Any]:
        """What is told as JSON."""
        return {
            "server": self._url,
            "load": self._load._asdict(),
            "sending": self._sending._asdict(),
            "targets": self._targets._asdict(),
            "summary": summary,
        }

    def _catalogue(self, models: Path | None, base: str | None) -> Catalogue:
        if models is not None:
            return read_catalogue(models, base)
        with openai.OpenAI(**client_options(self._url, self._key)) as client:
            found = served_catalogue(client)
        return found if base is None else found._replace(base=base)

    async def _sent(self, planned: Sequence[Planned]) -> list[Outcome]:
        """Send everything, with a bar on the terminal that says how far it is."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        options = {**client_options(self._url, self._key), "timeout": self._sending.timeout_s}
        with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
            shown = bar.add_task("requests", total=len(planned))

            def watch(done: Progress) -> None:
                bar.update(shown, completed=done.num_done, description=f"requests ({done.num_in_flight} under way)")

            # Not tried again: what failed is counted.
            async with openai.AsyncOpenAI(**options, max_retries=0) as client:
                return await Traffic(client, self._sending, watch).run(planned, self._load.num_users)

    def _keep(self, outcomes: Sequence[Outcome], summary: Summary, save: Path | None, plot: Path | None) -> None:
        """Write the files that were asked for. Raises OSError."""
        load = self._load
        if save is not None:
            save.write_bytes(msgspec.json.encode({**self.told(summary), "requests": outcomes}))
        if plot is not None:
            how = f"{load.num_users} users" if load.arrivals is Arrivals.CLOSED else f"{load.rate:g} requests/s"
            title = f"{self._url}: {len(outcomes)} requests, {load.arrivals.value}, {how}, Zipf {load.zipf:g}"
            save_plots(plot, outcomes, self._targets, title)
