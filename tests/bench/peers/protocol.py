"""What a compared system's process and the benchmark say to each other: a JSON line each way, over the process's pipes.

The first line the process reads is its settings, and it answers `{"ready": {package: version}}` when it can be asked.
After that each line is a question, answered by one line:

    {"do": "generate", "prompts": [[1, 2]], "names": ["a0"], "num_tokens": 2}
        ->  {"tokens": [[4, 5]], "wall_s": 0.1, "together_tok_s": 20.0}
    {"do": "margin", "prompt": [1, 2], "name": null}
        ->  {"margin": 0.5}

What goes wrong is answered by `{"error": "..."}`. The end of its standard input ends the process. Only Python's
standard library is needed here: some of the processes run in an environment that has none of this project's packages.
"""

import importlib.metadata
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

Names = Sequence[str | None]
"""The adapter of each row; None is the base model."""

Generated = tuple[list[list[int]], float | None]
"""The tokens of each row, and tokens per second of all from when each had its first (`Answers.together_tok_s`)."""


class Answers:
    """What the steps of an engine give to the rows of a batch, and how fast once every row has its first token."""

    def __init__(self, num_rows: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self._num_waiting = num_rows
        self._num_together = 0
        self._together_s = self._last_s = 0.0

    def add(self, step: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Take the tokens that one step has given to rows, as soon as it has."""
        now_s = time.perf_counter()
        is_together, num_tokens = not self._num_waiting, 0
        for row, tokens in step:
            self._num_waiting -= bool(tokens) and not self.tokens[row]
            self.tokens[row] += tokens
            num_tokens += len(tokens)
        if is_together:
            self._num_together += num_tokens
            self._together_s += now_s - self._last_s
        self._last_s = now_s

    @property
    def together_tok_s(self) -> float | None:
        """Tokens per second of all rows, from when each had its first; None where there were none."""
        return self._num_together / self._together_s if self._num_together else None


class System(Protocol):
    """What can be asked for answers."""

    def generate(self, prompts: Sequence[list[int]], names: Names, num_tokens: int) -> Generated:
        """Greedy answers of exactly `num_tokens` tokens, all rows in one batch; no rate where steps cannot be seen."""
        ...

    def margin(self, prompt: list[int], name: str | None) -> float:
        """How far apart the two likeliest next tokens are, in logits; only the reference is asked."""
        ...


def serve(start: Callable[[Mapping[str, Any]], System], packages: Sequence[str]) -> int:
    """Answer until standard input ends; returns the process's exit status.

    Args:
        start: Makes the system from its settings.
        packages: Those whose versions are told.
    """
    # Libraries print to standard output, which belongs to the answers here.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        system = start(json.loads(sys.stdin.readline()))
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {error}"})
        raise
    tell({"ready": {name: importlib.metadata.version(name) for name in packages}})
    for line in sys.stdin:
        try:
            tell(_answer(system, json.loads(line)))
        except Exception as error:
            tell({"error": f"{type(error).__name__}: {error}"})
    # What it has started may be paused together with it, by one who is gone.
    os.killpg(0, signal.SIGCONT)
    return 0


def _answer(system: System, question: Mapping[str, Any]) -> dict[str, Any]:
    if question["do"] == "margin":
        return {"margin": system.margin(question["prompt"], question["name"])}
    began = time.perf_counter()
    tokens, rate = system.generate(question["prompts"], question["names"], question["num_tokens"])
    return {"tokens": tokens, "wall_s": time.perf_counter() - began, "together_tok_s": rate}
