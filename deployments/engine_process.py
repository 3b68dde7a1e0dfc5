"""The engine process: `python -m deployments.engine_process`, started by `deployments.engine_client`.

It reads one JSON line from its standard input: `zmq_endpoint_base`, `engine` (EngineConfig), `lora` (LoRAConfig). Then
it loads the model, says `EngineReady`, and steps until it is told to end (SIGTERM), its parent is gone (end of its
standard input), or a fault stops it (`EngineFailed`, exit status 1).
"""

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from deployments.socket_folder import remove_sockets
from lora_core.channel import (
    REQUEST_ENDPOINT,
    RESPONSE_ENDPOINT,
    LoRARequestProcessor,
    MessageReceiver,
    MessageSender,
    endpoint,
)
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.errors import LoRAFleetError
from lora_core.messages import (
    AbortRequest,
    EngineFailed,
    EngineRequest,
    GenerateRequest,
    ProtectAdapters,
    ResetAdapter,
    StepOutput,
    TokenDelta,
)
from lora_core.workload import SlotCounts

if TYPE_CHECKING:
    from lora_core.engine.engine import LLMEngine

logger = logging.getLogger("engine")

HEARTBEAT_S = 0.5
"""Longest silence of an engine that can step."""

WORKLOAD_S = 0.5
"""How often an engine that has something to do, or has just done it, tells what."""

CHECKED_AFTER_S = 1.0
"""How long an engine has had nothing to do before its books are checked. That takes some ten milliseconds where there
are many KV blocks, and is seldom in anybody's way then."""

SHORTEST_WAIT_MS, LONGEST_WAIT_MS = 1, 10
"""An idle engine's wait for a generation request before it looks at the adapter channel again: the shortest after an
adapter operation, which seldom comes alone, then twice as long each time. At 10 ms looking takes 1 % of a core."""

PR_SET_PDEATHSIG = 1
"""From Linux' prctl.h."""


