"""`ChildProcess`: a Python module run as a process of its own, from an event loop, and never left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path

LINES_KEPT = 20
"""Last lines of the child's standard error, kept to say why it ended."""

PROJECT_ROOT = Path(__file__).resolve().parent.parent


class ChildProcess:
    """A running `python -m module`. Needs a running event loop.

    The child gets one line on its standard input, which then stays open for as long as this process lives: a child
    that reads on learns of its parent's end however it comes. Its standard error is passed on as it is written.

    Threads wait for it, not the loop's child watcher, so that this works on any thread's loop and with any loop.

    Args:
        module: Name of the module to run; found where this project is, wherever the caller works.
        first_line: What it is told, without the line's end.
        environment: Variables to set beside this process's own.
    """

    def __init__(self, module: str, first_line: bytes, environment: Mapping[str, str] | None = None) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """Its exit status, negative for the signal that killed it."""
        path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )
        relay = threading.Thread(target=self._relay_stderr, name="child-stderr", daemon=True)
        relay.start()
        threading.Thread(target=self._wait, args=(relay,), name="child-exit", daemon=True).start()
        stdin = self._process.stdin
        assert stdin is not None
        # A child that is gone already shows in `exited`.
        with contextlib.suppress(BrokenPipeError):
            stdin.write(first_line + b"\n")
            stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_reason(self) -> str:
        """How it ended, in words, with the last lines it wrote."""
        code = self.exited.result()
        how = f"exited with status {code}" if code >= 0 else f"was killed by signal {-code}, {signal.strsignal(-code)}"
        if code == -signal.SIGKILL:
            how += " (often the system, short of memory)"
        return f"{how}; its last lines: {' | '.join(self._lines)}" if self._lines else how

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens if it has ended."""
        self._process.send_signal(number)

    async def stop(self, grace_s: float) -> None:
        """End it: by SIGTERM, and by SIGKILL if that takes longer than `grace_s`. Returns when it is gone."""
        self.signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self.exited}, timeout=grace_s)
        if not done:
            self.signal(signal.SIGKILL)
        await asyncio.wait({self.exited})
        self._close_stdin()

    def kill(self) -> None:
        """End it now, without waiting; needs no event loop."""
        self.signal(signal.SIGKILL)
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _relay_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            for line in stderr:
                # Not through sys.stderr: its lock, held by this thread while the interpreter ends, would abort it.
                with contextlib.suppress(OSError):
                    os.write(2, line)
                self._lines.append(line.decode(errors="replace").rstrip())

    def _wait(self, relay: threading.Thread) -> None:
        code = self._process.wait()
        # Its last words are on their way; a grandchild that still holds the pipe must not delay the news.
        relay.join(0.2)
        # The loop may have ended first.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_exited, code)

    def _set_exited(self, code: int) -> None:
        if not self.exited.done():
            self.exited.set_result(code)
