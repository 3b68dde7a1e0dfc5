"""Processes that do a part each, side by side: one that hangs or spoils the device for itself spoils no other."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Line = dict[str, Any]


@dataclass
class Child:
    """A running part.

    Attributes:
        name: Of the part.
        deadline_s: When it is ended, in seconds of `time.monotonic`.
        lines: The JSON lines it has printed, in order.
        text: Everything else it has printed, errors included.
        status: Its exit status; None while it runs, and for one that was ended.
        is_late: Whether it was ended at its deadline.
    """

    name: str
    deadline_s: float
    lines: list[Line] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    status: int | None = None
    is_late: bool = False
    _process: "subprocess.Popen[str] | None" = None
    _reader: threading.Thread | None = None

    @property
    def fault(self) -> str | None:
        """Why it did not come to its end, with the last it said; None if it did."""
        if self.is_late:
            return f"{self.name}: not finished in its time: {self._last()}"
        return f"{self.name}: ended with status {self.status}: {self._last()}" if self.status else None

    def _last(self) -> str:
        return " | ".join(line for line in self.text[-6:] if line.strip()) or "it said nothing"

    def _read(self, on_line: Callable[[Line], None]) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for text in output:
                line = _parsed(text)
                if line is None:
                    self.text.append(text.rstrip("\n"))
                else:
                    self.lines.append(line)
                    on_line(line)

    def poll(self) -> bool:
        """Whether it is over; one past its deadline is ended."""
        assert self._process is not None
        if self._process.poll() is None:
            if time.monotonic() < self.deadline_s:
                return False
            self.is_late = True
            self.end()
        else:
            self.status = self._process.returncode
        assert self._reader is not None
        self._reader.join(timeout=5)
        return True

    def end(self) -> None:
        """End it, with all it started."""
        assert self._process is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def own_command(*arguments: str) -> list[str]:
    """The command line of a part of this program."""
    return [sys.executable, "-m", "tests.gpu", *arguments]


def start(
    name: str,
    command: Sequence[str],
    limit_s: float,
    on_line: Callable[[Line], None] = lambda line: None,
    environment: dict[str, str] | None = None,
) -> Child:
    """Start a part that may take `limit_s` seconds; `on_line` is called, on another thread, for each JSON line."""
    child = Child(name, time.monotonic() + limit_s)
    child._process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    child._reader = threading.Thread(target=child._read, args=(on_line,), daemon=True)
    child._reader.start()
    return child


def wait(children: Sequence[Child]) -> None:
    """Wait until all are over, each at its deadline at the latest; if the waiting is broken off, end them."""
    running = list(children)
    try:
        while running:
            running = [child for child in running if not child.poll()]
            if running:
                time.sleep(0.05)
    finally:
        for child in running:
            child.end()


def _parsed(text: str) -> Line | None:
    if not text.startswith("{"):
        return None
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
