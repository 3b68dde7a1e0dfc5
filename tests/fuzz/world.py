"""What the fuzz plays with: a tiny base model, adapters of every format in two versions each, their quiet answers."""

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.engine.request import ScheduledBatch
from lora_core.messages import GenerateRequest, SamplingParams
from lora_core.model import LoRAModel
from lora_core.types import LoadReport
from tests.factories import ATTENTION_TARGETS, LINEAR_TARGETS, make_adapter, tiny_llama

NUM_NAMES = 12
MAX_RANK = 8
MAX_TOKENS = 12
NUM_PROMPTS, NUM_STEMS = 16, 3
MAX_SLOT_WAIT_S = 0.05
"""About ten steps, so that requests are put back often."""
NEAR_TIE = 1e-3
"""A prompt whose answer has two logits closer than this is not asked: the order of a sum may decide between them."""

FORMATS: tuple[dict[str, Any], ...] = (
    {"r": 4},
    {"r": 8, "targets": ATTENTION_TARGETS},
    {"r": 2, "targets": ("k_proj", "up_proj")},
    {"r": 4, "rank_pattern": {"q_proj": 8, "layers.0.mlp.up_proj": 1}, "alpha_pattern": {"v_proj": 3}},
    {"r": 4, "use_rslora": True, "targets": ("gate_proj", "up_proj", "down_proj")},
    {"r": 4, "layers_to_transform": [1]},
    {"r": 4, "use_dora": True},
    {"r": 4, "targets": (*LINEAR_TARGETS, "lm_head")},
    {"r": 3, "targets": ("embed_tokens", "o_proj")},
    {"r": 1},
    {"r": 2, "use_dora": True, "targets": ("q_proj", "down_proj", "lm_head")},
    {"r": 8, "dtype": torch.float16, "targets": "all-linear"},
)
"""Arguments of `make_adapter`, one set for each name."""


@dataclass(frozen=True)
class Version:
    """One adapter folder: the content a name may be loaded with."""

    name: str
    number: int
    folder: Path
    original: Path
    """A copy that is never moved away."""

    @property
    def label(self) -> str:
        return f"{self.name}.{self.number}"


class World:
    """The base, the adapters and the prompts, made once in `folder`."""

    def __init__(self, folder: Path, *, seed: int = 0) -> None:
        self.base = tiny_llama(folder / "base", layers=2, hidden=32, heads=4, kv_heads=2, intermediate=48, vocab=64)
        self.versions = {
            f"a{index}": [self._make(folder, f"a{index}", number, FORMATS[index]) for number in (0, 1)]
            for index in range(NUM_NAMES)
        }
        draw = random.Random(seed)
        self.stalled: dict[str, float] = {}
        """Seconds that reads of an adapter take longer, by its name."""
        self.prompts = list(_prompts(draw))

    @contextmanager
    def slow_files(self) -> Iterator[None]:
        """Within the block, the files of `stalled` adapters are slow to come."""
        read = LoRAModel.__init__

        def read_slowly(model: LoRAModel, name: str, *args: Any, **kwargs: Any) -> None:
            time.sleep(self.stalled.get(name, 0.0))
            read(model, name, *args, **kwargs)

        with patch.object(LoRAModel, "__init__", read_slowly):
            yield

    def _make(self, folder: Path, name: str, number: int, arguments: dict[str, Any]) -> Version:
        version = Version(name, number, folder / f"{name}.{number}", folder / "originals" / f"{name}.{number}")
        make_adapter(self.base, version.original, seed=1000 * number + sum(map(ord, name)), **arguments)
        shutil.copytree(version.original, version.folder)
        return version


def _prompts(draw: random.Random) -> Iterator[list[int]]:
    """Most begin as others do, with few tokens or many, up to all of another prompt."""
    stems = [[draw.randrange(64) for _ in range(32)] for _ in range(NUM_STEMS)]
    for _ in range(NUM_PROMPTS):
        shared = draw.choice(stems)[: draw.choice((0, 8, 12, 23, 32))]
        own = [draw.randrange(64) for _ in range(draw.choice((0, 1, 4, 9)))]
        yield shared + own or [draw.randrange(64)]


class QuietRuns:
    """Greedy answers of each version to each prompt, by an engine that does nothing else at the time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[tuple[Version | None, int], list[int] | None] = {}
        self._reports: dict[Version, LoadReport] = {}
        self._margins: list[float] = []
        self._engine = LLMEngine(
            engine_config(world, kv_cache_tokens=256, enable_prefix_caching=False),
            LoRAConfig(enable_lora=True, max_lora_rank=MAX_RANK),
        )
        run = self._engine.runner.run

        def recorded(batch: ScheduledBatch) -> Tensor:
            logits = run(batch)
            best = logits.topk(2).values
            self._margins += (best[:, 0] - best[:, 1]).tolist()
            return logits

        self._engine.runner.run = recorded  # type: ignore[assignment, method-assign]

    def answer(self, version: Version | None, prompt: int) -> list[int] | None:
        """The first `MAX_TOKENS` tokens, or None if a near tie makes them a matter of chance."""
        key = (version, prompt)
        if key not in self._known:
            self._known[key] = self._run(version, self._world.prompts[prompt])
        return self._known[key]

    def report(self, version: Version) -> LoadReport:
        """What a load of the version finds."""
        if version not in self._reports:
            self._reports[version] = self._load(version)
        return self._reports[version]

    def _load(self, version: Version) -> LoadReport:
        response = self._engine.manager.load_adapter(f"{version.label}={version.original}")
        self._engine.manager.unload_adapter(version.label)
        assert response.report is not None, response.message
        return response.report

    def _run(self, version: Version | None, prompt: Sequence[int]) -> list[int] | None:
        manager = self._engine.manager
        if version is not None:
            response = manager.load_adapter(f"{version.label}={version.original}")
            assert response.report is not None, response.message
            assert not response.report.is_noop, f"{version.label} changes nothing: it would hide faults"
        self._margins.clear()
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        name = None if version is None else version.label
        self._engine.add_request(GenerateRequest("quiet", list(prompt), sampling, name))
        tokens: list[int] = []
        while self._engine.has_work():
            for delta in self._engine.step():
                assert delta.error is None, delta.error
                tokens += delta.token_ids
        if version is not None:
            manager.unload_adapter(version.label)
        return tokens if min(self._margins) > NEAR_TIE else None


def engine_config(world: World, *, kv_cache_tokens: int, **settings: Any) -> EngineConfig:
    """A small engine: chunked prompts, few seats, and a KV cache that overflows."""
    return EngineConfig(
        model=world.base,
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_num_seqs=10,
        max_num_batched_tokens=48,
        block_size=4,
        kv_cache_tokens=kv_cache_tokens,
        max_slot_wait_s=MAX_SLOT_WAIT_S,
        **settings,
    )
