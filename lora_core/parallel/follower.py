"""A rank that follows the first one: `python -m lora_core.parallel.follower`, started by `RankProcess`.

It reads one JSON line from its standard input (`RankSettings`), loads its share of the model, and does what it is told
over its link until the first rank is gone. A fault ends it, with its reason as its last word (`Failed`).
"""

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import torch

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.errors import LoRAFleetError
from lora_core.inputs import NUM_ROUTING_INPUTS
from lora_core.parallel.group import RankGroup
from lora_core.parallel.link import Link
from lora_core.parallel.rank_messages import Call, Done, Failed, MarkLive, Ready, RunStep, Started, WriteSlot
from lora_core.parallel.rank_process import LAST_WORDS_S, RankSettings
from lora_core.parallel.remote_stacks import make_remote_moves
from lora_core.parallel.shard import Shard
from lora_core.parallel.step_wire import StepListener

if TYPE_CHECKING:
    from lora_core.engine.runner import ModelRunner

logger = logging.getLogger("rank")

PR_SET_PDEATHSIG = 1
"""From Linux' prctl.h."""


class Follower:
    """Does what the first rank tells; for one thread."""

    def __init__(self, runner: "ModelRunner", link: Link) -> None:
        self._runner = runner
        self._link = link
        self._listener = StepListener()
        self._stacks = runner.manager.input_buffers()[NUM_ROUTING_INPUTS:]

    def run(self) -> None:
        """Go on until the first rank is gone. What a step raises passes through."""
        while (received := self._link.receive()) is not None:
            message, payload = received
            match message:
                case RunStep():
                    self._runner.execute(self._listener.step(message))
                case WriteSlot():
                    with torch.no_grad():
                        make_remote_moves(message.moves, payload, self._stacks)
                case MarkLive():
                    self._runner.manager.mark_slot(message.slot, set(message.sites), set(message.gain_sites))
                case Call():
                    getattr(self._runner, message.method)()
                    self._link.send(Done())
                case _:
                    raise AssertionError(f"{message} is not for a rank that has begun")


def main() -> int:
    """Run the process; returns its exit status."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    settings = msgspec.json.decode(line, type=RankSettings)
    _prepare_process(settings.rank)
    threading.Thread(target=_end_with_input, name="first-rank-watch", daemon=True).start()
    link = Link(socket.socket(fileno=settings.link))
    try:
        _follow(settings, link)
    except Exception as error:
        if isinstance(error, LoRAFleetError):
            logger.error("rank %d: %s: %s", settings.rank, type(error).__name__, error)
        else:
            logger.exception("rank %d failed", settings.rank)
        # Which may be gone.
        with suppress(OSError):
            link.send(Failed(type(error).__name__, str(error)), timeout_s=LAST_WORDS_S)
        return 1
    return 0


def _follow(settings: RankSettings, link: Link) -> None:
    # Here, so that a failing import is a fault that can be told; and before the others are let wait.
    from lora_core.engine.runner import ModelRunner, rank_device

    torch.set_num_threads(settings.num_threads)
    engine_config, lora_config = EngineConfig(**settings.engine), LoRAConfig(**settings.lora)
    device = rank_device(engine_config.device, settings.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    link.send(Started())
    if link.receive() is None:
        return
    shard = Shard(settings.rank, engine_config.tensor_parallel_size)
    group = RankGroup(shard, settings.rendezvous, device, engine_config.rank_timeout_s)
    runner = ModelRunner(engine_config, lora_config, group=group)
    follower = Follower(runner, link)
    # What is there now stays: collections during steps need not look at it again.
    gc.collect()
    gc.freeze()
    link.send(Ready(runner.num_blocks))
    follower.run()


def _prepare_process(rank: int) -> None:
    line = f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=line, stream=sys.stderr)
    # The first rank's process decides when this one ends; an interrupt from the keyboard reaches all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A process that is stopped cannot see the other end: it is then woken up. Linux only, as is /proc below.
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    with suppress(OSError):
        Path("/proc/self/comm").write_text("lora-rank")


def _end_with_input() -> NoReturn:
    """Wait for the end of standard input, which the first rank's process holds open; then end at once."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Not sys.exit: a thread in the middle of a kernel must not delay it.
    os._exit(status)
