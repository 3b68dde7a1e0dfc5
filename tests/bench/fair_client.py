"""A client of one engine in the same thread: asks, steps, and notes when what came."""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.messages import GenerateRequest, SamplingParams
from tests.bench.result import require

RANK, VOCAB = 8, 2048
PROMPT_TOKENS = 48


@dataclass
class Asked:
    """One request, and what came of it."""

    name: str
    asked_s: float
    first_s: float | None = None
    tokens: list[int] = field(default_factory=list)


class FairClient:
    """One engine, stepped by whoever calls `step`, and the requests it was given.

    Attributes:
        engine: The engine.
        unfinished: Requests in flight, by id.
        finished: Those that have ended.
        num_tokens: Tokens generated.
        busy_s: Processor time that they took.
    """

    def __init__(self, base: Path, adapters: Mapping[str, Path], *, slots: int, max_slot_wait_s: float) -> None:
        paths = tuple(f"{name}={path}" for name, path in adapters.items())
        self.engine = LLMEngine(
            EngineConfig(
                model=base, dtype="float32", device="cpu", num_threads=1, max_slot_wait_s=max_slot_wait_s,
                kv_cache_tokens=32_768,
            ),
            LoRAConfig(enable_lora=True, lora_paths=paths, max_lora_rank=RANK, max_num_loras=slots),
        )  # fmt: skip
        self.unfinished: dict[str, Asked] = {}
        self.finished: list[Asked] = []
        self.num_tokens = 0
        self.busy_s = 0.0
        self._draw = random.Random(0)
        self._count = 0

    def ask(self, name: str, num_tokens: int, prompt: list[int] | None = None, asked_s: float | None = None) -> Asked:
        """Send a request, with a prompt of its own if none is given, as if it had come at `asked_s`."""
        self._count += 1
        prompt = prompt or [self._draw.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        self.engine.add_request(GenerateRequest(str(self._count), prompt, sampling, name))
        asked = Asked(name, time.perf_counter() if asked_s is None else asked_s)
        self.unfinished[str(self._count)] = asked
        return asked

    def num_unfinished(self, name: str) -> int:
        """Requests of an adapter in flight."""
        return sum(asked.name == name for asked in self.unfinished.values())

    def step(self) -> None:
        """One step of the engine."""
        began_s = time.thread_time()
        deltas = self.engine.step()
        self.busy_s += time.thread_time() - began_s
        for delta in deltas:
            require(delta.error is None, f"a request failed: {delta.error}")
            asked = self.unfinished[delta.request_id]
            if asked.first_s is None:
                asked.first_s = time.perf_counter()
            asked.tokens += delta.token_ids
            self.num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self.finished.append(self.unfinished.pop(delta.request_id))

    def finish(self) -> None:
        """Step until nothing is left."""
        while self.unfinished:
            self.step()
        self.engine.check_invariants()

    def answer(self, name: str, num_tokens: int, prompt: list[int]) -> list[int]:
        """The answer to one prompt, with whatever else is in flight."""
        asked = self.ask(name, num_tokens, prompt)
        while asked in self.unfinished.values():
            self.step()
        return asked.tokens

    def first_token_s(self, name: str | None = None) -> list[float]:
        """How long the ended requests, of one adapter or of all, waited for their first token, in rising order."""
        return sorted(a.first_s - a.asked_s for a in self.finished if a.first_s is not None and name in (None, a.name))
