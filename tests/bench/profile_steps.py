"""`make profile`: where the time of a step goes, phase by phase, on one CPU thread.

Prints one JSON line per point: decode steps of 1, 8 and 32 requests to the demo model, without adapters and with up to
eight all-linear ones. The requests come and the tokens leave over the engine process's own channel. A phase's time is
that of the processor, without the phases it calls:

- `schedule`: choosing the step's rows, and taking note of those that ran
- `routing`: sorting them by slot, and the tables of their adapters
- `metadata`: what each row attends to
- `inputs`: token ids and positions
- `forward`: the model, its head and its adapters
- `sampling`: choosing tokens
- `answers`: appending them, ending requests, and all else that is between steps
- `messaging`: receiving requests and sending tokens
"""

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import lora_core.engine.engine
import lora_core.engine.runner
from cluster.demo.base_model import prepare
from deployments.engine_process import EngineLoop
from lora_core.channel import (
    REQUEST_ENDPOINT,
    RESPONSE_ENDPOINT,
    LoRARequestProcessor,
    MessageReceiver,
    MessageSender,
    endpoint,
)
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.engine.kv_cache import KVCache
from lora_core.engine.runner import ModelRunner
from lora_core.engine.scheduler import Scheduler
from lora_core.manager import LoRAManagerV3
from lora_core.messages import EngineEvent, EngineRequest, GenerateRequest, SamplingParams, StepOutput
from lora_core.models.decoder import Decoder
from tests.bench.result import report, require
from tests.factories import LINEAR_TARGETS, make_adapter

PHASES = ("schedule", "routing", "metadata", "inputs", "forward", "sampling", "answers", "messaging")
FUNCTIONS: tuple[tuple[Any, str, str], ...] = (
    (EngineLoop, "turn", "messaging"),
    (LLMEngine, "step", "answers"),
    (Scheduler, "schedule", "schedule"),
    (Scheduler, "advance", "schedule"),
    (LoRAManagerV3, "sort_lora_batch", "routing"),
    (LoRAManagerV3, "get_lora_graph_inputs", "routing"),
    (ModelRunner, "run", "inputs"),
    (lora_core.engine.runner, "build_attention", "metadata"),
    (KVCache, "clear", "metadata"),
    (Decoder, "forward", "forward"),
    (Decoder, "logits", "forward"),
    (lora_core.engine.engine, "score_prompts", "sampling"),
    (lora_core.engine.engine, "sample", "sampling"),
)
RANK, ADAPTERS, NUM_STEPS = 16, 8, 24
GOAL = 0.10
"""Share of a step's time outside the model, at 32 requests."""


Seconds = dict[str, float]
"""By phase."""


class Phases:
    """Processor time of one thread by phase; a phase that calls another does not count its time."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._running: list[str] = []
        self._switched_s = 0.0

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The function, its time counted."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._running.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()

        return run

    def take(self) -> Seconds:
        """Seconds by phase since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken

    def _switch(self) -> None:
        now_s = time.thread_time()
        if self._running:
            self.seconds[self._running[-1]] += now_s - self._switched_s
        self._switched_s = now_s


