"""Adapters drawn at random, in every architecture, in mixed batches and few slots: the engine's tokens are PEFT's."""

import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.messages import GenerateRequest, SamplingParams
from lora_core.types import LoRAStatus
from tests.factories import TINY_SETTINGS, linear_targets, make_adapter, reference_model, tiny_model

NUM_ADAPTERS = 4
NUM_REQUESTS = 10

REGEXES = (
    r".*\.(q_proj|qkv_proj|down_proj)",
    r"model\.layers\.0\..*_proj|lm_head",
    r".*_proj|.*embed_tokens",
    r"(?:model\.)?layers\.(?!1)\d+\..*proj|model\.layers\.\d\.mlp\..*_proj",
    "ALL-linear",
)
EXCLUDED = (
    ["v_proj", "self_attn.o_proj"],
    ["lm_head"],
    r".*layers\.1\..*",
    ["model.layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"],
)
PATTERNS = (
    "q_proj",
    r"self_attn.(v|qkv)_proj",
    r"layers.[01].self_attn.k_proj",
    "lm_head",
    "embed_tokens",
    "down_proj|gate_proj",
    r"^model\.layers\.0\..*",
    r".*_proj",
    r"(?i:O_PROJ)",
    r"\d+.mlp.(gate_)?up_proj",
)
"""Sorted as a saved config has them, so that PEFT trains and loads with the same first match."""


def drawn_settings(draw: random.Random, architecture: str) -> dict[str, Any]:
    """Arguments of `make_adapter`."""
    names = [*linear_targets(architecture), "embed_tokens", "lm_head"]
    settings: dict[str, Any] = {
        "r": draw.choice([1, 3, 8]),
        "alpha": draw.choice([-8, 4, 16]),
        "use_rslora": draw.random() < 0.4,
        "use_dora": draw.random() < 0.4,
        "dtype": draw.choice([torch.float32, torch.bfloat16, torch.float16]),
        "save_embedding_layers": draw.random() < 0.3,
    }
    if draw.random() < 0.3:
        settings["targets"] = draw.choice(REGEXES)
    else:
        settings["targets"] = draw.sample(names, draw.randint(1, len(names)))
        if draw.random() < 0.4:
            settings["layers_to_transform"] = draw.choice([0, [1], [0, 1]])
            settings["layers_pattern"] = draw.choice([None, "layers", ["h", "lay.*"]])
    if draw.random() < 0.3:
        settings["exclude_modules"] = draw.choice(EXCLUDED)
    for key, values in (("rank_pattern", range(1, 9)), ("alpha_pattern", (0, 3, 7.5, -4))):
        if draw.random() < 0.6:
            settings[key] = {p: draw.choice(values) for p in sorted(draw.sample(PATTERNS, 3))}
    return settings


def drawn_adapters(draw: random.Random, architecture: str, base: Path, root: Path) -> dict[str, Path]:
    """Folders by name; what PEFT has no module for is drawn again."""
    folders: dict[str, Path] = {}
    while len(folders) < NUM_ADAPTERS:
        name = f"a{len(folders)}"
        with suppress(ValueError):
            make_adapter(base, root / name, seed=draw.randrange(10**6), **drawn_settings(draw, architecture))
            folders[name] = root / name
    return folders


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("architecture", TINY_SETTINGS)
def test_tokens_are_pefts(architecture: str, tmp_path: Path) -> None:
    draw = random.Random(architecture)
    base = tiny_model(tmp_path / "base", architecture, tied=draw.random() < 0.5)
    folders = drawn_adapters(draw, architecture, base, tmp_path)
    engine = LLMEngine(
        EngineConfig(
            model=base,
            dtype="float32",
            device="cpu",
            block_size=4,
            kv_cache_tokens=160,
            max_num_batched_tokens=11,
            max_num_seqs=4,
        ),
        LoRAConfig(enable_lora=True, max_num_loras=2, max_lora_rank=8),
    )
    for name, folder in folders.items():
        response = engine.manager.load_adapter(f"{name}={folder}")
        assert response.status is LoRAStatus.SUCCESS, (response.message, (folder / "adapter_config.json").read_text())
    references: dict[str | None, nn.Module] = {None: reference_model(base)}
    references |= {name: reference_model(base, folder) for name, folder in folders.items()}
    check_tokens(engine, references, draw)


def check_tokens(engine: LLMEngine, references: Mapping[str | None, nn.Module], draw: random.Random) -> None:
    """Run requests of all adapters, a few at a time, and compare each token with the reference after the same text."""
    names = [*references, *draw.choices([*references], k=NUM_REQUESTS - len(references))]
    draw.shuffle(names)
    prompts = [[draw.randrange(128) for _ in range(draw.choice([1, 5, 19, 21, 40]))] for _ in names]
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(names))}
    for index, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        sampling = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
        engine.add_request(GenerateRequest(str(index), prompt, sampling, name))
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None
            answers[delta.request_id] += delta.token_ids
    for name, prompt, answer in zip(names, prompts, answers.values(), strict=True):
        with torch.inference_mode():
            logits = references[name](input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
        due = logits[len(prompt) - 1 : -1]
        chosen = due.gather(1, torch.tensor(answer)[:, None])[:, 0]
        # Greedy, but for near ties of the two best.
        assert len(answer) == 10
        assert float((due.amax(1) - chosen).max()) < 1e-3, name
