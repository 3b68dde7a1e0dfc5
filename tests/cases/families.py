"""Tiny random base models, one for each family and shape that cases run on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "deep": ("llama", {"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8}),
    "mistral": ("mistral", {"tie_word_embeddings": False, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}),
    "phi3": ("phi3", {"tie_word_embeddings": False, "pad_token_id": 0}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "smollm3": ("smollm3", {"pad_token_id": 0}),
}
"""By name: `model_type`, and the fields of its config that are not the common ones."""

_COMMON: dict[str, Any] = {
    "tie_word_embeddings": True,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    # Wide enough that greedy answers wander, so that a fault can show in them.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_base(folder: Path, family: str, seed: int = 0, **fields: Any) -> Path:
    """Save a random fp32 model of a family, with biases and norms that are not neutral, and return its folder."""
    model_type, own = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **own, **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                # Gemma's norms count from zero.
                one = float("norm" in name and not model_type.startswith("gemma") and name.endswith("weight"))
                torch.nn.init.normal_(parameter, mean=one, std=0.1)
    model.save_pretrained(folder)
    return folder
