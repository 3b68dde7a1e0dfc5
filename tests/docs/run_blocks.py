"""Runs the blocks of a page, one after another, as a reader who pastes them would."""

import doctest
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.docs.fences import ROOT, Fence

WRITTEN_URL = "http://127.0.0.1:8000"
"""Where the pages find the server."""

TIMEOUT_S = 300.0


class Reader(NamedTuple):
    """Whoever follows a page.

    Attributes:
        environment: What is set in the reader's shell.
        url: Where the server is in truth.
        folder: Where the reader is.
    """

    environment: Mapping[str, str]
    url: str = WRITTEN_URL
    folder: Path = ROOT

    @classmethod
    def beside(cls, url: str, ray_address: str) -> "Reader":
        """Somebody in the project's folder and environment, with a server and the cluster it runs on."""
        scripts = Path(sys.executable).parent
        environment = {
            **os.environ,
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "LORA_FLEET_URL": url,
            "RAY_ADDRESS": ray_address,
            # Its `.curlrc` lets curl fail where the server refuses.
            "CURL_HOME": str(Path(__file__).parent),
            # A table is as wide as in a terminal.
            "COLUMNS": "120",
        }
        return cls(environment, url)

    def follow(self, fence: Fence) -> str | None:
        """Do what a block says, and return what went wrong, if anything did.

        Blocks of commands stop at the first that fails.
        """
        text = fence.text.replace(WRITTEN_URL, self.url)
        if fence.kind == "sh":
            return self._fault(["bash", "-euo", "pipefail", "-c", text])
        if fence.kind == "python":
            return self._fault([sys.executable, "-c", text])
        faults = [self._console_fault(command, expected) for command, expected in console_steps(text)]
        return "\n".join(fault for fault in faults if fault) or None

    def _console_fault(self, command: str, expected: str) -> str | None:
        done = self._run(["bash", "-euo", "pipefail", "-c", f"{command} 2>&1"])
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if doctest.OutputChecker().check_output(expected, done.stdout, options):
            return None
        return f"$ {command}\nshould print\n{expected}\nand printed\n{done.stdout}"

    def _fault(self, command: list[str]) -> str | None:
        done = self._run(command)
        return None if done.returncode == 0 else f"status {done.returncode}:\n{done.stdout}\n{done.stderr}"

    def _run(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, cwd=self.folder, env=dict(self.environment), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip


def console_steps(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a block, each with what it should print."""
    for step in f"\n{text}".split("\n$ ")[1:]:
        lines = step.split("\n")
        length = 1
        while lines[length - 1].endswith("\\"):
            length += 1
        yield "\n".join(lines[:length]), "\n".join(lines[length:])


def is_run(fence: Fence) -> bool:
    """Whether a block is run beside a server."""
    return fence.kind in ("sh", "console", "python") and fence.is_plain
