"""`Child`: a process in a session of its own, ended with all it started; `Peer`: one that answers questions."""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import psutil

from tests.bench.peers.protocol import Names

ROOT = Path(__file__).parents[3]
TAIL = 1500
"""Characters of a failed process's log that are shown."""

PR_SET_PDEATHSIG = 1
"""From Linux' prctl.h."""

LIBC = ctypes.CDLL(None)

C = TypeVar("C", bound="Child")


class PeerFailed(RuntimeError):
    """A compared system did not answer, or answered with an error; the message names it."""


class Child:
    """A running process whose output goes to a log; ended when the `with` block ends.

    Args:
        name: For messages.
        command: What to run.
        environment: Variables to set beside this process's own.
        cores: The cores that it and all it starts may use.
        log: Where it prints to.
        folder: Where it runs.
        grace_s: How long it may take to end by itself.
        pipes: Whether it is spoken to: its standard input and output are then pipes, and not part of the log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        cores: Sequence[int],
        log: Path,
        folder: Path = ROOT,
        grace_s: float = 15,
        pipes: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        self._grace_s = grace_s
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, cwd=folder, start_new_session=True, stderr=output,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL, stdout=subprocess.PIPE if pipes else output,
                preexec_fn=lambda: _settle(cores, signal.SIGCONT if pipes else signal.SIGTERM),
            )  # fmt: skip

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def pause(self) -> None:
        """Stop it and what it has started: waiting, too, can take processor time."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Ask it to end."""
        self.process.terminate()

    def close(self) -> None:
        """End it and everything it started; returns when they are gone."""
        self.resume()
        started = self._descendants()
        for pipe in (self.process.stdin, self.process.stdout):
            # What is still to be read by a process that is gone cannot be written.
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self._grace_s)
        left = psutil.wait_procs([*started, *self._descendants()], timeout=5)[1]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()

    def failed(self, what: str) -> PeerFailed:
        """The error that says so, with the end of its log."""
        return PeerFailed(f"{self.name}: {what}; its log ends: {self.log.read_text(errors='replace')[-TAIL:].strip()}")

    def resident_bytes(self) -> int:
        """Memory that it and all it started hold."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(self.process.pid), *self._descendants()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += process.memory_info().rss
        return total

    def busy_s(self) -> float:
        """Processor time that it and all that it has started have had."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(self.process.pid), *self._descendants()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def _signal(self, number: signal.Signals) -> None:
        # Its group bears its id for as long as it has not been waited for.
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


class Answered(NamedTuple):
    """A batch's answers.

    Attributes:
        tokens: Of each row.
        wall_s: What they took.
        together_tok_s: Tokens per second of all rows, from when each had its first; None where that cannot be seen.
    """

    tokens: list[list[int]]
    wall_s: float
    together_tok_s: float | None


class Peer(Child):
    """A process that speaks `tests.bench.peers.protocol`, from when it was told its settings."""

    def __init__(self, name: str, command: Sequence[str], settings: Mapping[str, Any], **options: Any) -> None:
        super().__init__(name, command, pipes=True, **options)
        self._unread = b""
        self._tell(settings)

    def end(self) -> None:
        """The end of its standard input has told it to; one that still computes is told more plainly."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        super().end()

    def wait_until_ready(self, timeout_s: float) -> dict[str, str]:
        """Returns the versions of its packages. Raises PeerFailed."""
        versions: dict[str, str] = self._answer(timeout_s)["ready"]
        return versions

    def generate(self, prompts: Sequence[list[int]], names: Names, num_tokens: int, timeout_s: float = 900) -> Answered:
        """Greedy answers of `num_tokens` tokens each. Raises PeerFailed."""
        self._tell({"do": "generate", "prompts": prompts, "names": names, "num_tokens": num_tokens})
        answer = self._answer(timeout_s)
        if [len(tokens) for tokens in answer["tokens"]] != [num_tokens] * len(prompts):
            raise self.failed(f"asked {len(prompts)} times for {num_tokens} tokens, it answered otherwise")
        return Answered(**answer)

    def margin(self, prompt: list[int], name: str | None) -> float:
        """How far apart the two likeliest next tokens are, in logits. Raises PeerFailed."""
        self._tell({"do": "margin", "prompt": prompt, "name": name})
        margin: float = self._answer(60)["margin"]
        return margin

    def _tell(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None, "it is a pipe"
        # One that is gone shows in the answer.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None, "it is a pipe"
        pipe, deadline = self.process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                # What comes too late would be taken for the next answer.
                self._signal(signal.SIGKILL)
                raise self.failed(f"no answer within {timeout_s:g} s")
            read = os.read(pipe, 1 << 16)
            if not read:
                raise self.failed(f"it ended with status {self.process.wait()}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self.failed(f"it answered {answer['error']}")
        return answer


def _settle(cores: Sequence[int], at_end: signal.Signals) -> None:
    """Run in the child: it keeps to its cores, and gets a signal when this process ends without having closed it.

    One that is spoken to then finds the end of its input, if it is woken up.
    """
    os.sched_setaffinity(0, cores)
    LIBC.prctl(PR_SET_PDEATHSIG, at_end)
