"""What travels between the ingress and a replica to cut texts into tokens, and back."""

from typing import Any

import msgspec

from lora_core.portable import portable


@portable
class TextCall(msgspec.Struct, frozen=True, kw_only=True):
    """A text or a chat to cut into tokens: one of `prompt` and `messages` is set."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    with_names: bool = False
    """Tell each token as its vocabulary writes it, too."""


@portable
class TokensCall(msgspec.Struct, frozen=True):
    """Token ids to write as text."""

    token_ids: list[int]


@portable
class TextTokens(msgspec.Struct, frozen=True):
    """The tokens of a text."""

    token_ids: list[int]
    max_model_len: int
    """What a prompt and its answer may have together."""
    names: list[str | None] | None = None
    """As the vocabulary writes them, where that was asked for."""
