"""Random adapters of any size, written straight to safetensors: PEFT would need a copy of the base model for each."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from lora_core.types import ADAPTER_CONFIG_FILE
from lora_core.weight_files import WEIGHTS_FILE


def linear_shapes(base: Path) -> dict[str, tuple[int, int]]:
    """`(out, in)` of the linear layers of a Llama's decoder layer, by path."""
    config = AutoConfig.from_pretrained(base)
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def write_adapter(base: Path, folder: Path, rank: int, *, seed: int = 0) -> Path:
    """Save a random fp32 adapter of all linear layers of a Llama, and return its folder.

    Its deltas are about half as large as what a random base layer computes, so that it changes answers.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(AutoConfig.from_pretrained(base).num_hidden_layers):
        for path, (out_features, in_features) in linear_shapes(base).items():
            module = f"base_model.model.model.layers.{layer}.{path}"
            a = torch.randn(rank, in_features, generator=generator).div_(math.sqrt(in_features))
            b = torch.randn(out_features, rank, generator=generator).div_(2 * math.sqrt(rank))
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    targets = [path.rpartition(".")[2] for path in linear_shapes(base)]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config))
    return folder


def weight_bytes(folder: Path) -> int:
    """Size of an adapter's weight file."""
    return (folder / WEIGHTS_FILE).stat().st_size
