"""The commands of `lora-fleet` that speak to a running server: list, load, unload, pin, unpin, status."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape

from cluster.status import AdapterReport, FleetReport
from deployments.fleet_client import Changed, FleetClient, Refused, Unreachable
from deployments.fleet_tables import adapter_table, adapters_table, fleet_view


class Exit(IntEnum):
    """Exit codes; 2 is Typer's own, for a command line that is wrong."""

    DONE = 0
    REFUSED = 1
    """The server refused, or could not."""
    UNREACHABLE = 3
    """No server answers at the address."""
    NOT_EVERYWHERE = 4
    """Done, but not on every replica; for `status`: something is behind, refused or stalled."""
    NOT_FOUND = 5
    CONFLICT = 6
    """The name is taken, or being changed."""


EXITS = {404: Exit.NOT_FOUND, 409: Exit.CONFLICT}
"""By the status of HTTP."""

WIDTH_IN_FILES = 200
"""Characters of a table's line where it is not written to a terminal."""

KEY = re.compile(r"[!-~]+")
"""Keys are made of visible ASCII characters."""


def _as_key(value: str | None) -> str | None:
    """The key without what a file put around it. What no header can carry is never sent, nor told."""
    key = (value or "").strip()
    if key and KEY.fullmatch(key) is None:
        raise typer.BadParameter("keys are made of visible ASCII characters, without spaces between")
    return key or None


Url = Annotated[str, typer.Option(envvar="LORA_FLEET_URL", help="Address of the server.")]
Key = Annotated[
    str | None, typer.Option(envvar="LORA_FLEET_KEY", help="Key, where the server asks for one.", callback=_as_key)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Argument(help="Name of the adapter.")]
DEFAULT_URL = "http://127.0.0.1:8000"

commands = typer.Typer()


@commands.command("list")
def list_adapters(url: Url = DEFAULT_URL, key: Key = None, as_json: Json = False) -> None:
    """List the adapters that the fleet serves, and how far it has got with each."""
    with connected(url, key) as client:
        adapters = list(client.adapters())
        show(adapters if as_json else adapters_table(adapters))


@commands.command()
def load(
    name: Name,
    path: Annotated[str, typer.Argument(help="Folder on the server's machines, or a Hub id.")],
    in_place: Annotated[bool, typer.Option("--in-place", help="Replace the adapter that has the name.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Load an adapter on every replica."""
    change(url, key, as_json, lambda client: client.load(name, path, in_place=in_place))


@commands.command()
def unload(name: Name, url: Url = DEFAULT_URL, key: Key = None, as_json: Json = False) -> None:
    """Stop serving an adapter; requests under way finish."""
    change(url, key, as_json, lambda client: client.unload(name))


@commands.command()
def pin(name: Name, url: Url = DEFAULT_URL, key: Key = None, as_json: Json = False) -> None:
    """Keep an adapter in a slot of every replica."""
    change(url, key, as_json, lambda client: client.pin(name))


@commands.command()
def unpin(name: Name, url: Url = DEFAULT_URL, key: Key = None, as_json: Json = False) -> None:
    """Let an adapter's slot be taken again."""
    change(url, key, as_json, lambda client: client.unpin(name))


@commands.command()
def status(
    name: Annotated[str | None, typer.Argument(help="One adapter; unset: the whole fleet.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Show replicas and adapters: what should be, what is acknowledged, what is where. Status 4 if they differ."""
    with connected(url, key) as client:
        view = View(client, name)
        if watch:
            follow(view, interval, as_json)
            return
        view.look()
        show(view.data if as_json else view.table)
    if not view.is_well:
        raise typer.Exit(Exit.NOT_EVERYWHERE)


class View:
    """What `status` shows: the fleet, or one adapter."""

    def __init__(self, client: FleetClient, name: str | None) -> None:
        self._client = client
        self._name = name
        self._fleet: FleetReport | None = None
        self._adapters: list[AdapterReport] = []

    def look(self) -> None:
        """Ask the server."""
        if self._name is None:
            self._fleet, self._adapters = self._client.fleet(), list(self._client.adapters())
        else:
            self._adapters = [self._client.adapter(self._name)]

    @property
    def data(self) -> Any:
        """For JSON."""
        return self._adapters[0] if self._fleet is None else {"fleet": self._fleet, "adapters": self._adapters}

    @property
    def table(self) -> RenderableType:
        """For a reader."""
        return adapter_table(self._adapters[0]) if self._fleet is None else fleet_view(self._fleet, self._adapters)

    @property
    def is_well(self) -> bool:
        """Whether every replica serves what it should."""
        replicas = {} if self._fleet is None else self._fleet.replicas
        well = all(one.joined and not (one.lag or one.fault or one.stalled) for one in replicas.values())
        served = [one for adapter in self._adapters for one in adapter.replicas.values()]
        return (
            well
            and (self._fleet is None or bool(replicas))
            and all(one.acknowledged == "applied" and one.error is None for one in served)
        )


def follow(view: View, interval_s: float, as_json: bool) -> None:
    """Show a view again and again, until interrupted; a server that is away for a while is said to be."""
    live = None if as_json else Live(console=stdout(), auto_refresh=False)
    try:
        if live is not None:
            live.start()
        while True:
            try:
                view.look()
                shown: RenderableType = "" if as_json else view.table
                text = dumped(view.data) if as_json else ""
            except (Unreachable, Refused) as error:
                shown, text = f"[bold red]{escape(str(error))}[/]", dumped({"error": str(error)})
            if live is None:
                typer.echo(text)
            else:
                live.update(shown, refresh=True)
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return
    finally:
        if live is not None:
            live.stop()


def change(url: str, key: str | None, as_json: bool, ask: Callable[[FleetClient], Changed]) -> None:
    """Carry out a change, and say how it ended."""
    with connected(url, key) as client:
        changed = ask(client)
    if as_json:
        typer.echo(dumped(changed.body))
    else:
        typer.echo(changed.body.get("message", ""))
        for warning in changed.body.get("report", {}).get("warnings", []):
            typer.echo(f"warning: {warning}", err=True)
        if not changed.is_everywhere:
            for replica, words in sorted(changed.body.get("replicas", {}).items()):
                typer.echo(f"  {replica}: {words}", err=True)
    if not changed.is_everywhere:
        raise typer.Exit(Exit.NOT_EVERYWHERE)


@contextmanager
def connected(url: str, key: str | None) -> Iterator[FleetClient]:
    """A client for the block; what the server or the network refuses ends the command with its exit code."""
    errors = Console(stderr=True, highlight=False)
    client: FleetClient | None = None
    try:
        client = FleetClient(url, key)
        yield client
    except Refused as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(EXITS.get(error.status, Exit.REFUSED)) from None
    except Unreachable as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(Exit.UNREACHABLE) from None
    finally:
        if client is not None:
            client.close()


def show(what: Any) -> None:
    """Print a table, or anything else as JSON."""
    if hasattr(what, "__rich_console__"):
        stdout().print(what)
    else:
        typer.echo(dumped(what))


def dumped(data: Any) -> str:
    """JSON in one line."""
    return msgspec.json.encode(data).decode()


def stdout() -> Console:
    """The terminal, or a file's wide lines."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH_IN_FILES)
