"""`lora-fleet chat`: the command line of a conversation."""

from typing import Annotated

import typer

from deployments.fleet_commands import DEFAULT_URL, Json, Key, Url

chat_commands = typer.Typer()


@chat_commands.command()
def chat(
    adapter: Annotated[str, typer.Argument(help="Name of the adapter, an alias, or the base model.")],
    question: Annotated[
        str | None, typer.Argument(help="Ask this alone, and end. Unset: a conversation, or what a pipe holds.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="Told to the model before everything else.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; unset: what the context leaves.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="Unset: the server's choice.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Talk to an adapter: answers are streamed, and each question is asked with those before it.

    With --json, each answer is one line: model, content, finish_reason, usage.
    """
    # OpenAI's client takes longer to import than most commands take altogether.
    from deployments.talk import talk

    fields = {"system": system, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given = {name: value for name, value in fields.items() if value is not None}
    talk(url, key, adapter, question, as_json=as_json, **given)
