"""Ask an engine for answers to known prompts, step it, and gather what it says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.messages import GenerateRequest, SamplingParams, TokenDelta
from lora_core.types import LoRAStatus
from tests.factories import reference_tokens

NUM_TOKENS = 14
PROMPTS = {size: [(size * 31 + place * 17) % 128 for place in range(size)] for size in (1, 3, 7, 12, 20, 33)}
Names = dict[str, Path]


@dataclass
class Answer:
    """What the engine sent for one request."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None
    error_type: str | None = None

    def take(self, delta: TokenDelta) -> None:
        assert self.reason is None, f"{delta.request_id} had ended"
        self.tokens += delta.token_ids
        self.reason, self.error = delta.finish_reason, delta.error
        self.error_type = delta.error_type if delta.error else None


Answers = dict[str, Answer]


def step(engine: LLMEngine, answers: Answers) -> list[TokenDelta]:
    deltas = engine.step()
    engine.check_invariants()
    assert len({delta.request_id for delta in deltas}) == len(deltas)
    for delta in deltas:
        answers.setdefault(delta.request_id, Answer()).take(delta)
    return deltas


def finish(engine: LLMEngine, answers: Answers | None = None, max_steps: int = 3000) -> Answers:
    """Step until the engine has nothing left."""
    answers = {} if answers is None else answers
    for _ in range(max_steps):
        if not engine.has_work():
            return answers
        step(engine, answers)
    raise AssertionError(f"{engine.num_running} requests run and {engine.num_waiting} wait after {max_steps} steps")


def ask(
    engine: LLMEngine, request_id: str, name: str | None, size: int = 7, max_tokens: int = NUM_TOKENS, **sampling: Any
) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=sampling.pop("temperature", 0.0), **sampling)
    engine.add_request(GenerateRequest(request_id, PROMPTS[size], params, name))


def make_engine(
    base: Path,
    adapters: Names,
    *,
    slots: int = 3,
    clock: Any = None,
    lora_settings: Mapping[str, Any] | None = None,
    **settings: Any,
) -> LLMEngine:
    lora = LoRAConfig(
        enable_lora=slots > 0,
        max_num_loras=max(slots, 1),
        max_lora_rank=8,
        lora_paths=tuple(f"{name}={path}" for name, path in adapters.items()) if slots else (),
        **(lora_settings or {}),
    )
    config = EngineConfig(model=base, **{"dtype": "float32", "device": "cpu", "kv_cache_tokens": 1024, **settings})
    return LLMEngine(config, lora, **({} if clock is None else {"clock": clock}))


def assert_nothing_left(engine: LLMEngine) -> None:
    """No request, block, pin or use of an adapter is left: every adapter leaves its slot as soon as it is unloaded."""
    assert not engine.has_work()
    assert engine.step() == []
    engine.check_invariants()
    for name in engine.manager.loras:
        ref = engine.manager.acquire(name)
        engine.manager.release(ref)
        response = engine.manager.unload_adapter(name)
        assert response.status is LoRAStatus.SUCCESS
        assert "in progress" not in response.message
        assert engine.manager.slot_of(ref) is None
    engine.check_invariants()


def peft_answers(base: Path, adapters: Names) -> Callable[[str | None, int], list[int]]:
    """Answers of PEFT (or of transformers for None) to one of PROMPTS, each computed once."""
    known: dict[tuple[str | None, int], list[int]] = {}

    def answer(name: str | None, size: int) -> list[int]:
        if (name, size) not in known:
            folder = None if name is None else adapters[name]
            known[name, size] = reference_tokens(base, folder, PROMPTS[size], NUM_TOKENS)
        return known[name, size]

    return answer
