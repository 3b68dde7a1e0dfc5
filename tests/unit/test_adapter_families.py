"""Adapters of every kind of module, plain and DoRA, on a tiny model of each architecture: equal to PEFT's logits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lora_core.model import LoRAModel
from lora_core.models.architectures import decoder_config, read_hf_config
from tests.factories import TINY_SETTINGS, linear_targets, make_adapter, reference_logits, tiny_model
from tests.unit.adapter_folders import PROMPT, adapted_logits, plain_base

pytestmark = pytest.mark.filterwarnings(
    # Of a head adapted apart from the embedding it is tied to.
    "ignore:Model with `tie_word_embeddings=True`",
    "ignore:Model has `tie_word_embeddings=True`",
)


@pytest.mark.parametrize("use_dora", [False, True], ids=["plain", "dora"])
@pytest.mark.parametrize("architecture", TINY_SETTINGS)
def test_equals_peft(tmp_path: Path, architecture: str, use_dora: bool) -> None:
    base = tiny_model(tmp_path / "base", architecture, seed=2)
    targets = (*linear_targets(architecture), "embed_tokens", "lm_head")
    folder = make_adapter(base, tmp_path / "adapter", targets=targets, use_dora=use_dora, seed=3)
    model = plain_base(base)
    adapter = load_for(base, folder, base=model)
    assert set(adapter.target_modules) == set(targets)
    expected = reference_logits(base, folder, PROMPT)
    assert (expected - reference_logits(base, None, PROMPT)).abs().max() > 0.1
    torch.testing.assert_close(adapted_logits(model, adapter), expected, rtol=2e-4, atol=2e-4)


def load_for(base_folder: Path, folder: Path, **arguments: Any) -> LoRAModel:
    """Load an adapter with the shapes that the base model's declaration gives."""
    config = decoder_config(read_hf_config(base_folder))
    return LoRAModel(
        "x",
        folder,
        torch.float32,
        16,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        projections=config.projections,
        num_layers=config.num_layers,
        **arguments,
    )
