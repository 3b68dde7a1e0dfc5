"""The fenced blocks of the project's pages, as a Markdown parser finds them."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

KINDS = {
    "sh": "commands, run as they stand",
    "console": "commands behind `$ `, each followed by what it prints; `...` stands for anything",
    "python": "a whole program, run; `python excerpt=FILE`: lines of that file",
    "yaml": "a configuration, or a part of one, checked by the schema",
    "diff": "a change that the code has: its added lines stand in the file",
    "json": "JSON",
    "text": "what is neither run nor checked: output, layouts, formulas",
    "mermaid": "a diagram",
}
"""What the first word behind a fence may be, and what is done with such a block."""


class Fence(NamedTuple):
    """One fenced block.

    Attributes:
        page: Path of its page, from the project's root.
        line: Line of its first fence, from 1.
        kind: First word behind it.
        words: The others, each `word` or `key=value`.
        text: What stands in it.
    """

    page: str
    line: int
    kind: str
    words: tuple[str, ...]
    text: str

    @property
    def place(self) -> str:
        """`docs/adapters.md:12`."""
        return f"{self.page}:{self.line}"

    @property
    def is_plain(self) -> bool:
        """Whether nothing behind the fence says that it is not what it seems."""
        return not self.words


def fences(page: Path) -> Iterator[Fence]:
    """The fenced blocks of a page, in their order."""
    for token in parsed(page):
        if token.type == "fence":
            kind, *words = token.info.split() or [""]
            yield Fence(_name(page), _line(token), kind, tuple(words), token.content)


def indented_blocks(page: Path) -> list[str]:
    """Places of blocks that are code by their indentation alone, which say nothing of what they are."""
    return [f"{_name(page)}:{_line(token)}" for token in parsed(page) if token.type == "code_block"]


def links(page: Path) -> Iterator[str]:
    """Where the page's links and images lead."""
    for token in parsed(page):
        for inner in token.children or ():
            for name in ("href", "src"):
                if (target := inner.attrGet(name)) is not None:
                    yield str(target)


def headings(page: Path) -> set[str]:
    """The names under which the page's headings are linked to."""
    tokens = parsed(page)
    texts = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    kept = ("".join(letter for letter in text.lower() if letter.isalnum() or letter in " -_") for text in texts)
    return {text.replace(" ", "-") for text in kept}


def parsed(page: Path) -> list[Token]:
    """The page's blocks, those within lists and quotations too."""
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def every_fence() -> list[Fence]:
    """Those of all pages."""
    return [fence for page in PAGES for fence in fences(page)]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _line(token: Token) -> int:
    assert token.map is not None, "blocks know their lines"
    return token.map[0] + 1
