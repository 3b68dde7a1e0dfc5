"""Another rank's process, as the first rank sees it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from lora_core import errors
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.errors import ConfigError, EngineDead
from lora_core.parallel.group import RankGroup
from lora_core.parallel.link import Link
from lora_core.parallel.rank_messages import Failed, RankMessage

R = TypeVar("R")

PROJECT_ROOT = Path(__file__).resolve().parents[2]

STACK_S = 0.2
"""How long a process that hangs may take to write its stack."""

LAST_WORDS_S = 1.0
"""How long a process that has ended, or is about to, may take to say why."""


class RankSettings(msgspec.Struct, frozen=True):
    """What another rank's process is told first, as one line of JSON on its standard input."""

    rank: int
    link: int
    """The file descriptor of its end of the link."""
    rendezvous: int
    """The file descriptor by which ranks find each other, see `RankGroup`."""
    num_threads: int
    """Of torch, as many as the first rank has."""
    engine: dict[str, Any]
    """EngineConfig."""
    lora: dict[str, Any]
    """LoRAConfig."""


class RankProcess:
    """A running `python -m lora_core.parallel.follower`. It ends with this process, whose standard error it shares."""

    def __init__(self, rank: int, engine_config: EngineConfig, lora_config: LoRAConfig, rendezvous: int) -> None:
        """Start it; see `RankSettings`."""
        self.rank = rank
        self._timeout_s = engine_config.rank_timeout_s
        self._link, other_end = Link.pair()
        self._group: RankGroup | None = None
        self._is_gone = threading.Event()
        settings = RankSettings(
            rank=rank,
            link=other_end.fileno(),
            rendezvous=rendezvous,
            num_threads=torch.get_num_threads(),
            engine=engine_config.model_dump(mode="json"),
            lora=lora_config.model_dump(mode="json"),
        )
        path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")]))
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lora_core.parallel.follower"],
                stdin=subprocess.PIPE,
                pass_fds=[other_end.fileno(), rendezvous],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(settings.num_threads)},
            )
        self._watch = threading.Thread(target=self._wait, name=f"rank-{rank}-exit", daemon=True)
        self._watch.start()
        assert self._process.stdin is not None, "a pipe"
        # One that is gone already shows in `expect`.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
            self._process.stdin.flush()

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""
        return self._is_gone.is_set()

    def join(self, group: RankGroup) -> None:
        """Take note of the connections that are to be given up when it ends."""
        self._group = group

    def tell(self, message: RankMessage, payload: Any = b"") -> None:
        """Send it a message; see `Link.send`.

        Raises:
            EngineDead: it is gone, or did not take it within `rank_timeout_s`.
        """
        try:
            self._link.send(message, payload, self._timeout_s)
        except OSError as error:
            raise EngineDead(f"{self.name} does not take what it is told: {error}") from error

    def expect(self, kind: type[R], timeout_s: float) -> R:
        """Wait for its answer, of one kind.

        Raises:
            ConfigError: it cannot work with this configuration.
            EngineDead: it failed otherwise, or is gone, or did not answer in time.
        """
        try:
            received = self._link.receive(timeout_s)
        except TimeoutError:
            raise EngineDead(f"{self.name} has not answered for {timeout_s:g} s") from None
        if received is None:
            raise EngineDead(self.fault() or f"{self.name} has closed its connections")
        message, _ = received
        if isinstance(message, Failed):
            raise self._failure(message)
        assert isinstance(message, kind), f"{self.name} said {message}, expected {kind.__name__}"
        return message

    @property
    def name(self) -> str:
        """What it is called in sentences."""
        return f"rank {self.rank} (process {self._process.pid})"

    def failure(self) -> ConfigError | EngineDead | None:
        """What it has said of why it ends, if it has."""
        with contextlib.suppress(OSError):
            while (received := self._link.receive(LAST_WORDS_S)) is not None:
                if isinstance(received[0], Failed):
                    return self._failure(received[0])
        return None

    def fault(self) -> str | None:
        """Why it has ended, in a sentence; None if it goes on, as far as is known after a moment."""
        # Its last words come before its end is known.
        if (failure := self.failure()) is not None:
            return str(failure)
        if not self._is_gone.wait(LAST_WORDS_S):
            return None
        code = self._process.returncode
        if code >= 0:
            return f"{self.name} exited with status {code}"
        memory = " (often the system, short of memory)" if code == -signal.SIGKILL else ""
        return f"{self.name} was killed by signal {-code}, {signal.strsignal(-code)}{memory}"

    def write_stack(self) -> None:
        """Have it write where it is to its standard error, if it still can."""
        if not self.is_gone:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(STACK_S)

    def end(self) -> None:
        """End it, and return when it is gone."""
        self._process.kill()
        self._process.wait()
        self._watch.join()
        self._link.close()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _failure(self, failed: Failed) -> ConfigError | EngineDead:
        kind = getattr(errors, failed.kind, None)
        if isinstance(kind, type) and issubclass(kind, ConfigError):
            return kind(failed.reason)
        return EngineDead(f"{self.name} failed: {failed.kind}: {failed.reason}")

    def _wait(self) -> None:
        self._process.wait()
        self._is_gone.set()
        if self._group is not None:
            self._group.abort()
