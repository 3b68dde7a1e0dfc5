"""Blocks that show the project's own files: what they show is there."""

import re
from collections.abc import Iterator

from tests.docs.fences import ROOT, Fence

_FILE = re.compile(r"^\+\+\+ b/(.+)$", re.MULTILINE)


def excerpt_faults(fence: Fence) -> Iterator[str]:
    """Of a block that is an excerpt: the parts between its lines of `...` that its file does not have."""
    (path,) = [word.partition("=")[2] for word in fence.words if word.startswith("excerpt=")]
    content = (ROOT / path).read_text()
    for part in re.split(r"^ *\.\.\.\n", fence.text, flags=re.MULTILINE):
        if part.rstrip() not in content:
            yield f"{path} does not have:\n{part}"


def diff_faults(fence: Fence) -> Iterator[str]:
    """Of a change that was made: added lines that its file does not have."""
    pieces = _FILE.split(fence.text)
    for path, change in zip(pieces[1::2], pieces[2::2], strict=True):
        content = (ROOT / path).read_text()
        for line in change.splitlines():
            if line.startswith("+") and line[1:].strip() not in content:
                yield f"{path} does not have {line[1:].strip()!r}"
