"""A compared system that takes no time to start: its next token is a sum. `fault` in its settings makes it go wrong."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.peers.protocol import Generated, Names, serve

VOCAB = 1000


def next_token(tokens: Sequence[int], name: str | None) -> int:
    """The token that follows, in every stand-in."""
    adapter = 0 if name is None else 1 + int(name.removeprefix("a"))
    return (tokens[-1] * 7 + len(tokens) * 3 + adapter * 101) % VOCAB


class StandIn:
    """Counts where others compute."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._fault = settings.get("fault")
        if self._fault == "no start":
            raise OSError("no room")
        if self._fault == "chatty":
            print("a library's greeting")
        self._step_s = settings.get("step_s", 0.0)

    def generate(self, prompts: Sequence[list[int]], names: Names, num_tokens: int) -> Generated:
        """The sums that follow each prompt, as if given one a second."""
        if self._fault == "hang":
            time.sleep(600)
        if self._fault == "refuse":
            raise ValueError("not this batch")
        if self._fault == "die":
            sys.exit(7)
        answers = []
        for prompt, name in zip(prompts, names, strict=True):
            tokens = list(prompt)
            for _ in range(num_tokens):
                tokens.append(next_token(tokens, name))
            answers.append(tokens[len(prompt) :])
        time.sleep(self._step_s * num_tokens)
        if self._fault == "wrong" and any(names):
            answers[-1][-1] += 1
        return (answers[:-1] if self._fault == "short" else answers), float(len(names))

    def margin(self, prompt: list[int], name: str | None) -> float:
        """Every token is the clear choice."""
        return 1.0


if __name__ == "__main__":
    sys.exit(serve(StandIn, ["psutil"]))
