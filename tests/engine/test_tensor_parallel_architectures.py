"""Architectures on two ranks, with adapters drawn at random in few slots: the tokens are PEFT's."""

import random
from pathlib import Path

import pytest
from torch import nn

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.types import LoRAStatus
from tests.engine.test_random_adapters import check_tokens, drawn_adapters
from tests.factories import reference_model, tiny_model

ARCHITECTURES = [
    # Fused in the checkpoint, and one projection to adapters.
    "Phi3ForCausalLM",
    # Norms behind the sums, a scaled embedding, capped scores and logits.
    "Gemma2ForCausalLM",
    # Biases of the projections into heads.
    "Qwen2ForCausalLM",
    # Scaled sums.
    "GraniteForCausalLM",
]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_pefts(architecture: str, tmp_path: Path) -> None:
    draw = random.Random(f"two ranks of {architecture}")
    base = tiny_model(tmp_path / "base", architecture, tied=draw.random() < 0.5)
    folders = drawn_adapters(draw, architecture, base, tmp_path)
    config = EngineConfig(
        model=base,
        dtype="float32",
        device="cpu",
        tensor_parallel_size=2,
        block_size=4,
        kv_cache_tokens=160,
        max_num_batched_tokens=11,
        max_num_seqs=4,
    )
    engine = LLMEngine(config, LoRAConfig(enable_lora=True, max_num_loras=2, max_lora_rank=8))
    try:
        for name, folder in folders.items():
            response = engine.manager.load_adapter(f"{name}={folder}")
            assert response.status is LoRAStatus.SUCCESS, response.message
        references: dict[str | None, nn.Module] = {None: reference_model(base)}
        references |= {name: reference_model(base, folder) for name, folder in folders.items()}
        check_tokens(engine, references, draw)
    finally:
        engine.close()
