"""What is right: each adapter's answers, from a quiet run."""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

NUM_TOKENS = 160
"""Of the longest answer."""

PROMPTS: Sequence[list[int]] = [[(size * 31 + place * 17) % 128 for place in range(size)] for size in (3, 7, 12, 21)]


def completion(model: str, prompt: int, num_tokens: int, *, stream: bool = False) -> dict[str, Any]:
    """Body of a greedy completion of one of the prompts."""
    return {
        "model": model, "prompt": PROMPTS[prompt], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "stream": stream,
    }  # fmt: skip


def ask(http: httpx.Client, model: str, prompt: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """One answer's tokens."""
    answer = http.post("/v1/completions", json=completion(model, prompt, num_tokens))
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


class Truth:
    """Tokens by model and prompt, asked one at a time while nothing else runs.

    Args:
        http: Of the fleet.
        models: Names that are served now.
    """

    def __init__(self, http: httpx.Client, models: Sequence[str]) -> None:
        self._tokens = {model: [ask(http, model, prompt) for prompt in range(len(PROMPTS))] for model in models}
        distinct = {tuple(answers[0]) for answers in self._tokens.values()}
        assert len(distinct) == len(models), "two models answer alike, so that a mix-up would not show"

    @property
    def models(self) -> list[str]:
        """Names."""
        return list(self._tokens)

    def is_right(self, model: str, prompt: int, tokens: Sequence[int]) -> bool:
        """Whether an answer, or its beginning, is the model's."""
        return list(tokens) == self._tokens[model][prompt][: len(tokens)]


Desired = Mapping[str, str]
"""Name -> path of the adapters that should be served."""
