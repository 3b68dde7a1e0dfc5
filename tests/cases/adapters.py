"""PEFT adapters of tiny bases, and ways to spoil them."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.factories import ATTENTION_TARGETS, LINEAR_TARGETS

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"

__all__ = ["ATTENTION_TARGETS", "CONFIG", "LINEAR_TARGETS", "WEIGHTS", "Q"]


def save_adapter(
    base: Path,
    folder: Path,
    *,
    r: int = 4,
    alpha: float = 8,
    targets: Sequence[str] | str = LINEAR_TARGETS,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    std: float = 0.1,
    **config: Any,
) -> Path:
    """Save an adapter with random A, B and (DoRA) magnitudes, as PEFT saves it; `config`: fields of `LoraConfig`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    target_modules = targets if isinstance(targets, str) else list(targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice on tied heads and fused names
        adapted = get_peft_model(
            model, LoraConfig(r=r, lora_alpha=alpha, target_modules=target_modules, task_type="CAUSAL_LM", **config)
        )
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) if "lora_" in name else None
            if noise is None:
                continue
            if "magnitude" in name:
                parameter.data = (parameter.data * (1 + 0.3 * noise)).to(dtype)
            else:
                parameter.data = (noise * std).to(dtype)
        adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def edit_config(folder: Path, *without: str, **fields: Any) -> Path:
    """Change fields of the config, and remove those named in `without`."""
    path = folder / CONFIG
    content = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in content.items() if key not in without}))
    return folder


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], Mapping[str, Tensor] | None]) -> Path:
    """Rewrite the weights: by the mapping that `edit` returns, or by what it did to its argument."""
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / WEIGHTS).items()}
    edited = edit(tensors)
    save_file({key: t.contiguous() for key, t in (tensors if edited is None else edited).items()}, folder / WEIGHTS)
    return folder


def rename(folder: Path, renamed: Callable[[str], str]) -> Path:
    """Rewrite the weights under other keys."""
    return edit_weights(folder, lambda tensors: {renamed(key): tensor for key, tensor in tensors.items()})


def write_config(folder: Path, content: bytes) -> Path:
    """Replace the config's bytes."""
    (folder / CONFIG).write_bytes(content)
    return folder


def shard(folder: Path, num_shards: int = 2) -> Path:
    """Split the weights into shards with an index, as large adapters come."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map: dict[str, str] = {}
    for place in range(num_shards):
        name = f"adapter_model-{place + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(tensors.items())[place::num_shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    return folder
