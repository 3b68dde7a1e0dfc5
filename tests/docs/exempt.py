"""Commands in the pages that are not run with the others, each with the reason."""

import re
import shlex
import subprocess
from collections.abc import Iterator

from tests.docs.fences import ROOT, Fence

REASONS = {
    "quickstart": "`make quickstart` runs it, as it follows that page from a fresh clone",
    "serve": "starts a server that runs until it is stopped",
    "follow": "runs until it is stopped",
    "tests": "runs tests, all of which `make test` runs",
    "long": "takes minutes, or downloads gigabytes",
    "gpu": "needs a GPU",
    "cluster": "needs a cluster of several machines, or Kubernetes",
}
"""The word behind `sh` that says why a block's commands are not run. They are parsed, and what they name exists."""

MOST = 20
"""Blocks. With more of them, some should be run after all."""

_MAKE = re.compile(r"\bmake ((?:[a-z0-9-]+ ?)+)")
_OURS = re.compile(r"(?<![\w/.:=-])((?:tests|cluster|docs|kernels|deployments|lora_core)(?:/[\w.-]+)+|tests(?:\.\w+)+)")


def reason(fence: Fence) -> str | None:
    """Why a block is not run; None: it is."""
    return REASONS[fence.words[0]] if fence.kind == "sh" and fence.words else None


def faults(fence: Fence) -> Iterator[str]:
    """What is wrong with commands that are not run, as far as that can be told without running them."""
    parsed = subprocess.run(["bash", "-n"], input=fence.text, capture_output=True, text=True, check=False)
    if parsed.returncode != 0:
        yield parsed.stderr
        return
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for targets in _MAKE.findall(fence.text):
        yield from (f"no target {target}" for target in shlex.split(targets) if target not in known)
    for named in _OURS.findall(fence.text):
        path = ROOT / (named if "/" in named else named.replace(".", "/"))
        if not path.exists() and not path.with_suffix(".py").exists():
            yield f"no {named}"
