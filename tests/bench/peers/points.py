"""The batches that systems are compared on, and what was measured of them."""

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.bench.peers.protocol import Names

PROMPT_TOKENS, LONG_PROMPT_TOKENS = 128, 512
NEW_TOKENS = 96


@dataclass(frozen=True)
class Point:
    """One batch.

    Attributes:
        batch: Its rows; over HTTP, requests at once.
        adapters: Adapters that its rows are spread over.
        base_rows: Rows, the last ones, that have none although others do.
        prompt_tokens: Length of every prompt.
        new_tokens: Length of every answer.
        vocab: Prompts are of token ids below this.
    """

    batch: int
    adapters: int
    base_rows: int = 0
    prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int = NEW_TOKENS
    vocab: int = 40_000

    def __str__(self) -> str:
        mixed = f"+{self.base_rows}" if self.is_mixed else ""
        return f"{self.batch}x{self.adapters}{mixed}x{self.prompt_tokens}"

    def matches(self, names: Collection[str]) -> bool:
        """Whether it is one of them, which may leave the usual prompt length out."""
        return str(self) in names or (
            self.prompt_tokens == PROMPT_TOKENS and str(self).removesuffix(f"x{PROMPT_TOKENS}") in names
        )

    @property
    def names(self) -> Names:
        """The adapter of each row."""
        with_adapter = self.batch - self.base_rows if self.adapters else 0
        return [f"a{row % self.adapters}" if row < with_adapter else None for row in range(self.batch)]

    @property
    def is_mixed(self) -> bool:
        """Whether some rows have an adapter and others none."""
        return bool(self.base_rows)

    def prompts(self) -> list[list[int]]:
        """A prompt of its own for each row, of ordinary tokens."""
        generator = torch.Generator().manual_seed(self.batch)
        size = (self.batch, self.prompt_tokens)
        rows: list[list[int]] = torch.randint(min(100, self.vocab // 2), self.vocab, size, generator=generator).tolist()
        return rows

    def base(self) -> "Point":
        """The same rows, all of the base model."""
        return replace(self, adapters=0, base_rows=0)

    def figures(self) -> dict[str, Any]:
        """What names the point in its line."""
        return {
            "batch": self.batch,
            "adapters": self.adapters,
            "base_rows": self.base_rows,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
        }


def all_points() -> Iterator[Point]:
    """Base only, then with adapters."""
    for batch in (1, 8, 32):
        yield Point(batch, 0)
    for batch in (8, 32):
        yield Point(batch, 0, prompt_tokens=LONG_PROMPT_TOKENS)
    for batch in (1, 8, 32):
        for adapters in (1, 4, 8):
            if adapters <= batch:
                yield Point(batch, adapters)
    yield Point(8, 4, base_rows=4)
    yield Point(32, 8, base_rows=16)


def quick_points() -> Iterator[Point]:
    """One of each kind."""
    yield Point(8, 0)
    yield Point(8, 8)
    yield Point(8, 4, base_rows=4)


class Results:
    """The lines of a run, printed as they come.

    Attributes:
        lines: All of them.
    """

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def add(self, **line: Any) -> None:
        """Print a line, with the machine's load of the last minute."""
        rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in line.items()}
        self.lines.append({**rounded, "machine_load": round(os.getloadavg()[0], 2)})
        print(json.dumps(self.lines[-1]), flush=True)

    def find(self, system: str, **fields: Any) -> dict[str, Any] | None:
        """The last measured line of a system in which all fields are these."""
        asked: dict[str, Any] = {"base_rows": 0, "transport": None, "beside": None, **fields, "system": system}
        for line in self.lines[::-1]:
            if "wall_s" in line and all(line.get(name) == value for name, value in asked.items()):
                return line
        return None