class Rig:
    """An engine, its loop, and the replica's end of their channel."""

    def __init__(self, engine: LLMEngine, folder: Path) -> None:
        base = f"ipc://{folder}/profile"
        self._requests = MessageSender(endpoint(base, REQUEST_ENDPOINT), bind=True)
        self._events: MessageReceiver[EngineEvent] = MessageReceiver(
            endpoint(base, RESPONSE_ENDPOINT), EngineEvent, bind=True
        )
        self._received: MessageReceiver[EngineRequest] = MessageReceiver(
            endpoint(base, REQUEST_ENDPOINT), EngineRequest, bind=False
        )
        self._sender = MessageSender(endpoint(base, RESPONSE_ENDPOINT), bind=False)
        self._processor = LoRARequestProcessor(engine.manager, base)
        self._loop = EngineLoop(engine, self._received, self._processor, self._sender)
        self._engine = engine

    def close(self) -> None:
        """Close all ends."""
        self._processor.close()
        for end in (self._requests, self._events, self._received, self._sender):
            end.close()

    def decode(self, names: Sequence[str | None], num_prompt: int, num_steps: int, phases: Phases) -> list[Seconds]:
        """Answer one request for each adapter name; returns the phases of the steps in which all of them decode."""
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(100, 40_000, (len(names), num_prompt), generator=generator).tolist()
        sampling = SamplingParams(max_tokens=num_steps + 2, temperature=0, ignore_eos=True)
        for row, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            self._requests.send(GenerateRequest(str(row), prompt, sampling, name))
        num_tokens = [0] * len(names)
        steps: list[Seconds] = []
        while self._engine.has_work() or not any(num_tokens):
            all_decode = all(num_tokens) and max(num_tokens) < num_steps
            phases.take()
            self._loop.turn()
            taken = phases.take()
            for event in self._events.poll():
                for delta in event.deltas if isinstance(event, StepOutput) else ():
                    require(delta.error is None, f"a request failed: {delta.error}")
                    num_tokens[int(delta.request_id)] += len(delta.token_ids)
            if all_decode:
                steps.append(taken)
        while sum(num_tokens) < len(names) * (num_steps + 2):
            for event in self._events.poll(1000):
                for delta in event.deltas if isinstance(event, StepOutput) else ():
                    num_tokens[int(delta.request_id)] += len(delta.token_ids)
        self._engine.check_invariants()
        return steps


def profile(rig: Rig, phases: Phases, batch: int, num_adapters: int, num_prompt: int) -> None:
    """Report one point."""
    names = [f"a{row % num_adapters}" if num_adapters else None for row in range(batch)]
    steps = rig.decode(names, num_prompt, NUM_STEPS, phases)
    require(len(steps) > NUM_STEPS // 2, f"only {len(steps)} steps had all requests decode")
    median_ms = {phase: 1e3 * statistics.median(step[phase] for step in steps) for phase in PHASES}
    step_ms = sum(median_ms.values())
    outside = 1 - median_ms["forward"] / step_ms
    report(
        "step_phases", batch=batch, adapters=num_adapters, prompt=num_prompt, step_ms=step_ms, outside_share=outside,
        **{f"{phase}_ms": phase_ms for phase, phase_ms in median_ms.items()},
        compared="processor time of the step thread, median of each phase over the steps",
        goal=f"outside_share < {GOAL:g}", met=outside < GOAL if batch == 32 else None,
    )  # fmt: skip


def main() -> int:
    """Run the profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[43], help="tokens of a prompt")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base = prepare(report=lambda line: print(line, file=sys.stderr))
    phases = Phases()
    for owner, name, phase in FUNCTIONS:
        setattr(owner, name, phases.timed(getattr(owner, name), phase))
    with tempfile.TemporaryDirectory() as folder:
        paths = tuple(
            f"a{index}={make_adapter(base, Path(folder) / f'a{index}', r=RANK, targets=LINEAR_TARGETS, seed=index)}"
            for index in range(ADAPTERS)
        )
        lora = LoRAConfig(enable_lora=True, lora_paths=paths, max_lora_rank=RANK, max_num_loras=ADAPTERS)
        num_tokens = max(arguments.batches) * (max(arguments.prompts) + 2 * NUM_STEPS)
        engine = LLMEngine(EngineConfig(model=base, device="cpu", num_threads=1, kv_cache_tokens=num_tokens), lora)
        engine.warm_up()
        rig = Rig(engine, Path(folder))
        for num_prompt in arguments.prompts:
            for batch in arguments.batches:
                for num_adapters in (0, min(batch, ADAPTERS)):
                    profile(rig, phases, batch, num_adapters, num_prompt)
        rig.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
