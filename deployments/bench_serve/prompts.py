"""What is asked: made-up text of a given length, or prompts from a file."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deployments.bench_serve.settings import Api, Lengths
from lora_core.errors import ConfigError

WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man"
)
"""Common words of English, nearly all of which are one token to nearly all tokenizers."""


class Prompt(NamedTuple):
    """One thing to ask.

    Attributes:
        text: The prompt itself; of a chat, the user's one message.
        messages: A chat that has more to it; then there is no text.
        max_tokens: Longest answer; None: as the run draws it.
    """

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None

    def fields(self, api: Api) -> dict[str, Any]:
        """Of the request's body."""
        if api is Api.COMPLETIONS:
            return {"prompt": self.text}
        return {"messages": list(self.messages) or [{"role": "user", "content": self.text}]}


def made_up_prompts(count: int, lengths: Lengths, generator: np.random.Generator) -> list[Prompt]:
    """Prompts of so many words, drawn one by one, so that no cache has seen more than the beginning of any."""
    sizes = generator.integers(lengths.low, lengths.high, size=count, endpoint=True)
    known, texts = WORDS.split(), []
    for size in sizes:
        words = [known[index] for index in generator.integers(0, len(known), size=size)]
        texts.append(" ".join(words))
    return [Prompt(text) for text in texts]


def read_prompts(path: Path, api: Api) -> list[Prompt]:
    """Prompts of a file of JSON lines: objects with `prompt` or `messages`, and perhaps `max_tokens`.

    Raises:
        ConfigError: it cannot be read, is empty, or has another line in it, which is named.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    prompts = [_prompt(f"{path}, line {number}", line, api) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt; expected lines like {EXAMPLE}")
    return prompts


EXAMPLE = '{"prompt": "What is the capital of France?", "max_tokens": 64}'


def _prompt(where: str, line: str, api: Api) -> Prompt:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON ({error}); expected {EXAMPLE}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: found a {type(found).__name__}; expected an object like {EXAMPLE}")
    max_tokens = found.get("max_tokens")
    if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 1):
        raise ConfigError(f"{where}: max_tokens is {max_tokens!r}; expected a number from 1 up")
    text, messages = found.get("prompt"), found.get("messages")
    if isinstance(text, str) and text and messages is None:
        return Prompt(text, max_tokens=max_tokens)
    is_chat = isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
    if not messages or not is_chat or text is not None:
        raise ConfigError(f"{where}: expected either `prompt`, a text, or `messages`, a list of objects")
    if api is Api.COMPLETIONS:
        raise ConfigError(f"{where}: has messages, which --api completions cannot ask; use --api chat")
    return Prompt(messages=tuple(messages), max_tokens=max_tokens)
