"""What a compared system's process and the benchmark say to each other: a JSON line each way, over the process's pipes.

The first line the process reads is its settings, and it answers `{"ready": {package: version}}` when it can be asked.
After that each line is a question, answered by one line:

    {"do": "generate", "prompts": [[1, 2]], "names": ["a0"], "num_tokens": 2}  ->  {"tokens": [[4, 5]], "wall_s": 0.1}
    {"do": "margin", "prompt": [1, 2], "name": null}                           ->  {"margin": 0.5}

What goes wrong is answered by `{"error": "..."}`. The end of its standard input ends the process. Only Python's
standard library is needed here: some of the processes run in an environment that has none of this project's packages.
"""

import importlib.metadata
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Names = Sequence[str | None]
"""The adapter of each row; None is the base model."""


class System(Protocol):
    """What can be asked for answers."""

    def generate(self, prompts: Sequence[list[int]], names: Names, num_tokens: int) -> list[list[int]]:
        """Greedy answers of exactly `num_tokens` tokens, all rows in one batch."""
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
    tokens = system.generate(question["prompts"], question["names"], question["num_tokens"])
    return {"tokens": tokens, "wall_s": time.perf_counter() - began}