class EngineLoop:
    """Moves messages in and out of an engine, between its steps."""

    def __init__(
        self,
        engine: "LLMEngine",
        requests: MessageReceiver[EngineRequest],
        adapter_requests: LoRARequestProcessor,
        events: MessageSender,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._adapter_requests = adapter_requests
        self._events = events
        self._num_steps = 0
        self._spoke_at = time.monotonic()
        self._accounted_at = self._spoke_at
        self._had_work = False
        self._worked_at = self._spoke_at
        self._is_checked = False
        self._slots_told = SlotCounts()
        # So that nobody counts on a slot that is about to change.
        engine.manager.before_write = self._tell_residency
        self._wait_ms = SHORTEST_WAIT_MS

    def run(self) -> NoReturn:
        """Turn for ever. What an engine's step raises passes through, and what its books lack when it has rested."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take what has come, step once if there is work (or wait a little if there is none), and tell the outcome."""
        self._engine.check_ranks()
        for message in self._requests.poll(0 if self._engine.has_work() else self._wait_ms):
            self._take(message)
        did_something = self._adapter_requests.process_lora_requests()
        self._wait_ms = SHORTEST_WAIT_MS if did_something else min(2 * self._wait_ms, LONGEST_WAIT_MS)
        deltas: list[TokenDelta] = []
        if self._engine.has_work():
            deltas = self._engine.step()
            self._num_steps += 1
            self._worked_at, self._is_checked = time.monotonic(), False
        elif not self._is_checked and time.monotonic() - self._worked_at >= CHECKED_AFTER_S:
            # Of blocks, pins or uses that are lost there would be fewer every day. Now there is nobody to disturb.
            self._engine.check_invariants()
            self._is_checked = True
        # Residency first, so that whoever reads an answer's last token already knows which slots it used.
        self._tell_residency()
        if deltas or time.monotonic() - self._spoke_at >= HEARTBEAT_S:
            self._events.send(StepOutput(self._num_steps, deltas, self._engine.num_running, self._engine.num_waiting))
            self._spoke_at = time.monotonic()
        self._tell_workload()

    def _take(self, message: EngineRequest) -> None:
        match message:
            case GenerateRequest():
                self._engine.add_request(message)
            case AbortRequest():
                self._engine.abort(message.request_id)
            case ProtectAdapters():
                self._engine.manager.protect_adapters(message.names)
            case ResetAdapter():
                self._engine.reset_adapter(message.name, message.reason)

    def _tell_residency(self) -> None:
        residency = self._engine.manager.next_residency()
        if residency is not None:
            self._events.send(residency)

    def _tell_workload(self) -> None:
        now = time.monotonic()
        if now - self._accounted_at < WORKLOAD_S:
            return
        self._accounted_at = now
        workload = self._engine.workload()
        # Once more when there is nothing left, so that nobody takes the last requests for being there still.
        if workload.adapters or self._had_work or workload.slots != self._slots_told:
            self._events.send(workload)
        self._had_work, self._slots_told = bool(workload.adapters), workload.slots


def main() -> int:
    """Run the engine process; returns its exit status."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    settings: dict[str, Any] = msgspec.json.decode(line)
    base: str = settings["zmq_endpoint_base"]
    _prepare_process(base)
    threading.Thread(target=_end_with_parent, args=(base,), name="parent-watch", daemon=True).start()
    events = MessageSender(endpoint(base, RESPONSE_ENDPOINT), bind=False)
    try:
        _serve(base, EngineConfig(**settings["engine"]), LoRAConfig(**settings["lora"]), events)
    except Exception as error:
        if isinstance(error, LoRAFleetError):
            logger.error("%s: %s", type(error).__name__, error)
        else:
            logger.exception("the engine failed")
        events.send(EngineFailed(f"{type(error).__name__}: {error}"))
        events.close()
        return 1


def _serve(base: str, engine_config: EngineConfig, lora_config: LoRAConfig, events: MessageSender) -> NoReturn:
    requests: MessageReceiver[EngineRequest] = MessageReceiver(
        endpoint(base, REQUEST_ENDPOINT), EngineRequest, bind=False
    )
    # Here, so that a failing import is a fault that can be told.
    import torch

    from lora_core.engine.engine import LLMEngine
    from lora_core.engine.warm_up import logged_progress

    if engine_config.tensor_parallel_size > 1:
        # Read by NCCL when it starts, here and in the other ranks, which are on this machine.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if engine_config.num_threads is not None:
        torch.set_num_threads(engine_config.num_threads)
    elif engine_config.tensor_parallel_size > 1:
        # The ranks of a model on the CPU share its cores; each has as many threads as this one.
        torch.set_num_threads(max(1, torch.get_num_threads() // engine_config.tensor_parallel_size))
    start = time.monotonic()
    engine = LLMEngine(engine_config, lora_config)
    loaded = time.monotonic()
    engine.warm_up(logged_progress(logger))
    logger.info(
        "loaded %s in %.1f s, warmed up in %.1f s", engine_config.model, loaded - start, time.monotonic() - loaded
    )
    adapter_requests = LoRARequestProcessor(engine.manager, base)
    # What is there now stays: collections during steps need not look at it again.
    gc.collect()
    gc.freeze()
    events.send(engine.ready())
    EngineLoop(engine, requests, adapter_requests, events).run()


def _prepare_process(base: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # The parent decides when this process ends; an interrupt from the keyboard reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end(*_: object) -> None:
        # Whoever ends this process may be ending its parent, too, which then has no time to.
        remove_sockets(base)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A process that is stopped cannot see its parent end: it is then woken up. Linux only, as is /proc below.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    # The name that ps and top show.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("lora-engine")


def _end_with_parent(base: str) -> NoReturn:
    """Wait for the end of standard input, which the parent holds open; then remove its sockets, and end."""
    while os.read(0, 4096):
        pass
    logger.warning("the parent process is gone; ending")
    remove_sockets(base)
    os._exit(1)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Not sys.exit: threads in the middle of a load or of a kernel must not delay it.
    os._exit(status)
