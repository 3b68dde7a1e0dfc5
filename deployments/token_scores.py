"""Log-probabilities as clients read them: OpenAI's objects for chats and for completions, vLLM's for prompts."""

import codecs
from collections.abc import Sequence
from typing import Any

from deployments.generation import ScoredToken


class TextOffsets:
    """Where the tokens of one text start in it, counted in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0
        self._inside = False

    def take(self, token: ScoredToken) -> int:
        """Where the next token starts; one that goes on with a character begun before starts where that one does."""
        data = b"" if token.special else token.data
        # In UTF-8, all bytes of a character but the first are 10xxxxxx. Before another one, what was begun is broken,
        # and a character of its own.
        broken = self._inside and data[:1] != b"" and data[0] & 0xC0 != 0x80
        offset = self._num_characters + broken
        self._num_characters += len(self._decoder.decode(data))
        self._inside = bool(self._decoder.getstate()[0])
        return offset


def chat_logprobs(scores: Sequence[ScoredToken]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    return {
        "content": [
            {**_chat_token(score), "top_logprobs": [_chat_token(one) for one in score.top]} for score in scores
        ],
        "refusal": None,
    }


def completion_logprobs(scores: Sequence[ScoredToken], num_top: int, offsets: TextOffsets) -> dict[str, Any]:
    """`choices[].logprobs` of a completion.

    Args:
        scores: The next tokens of its text.
        num_top: As many of the likeliest tokens are told, and the one that is there where it is not among them; with
            0, `top_logprobs` is null.
        offsets: Of its text.
    """
    return {
        "tokens": [_completion_text(score) for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [_top(score, num_top) for score in scores] if num_top else None,
        "text_offset": [offsets.take(score) for score in scores],
    }


def prompt_logprobs(scores: Sequence[ScoredToken], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token but the first its likeliest ones and itself, by token id."""
    return [
        None
        if score.logprob is None
        else {
            str(one.token_id): {"logprob": one.logprob, "decoded_token": _chat_text(one)}
            for one in (score, *score.top[:num_top])
        }
        for score in scores
    ]


def _chat_token(score: ScoredToken) -> dict[str, Any]:
    return {"token": _chat_text(score), "logprob": score.logprob, "bytes": list(score.data)}


def _chat_text(score: ScoredToken) -> str:
    """A token's text; where it is not whole characters, its bytes as OpenAI writes them: backslash, x, two digits."""
    try:
        return score.data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in score.data)


def _completion_text(score: ScoredToken) -> str:
    text = _chat_text(score)
    return f"bytes:{text}" if text.encode() != score.data else text


def _top(score: ScoredToken, num_top: int) -> dict[str, float | None] | None:
    if score.logprob is None:
        return None
    told: dict[str, float | None] = {}
    for one in (*score.top[:num_top], score):
        # Of tokens with the same text, the likeliest is told.
        told.setdefault(_completion_text(one), one.logprob)
    return told
