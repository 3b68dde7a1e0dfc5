"""Adapter folders edited by hand, and LoRAModel's tensors applied to a transformers model, as PEFT would apply them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_core.model import LoRAModel
from lora_core.module_weights import BaseWeight, ModuleWeights
from tests.factories import reference_model

WEIGHTS = "adapter_model.safetensors"
LINEAR_PROJECTIONS = {
    "q_proj": (64, 64),
    "k_proj": (32, 64),
    "v_proj": (32, 64),
    "o_proj": (64, 64),
    "gate_proj": (96, 64),
    "up_proj": (96, 64),
    "down_proj": (64, 96),
}
PROJECTIONS = {**LINEAR_PROJECTIONS, "embed_tokens": (64, 128), "lm_head": (128, 64)}
"""Of `tiny_llama`."""

PROMPT = tuple(range(3, 120, 9))


class PlainBase:
    """A transformers model's modules, as `BaseModules` gives them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules = {name.removeprefix("model."): module for name, module in model.named_modules()}

    def module(self, name: str) -> nn.Module:
        module: nn.Module = self._modules[name]
        return module

    @contextmanager
    def open_weight(self, module: str) -> Iterator[BaseWeight]:
        yield BaseWeight(self.module(module).get_parameter("weight"))

    def canary(self, module: str) -> tuple[Tensor, Tensor]:
        weight = self.module(module).get_parameter("weight")
        if module == "embed_tokens":
            x = torch.arange(8)
        else:
            x = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(1)).to(weight.dtype)
        with torch.no_grad():
            return x if module == "embed_tokens" else x.float(), self.module(module)(x)


def plain_base(folder: Path, dtype: torch.dtype = torch.float32) -> PlainBase:
    return PlainBase(reference_model(folder).to(dtype))


def load(folder: Path, *, max_rank: int = 16, dtype: torch.dtype = torch.float32, **arguments: Any) -> LoRAModel:
    """Load an adapter of `tiny_llama`."""
    return LoRAModel(
        "x",
        folder,
        dtype,
        max_rank,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        **{"projections": PROJECTIONS, "num_layers": 2, **arguments},
    )


def edit_config(folder: Path, **fields: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], Mapping[str, Tensor] | None]) -> Path:
    """Rewrite the weights: by the mapping that `edit` returns, or by what it did to its argument."""
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / WEIGHTS).items()}
    edited = edit(tensors)
    save_file(dict(tensors if edited is None else edited), folder / WEIGHTS)
    return folder


def rename(folder: Path, renamed: Callable[[str], str]) -> Path:
    return edit_weights(folder, lambda tensors: {renamed(key): tensor for key, tensor in tensors.items()})


def drop(folder: Path, *keys: str) -> Path:
    return edit_weights(folder, lambda tensors: {name: t for name, t in tensors.items() if name not in keys})


def same_modules(ours: LoRAModel, others: LoRAModel) -> bool:
    """Whether two adapters hold the same tensors, bit by bit."""
    if ours.ranks != others.ranks:
        return False
    return all(_same(ours.module(name), others.module(name)) for name in ours.ranks)


def adapted_logits(base: PlainBase, adapter: LoRAModel, token_ids: Sequence[int] = PROMPT) -> Tensor:
    """Logits of the base with the adapter's tensors applied beside its layers, as the server applies them."""
    handles = [
        base.module(name).register_forward_hook(_hook(adapter.module(name), is_embedding=name == "embed_tokens"))
        for name in adapter.ranks
    ]
    try:
        with torch.no_grad():
            logits: Tensor = base.model(input_ids=torch.tensor([list(token_ids)])).logits[0]
            return logits
    finally:
        for handle in handles:
            handle.remove()


def _hook(weights: ModuleWeights | None, *, is_embedding: bool) -> Callable[..., Tensor]:
    assert weights is not None
    a, b, gain = weights

    def adapt(layer: nn.Module, inputs: tuple[Tensor], y: Tensor) -> Tensor:
        (x,) = inputs
        bias = getattr(layer, "bias", None)
        delta = (a[x] if is_embedding else x @ a.T) @ b.T
        # What some embeddings multiply their rows by.
        delta = delta * getattr(layer, "embed_scale", 1)
        if gain is None:
            return y + delta
        return y + gain * (y if bias is None else y - bias) + delta

    return adapt


def _same(ours: ModuleWeights | None, others: ModuleWeights | None) -> bool:
    if ours is None or others is None:
        return False
    for one, other in zip(ours, others, strict=True):
        if (one is None) != (other is None):
            return False
        if one is not None and other is not None and not torch.equal(one, other):
            return False
    return True
