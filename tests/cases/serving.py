"""Load adapters into an engine, ask it, and judge what it says against PEFT."""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_core.config import LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.engine.request import ScheduledBatch
from lora_core.manager import LoRAManagerV3
from lora_core.messages import GenerateRequest, SamplingParams, TokenDelta
from lora_core.model import LoRAModel
from lora_core.models.architectures import decoder_config, read_hf_config
from lora_core.targets import LoRATargetModule
from lora_core.types import AdapterRef, LoRAResponse, LoRAStatus
from tests.cases.registry import Got, all_of
from tests.cases.world import MAX_RANK, World

NUM_TOKENS = 12
PROMPTS = {size: [(size * 31 + place * 17) % 128 for place in range(size)] for size in (1, 5, 7, 20, 33, 70)}

LOGITS_TOLERANCE = 1e-3
"""Largest error of an fp32 logit, relative to the largest logit."""

PATIENCE_S = 90.0


@dataclass
class Answer:
    """What the engine sent for one request."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    error: str = ""
    error_type: str | None = None

    def take(self, delta: TokenDelta) -> None:
        """Add a delta."""
        assert self.reason is None, f"{delta.request_id} had ended"
        self.tokens += delta.token_ids
        self.reason, self.error = delta.finish_reason, delta.error or ""
        self.error_type = delta.error_type if delta.error else None


Answers = dict[str, Answer]


def words(response: LoRAResponse) -> str:
    """The message of a response, in one string."""
    return response.message if isinstance(response.message, str) else "; ".join(response.message)


def submit(
    engine: LLMEngine,
    request_id: str,
    name: str | None,
    prompt: Sequence[int],
    max_tokens: int = NUM_TOKENS,
    **how: Any,
) -> None:
    """Queue a greedy request."""
    sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **how})
    engine.add_request(GenerateRequest(request_id, list(prompt), sampling, name))


def step(engine: LLMEngine, answers: Answers) -> list[TokenDelta]:
    """One step, and the invariants after it."""
    deltas = engine.step()
    engine.check_invariants()
    for delta in deltas:
        answers.setdefault(delta.request_id, Answer()).take(delta)
    return deltas


def finish(engine: LLMEngine, answers: Answers | None = None) -> Answers:
    """Step until nothing is left."""
    answers = {} if answers is None else answers
    deadline = time.monotonic() + PATIENCE_S
    while engine.has_work():
        assert time.monotonic() < deadline, f"{engine.num_running} run and {engine.num_waiting} wait for ever"
        step(engine, answers)
    return answers


@contextlib.contextmanager
def recorded(engine: LLMEngine) -> Iterator[list[Tensor]]:
    """The logits of each step inside the block."""
    found: list[Tensor] = []
    run = engine.runner.run

    def record(batch: ScheduledBatch) -> Tensor:
        logits = run(batch)
        found.append(logits.clone())
        return logits

    engine.runner.run = record  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        engine.runner.run = run  # type: ignore[method-assign]


def alone(
    engine: LLMEngine, name: str | None, prompt: Sequence[int], max_tokens: int = NUM_TOKENS
) -> tuple[list[int], Tensor]:
    """Greedy tokens of one request with nothing beside it, and the logits `[tokens, vocab]` they came from."""
    finish(engine)
    with recorded(engine) as logits:
        submit(engine, "alone", name, prompt, max_tokens)
        answer = finish(engine)["alone"]
    assert answer.error_type is None, f"{answer.error_type}: {answer.error}"
    return answer.tokens, torch.cat(logits)


def load(engine: LLMEngine, name: str, folder: Path | str, **how: Any) -> LoRAResponse:
    """Load an adapter, which must succeed."""
    response = engine.manager.load_adapter(f"{name}={folder}", **how)
    assert response.status is LoRAStatus.SUCCESS, f"{response.status.value}: {words(response)}"
    return response


def unload(engine: LLMEngine, *names: str) -> None:
    """Unload adapters, which must succeed."""
    for name in names:
        response = engine.manager.unload_adapter(name)
        assert response.status is LoRAStatus.SUCCESS, f"{response.status.value}: {words(response)}"


def read(world: World, folder: Path, family: str = "llama", **how: Any) -> LoRAModel:
    """An adapter as it is read, without an engine's help; `how`: other arguments of `LoRAModel`."""
    config = decoder_config(read_hf_config(world.base(family)))
    heads = {"n_heads": config.num_heads, "n_kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    shapes = {"projections": config.projections, "num_layers": config.num_layers}
    arguments = {"base_dtype": torch.float32, "max_lora_rank": MAX_RANK, **heads, **shapes, **how}
    return LoRAModel("x", folder, **arguments)


def manager_of(base: Path, targets: Sequence[LoRATargetModule] = ()) -> LoRAManagerV3:
    """A manager for a base model, with two slots; unset: the targets of its architecture."""
    config = decoder_config(read_hf_config(base))
    return LoRAManagerV3(
        LoRAConfig(enable_lora=True, max_num_loras=2),
        str(base),
        torch.float32,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        64,
        targets or config.targets,
        projections=config.projections,
        num_layers=config.num_layers,
    )


@contextlib.contextmanager
def loaded(world: World, engine: LLMEngine, *folders: Path) -> Iterator[list[str]]:
    """Adapters under new names inside the block."""
    names = [world.new_name() for _ in folders]
    done: list[str] = []
    try:
        for name, folder in zip(names, folders, strict=True):
            load(engine, name, folder)
            done.append(name)
        yield names
    finally:
        unload(engine, *done)


def ref_of(engine: LLMEngine, name: str) -> AdapterRef:
    """Identity of the adapter that requests for `name` get now."""
    ref = engine.manager.acquire(name)
    engine.manager.release(ref)
    return ref


def same_tokens(
    world: World, family: str, folder: Path | None, prompt: Sequence[int], tokens: Sequence[int], label: str = ""
) -> Got:
    """Whether an answer is PEFT's, token for token."""
    if not tokens:
        return Got(f"{label}no tokens", False)
    difference = world.truth.compare(world.base(family), folder, prompt, tokens)
    if difference.token is None:
        return Got(f"{label}{len(tokens)} tokens identical", True)
    return Got(f"{label}token {difference.token} differs (smallest margin {difference.margin:.1e})", False)


def equals_peft(
    world: World,
    folder: Path,
    family: str = "llama",
    *,
    truth: Path | None = None,
    engine: LLMEngine | None = None,
    num_tokens: int = NUM_TOKENS,
    sizes: Sequence[int] = (7, 33),
    tolerance: float = LOGITS_TOLERANCE,
) -> Got:
    """Whether an adapter's tokens and logits are PEFT's, and not the base's.

    Args:
        truth: The folder PEFT reads; unset: the same one.
    """
    engine = engine or world.engine(family)
    base, reference = world.base(family), truth or folder
    worst, effect, num = 0.0, 0.0, 0
    with loaded(world, engine, folder) as (name,):
        for size in sizes:
            tokens, logits = alone(engine, name, PROMPTS[size], num_tokens)
            found = world.truth.compare(base, reference, PROMPTS[size], tokens, logits)
            if found.token is not None:
                return Got(f"token {found.token} differs (smallest margin {found.margin:.1e})", False)
            plain = world.truth.logits(base, None, [*PROMPTS[size], *tokens[:-1]])[-len(tokens) :]
            worst, num = max(worst, found.logits or 0.0), num + len(tokens)
            effect = max(effect, float((logits - plain).abs().max() / plain.abs().max()))
    right = worst <= tolerance and effect > 10 * worst and effect > 1e-3
    return Got(f"{num} tokens identical, logits within {worst:.0e}, {effect:.0e} from the base", right)


def differs_from_base(world: World, family: str, prompt: Sequence[int], tokens: Sequence[int]) -> Got:
    """Whether an answer is visibly not the base's, so that a swap would show."""
    found = world.truth.compare(world.base(family), None, prompt, tokens)
    return Got("not the base's" if found.token is not None else "the base's tokens", found.token is not None)


def contains(text: str, *needles: str) -> Got:
    """Whether a message names all it must name."""
    missing = [needle for needle in needles if needle not in text]
    return Got(f"{text!r} lacks {missing}" if missing else shorten(text), not missing)


def shorten(text: str, limit: int = 160) -> str:
    """A message's beginning."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def refused(
    world: World,
    folder: Path | str,
    *needles: str,
    family: str = "llama",
    status: LoRAStatus = LoRAStatus.LOAD_INVALID_ADAPTER,
    engine: LLMEngine | None = None,
) -> Got:
    """Whether a load is refused in words that hold all `needles`, costs nobody anything, and can be corrected."""
    engine = engine or world.engine(family)
    name, before = world.new_name(), set(engine.manager.loras)
    response = engine.manager.load_adapter(f"{name}={folder}")
    message = words(response)
    if response.status is not status:
        return Got(f"{response.status.value}: {shorten(message)}", False)
    left = set(engine.manager.loras) - before
    gone = engine.manager.unload_adapter(name).status
    good = world.adapter(family, targets=("o_proj",), seed=77)
    load(engine, name, good)
    unload(engine, name)
    engine.check_invariants()
    return all_of(
        contains(message, *needles),
        Got("nothing of it is left", not left and gone is LoRAStatus.UNLOAD_NAME_NONEXISTENT),
        Got("no trace in the message", "Traceback" not in message and 'File "' not in message),
    )._replace(text=contains(message, *needles).text)


class OpenedFiles:
    """Counts how often files below a folder are opened by this process, by name."""

    _watching: "list[OpenedFiles]" = []  # noqa: RUF012  # of the class: an audit hook cannot be taken away again
    _hooked = False

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.opened: list[str] = []

    def __enter__(self) -> "OpenedFiles":
        if not OpenedFiles._hooked:
            OpenedFiles._hooked = True
            sys.addaudithook(OpenedFiles._hook)
        OpenedFiles._watching.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        OpenedFiles._watching.remove(self)

    def count(self, suffix: str) -> int:
        """How often files that end in `suffix` were opened."""
        return sum(path.endswith(suffix) for path in self.opened)

    @staticmethod
    def _hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and OpenedFiles._watching and isinstance(arguments[0], (str, bytes)):
            path = arguments[0] if isinstance(arguments[0], str) else arguments[0].decode(errors="replace")
            for watcher in OpenedFiles._watching:
                if path.startswith(watcher.folder):
                    watcher.opened.append(path)
