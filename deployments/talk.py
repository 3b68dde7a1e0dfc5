"""Talking to an adapter: the loop of questions, how answers are shown, and how what goes wrong ends a command."""

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import typer
from rich.console import Console
from rich.markup import escape

from deployments.conversation import Conversation
from deployments.fleet_client import Unreachable
from deployments.fleet_commands import EXITS, Exit, dumped
from deployments.openai_client import client_options, refusal, unreachable

UNSEEN = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters, with which a text could write elsewhere on a terminal than in its place."""

HELP = "/exit ends, /clear begins anew, Ctrl-C stops an answer"


def talk(url: str, key: str | None, model: str, question: str | None, *, as_json: bool, **fields: Any) -> None:
    """Ask one question, what a pipe holds, or what is typed until the reader has enough.

    Args:
        url: Address of the server.
        key: Where it asks for one.
        model: Name of the adapter, or of the base model.
        question: None: what a pipe holds or, on a terminal, a conversation.
        as_json: Print each answer as one line of JSON.
        fields: Of `Conversation`.
    """
    with answering(url), openai.OpenAI(**client_options(url, key)) as client:
        conversation = Conversation(client, model, **fields)
        if question is not None:
            say(conversation, question, as_json)
        elif not sys.stdin.isatty():
            say(conversation, _piped(), as_json)
        else:
            _check_model(client, model)
            report(f"{model} at {url}; {HELP}")
            converse(conversation, as_json)


def converse(conversation: Conversation, as_json: bool) -> None:
    """Ask what is typed until it is /exit, Ctrl-D, or Ctrl-C with nothing being answered."""
    with contextlib.suppress(ImportError):
        # Lets `input` edit its line, and remember those before.
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if line == "/exit":
            return
        if line == "/clear":
            conversation.clear()
            report("begun anew")
        elif line.startswith("/"):
            report(HELP)
        elif line:
            _take_turn(conversation, line, as_json)


def say(conversation: Conversation, question: str, as_json: bool) -> None:
    """Print the answer to a question, as it comes or, as JSON, when it is there."""
    is_terminal = sys.stdout.isatty()
    ends_line = True
    # Closed at once where the reader stops it, so that what has come is remembered.
    with contextlib.closing(conversation.ask(question)) as pieces:
        for piece in pieces:
            if not as_json:
                shown = piece.translate(UNSEEN) if is_terminal else piece
                typer.echo(shown, nl=False)
                ends_line = shown.endswith("\n") if shown else ends_line
    reply = conversation.last
    assert reply is not None, "an answer that raised nothing is remembered"
    if as_json:
        typer.echo(dumped(reply._asdict()))
    elif not ends_line or not reply.content:
        typer.echo()
    if reply.finish_reason == "length" and not as_json:
        report("the answer ends here for its length; --max-tokens, or the model's context, bounds it")


@contextmanager
def answering(url: str) -> Iterator[None]:
    """What the server or the network refuses within the block ends the command with its exit code."""
    try:
        yield
    except Unreachable as error:
        _fail(str(error), Exit.UNREACHABLE)
    # Some releases of the client let its library's errors through once an answer has begun.
    except (openai.APIConnectionError, httpx.HTTPError) as error:
        _fail(unreachable(url, error), Exit.UNREACHABLE)
    except openai.APIError as error:
        status = error.status_code if isinstance(error, openai.APIStatusError) else 0
        _fail(refusal(error), EXITS.get(status, Exit.REFUSED))


def report(line: str) -> None:
    """Say something that is not part of an answer."""
    _errors().print(f"[dim]{escape(line)}[/]", soft_wrap=True)


def _take_turn(conversation: Conversation, question: str, as_json: bool) -> None:
    """One question of a conversation, which goes on whatever becomes of it."""
    try:
        say(conversation, question, as_json)
    except KeyboardInterrupt:
        typer.echo()
        report("stopped")
    except (openai.APIError, httpx.HTTPError) as error:
        typer.echo()
        said = refusal(error) if isinstance(error, openai.APIError) else str(error)
        _errors().print(f"[bold red]error:[/] {escape(said)}", soft_wrap=True)


def _check_model(client: openai.OpenAI, name: str) -> None:
    """Say before the first question that there is no such model. Raises openai.APIError: the server refuses."""
    if name not in (names := [model.id for model in client.models.list()]):
        few = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        _fail(f"the server has no model {name!r}; it has {few or 'none that this key may use'}", Exit.NOT_FOUND)


def _piped() -> str:
    question = sys.stdin.read().strip()
    if not question:
        raise typer.BadParameter("there is no question: give one after the adapter's name, or through the pipe")
    return question


def _fail(message: str, code: Exit) -> None:
    _errors().print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


def _errors() -> Console:
    return Console(stderr=True, highlight=False)
