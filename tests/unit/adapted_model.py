"""A tiny model with fused and plain targets, and adapter folders for it, written without PEFT."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_core.config import LoRAConfig
from lora_core.manager import LoRAManagerV3
from lora_core.module_weights import ModuleWeights
from lora_core.targets import EMBEDDING_TARGET, HEAD_TARGET, LoRASite, LoRATargetModule, lora_sites

HIDDEN, KV, INTERMEDIATE, NUM_LAYERS, VOCABULARY = 16, 8, 24, 2, 29

RANK = 8
"""Rank that the managers of these tests pad to."""

TARGETS = (
    LoRATargetModule("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"), stacked=True),
    LoRATargetModule("self_attn.o_proj", ("o_proj",)),
    LoRATargetModule("mlp.gate_up_proj", ("gate_proj", "up_proj"), stacked=True),
    LoRATargetModule("mlp.down_proj", ("down_proj",)),
)

PROJECTIONS = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (KV, HIDDEN),
    "v_proj": (KV, HIDDEN),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}


LM_TARGETS = (HEAD_TARGET, *TARGETS, EMBEDDING_TARGET)
"""Those of `TinyLM`, in an order that is not the sites'."""

LM_PROJECTIONS = {**PROJECTIONS, "embed_tokens": (HIDDEN, VOCABULARY), "lm_head": (VOCABULARY, HIDDEN)}

LM_SITES = lora_sites(LM_TARGETS, LM_PROJECTIONS, NUM_LAYERS)

LM_MODULES = tuple(module for site in LM_SITES for module in site.modules)


class Attention(nn.Module):
    """Attention's linear layers; every row for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, HIDDEN + 2 * KV)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).split([HIDDEN, KV, KV], dim=-1)
        y: Tensor = self.o_proj(torch.sigmoid(q) * torch.cat([k, v], dim=-1))
        return y


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        y: Tensor = self.down_proj(torch.sigmoid(gate) * up)
        return y


class Layer(nn.Module):
    """A decoder layer without norms."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x)
        y: Tensor = x + self.mlp(x)
        return y


class Body(nn.Module):
    """The decoder layers, where Hugging Face has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TinyModel(nn.Module):
    """Maps `[T, 16]` to `[T, 16]`, parameters `model.layers.<n>....`, the same random ones each time."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = Body()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        return y


class TokenBody(Body):
    """The embedding beside the decoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.embed_tokens(ids))


class TinyLM(nn.Module):
    """Maps token ids `[T]` to logits `[T, VOCABULARY]`, every row for itself, by the same random weights each time."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = TokenBody()
            self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model(ids))
        return logits


@dataclass(frozen=True)
class HostAdapter:
    """An adapter of `TinyLM` as slots take it, the scale in B."""

    rank: int
    modules: Mapping[str, ModuleWeights]

    def module(self, name: str) -> ModuleWeights | None:
        return self.modules.get(name)

    def merged(self, *, tied: bool = False) -> TinyLM:
        """The dense truth: every weight is (1 + gain) * W + B @ A, and its bias stays; a tied weight becomes two."""
        model = TinyLM(tied=tied)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        with torch.no_grad():
            for site in LM_SITES:
                prefix = "" if site.kind == "head" else "model."
                rows = model.get_parameter(f"{prefix}{site.name}.weight")
                # A token's embedding is a row of the weight, and channels are its columns.
                weight = rows.T if site.kind == "embedding" else rows
                for part, module in zip(torch.split(weight, list(site.slices)), site.modules, strict=True):
                    if module in self.modules:
                        a, b, gain = self.modules[module]
                        part *= 1 if gain is None else 1 + gain[:, None]
                        part += b @ (a.T if site.kind == "embedding" else a)
        return model


def host_adapter(
    seed: int, rank: int, modules: Collection[str] = LM_MODULES, gains: Collection[str] = ()
) -> HostAdapter:
    """A random adapter of some modules, with gains in some of them."""
    generator = torch.Generator().manual_seed(seed)

    def weights(site: LoRASite, name: str, width: int) -> ModuleWeights:
        a = torch.randn(rank, site.in_features, generator=generator) * 0.3
        b = torch.randn(width, rank, generator=generator) * 0.3
        gain = torch.randn(width, generator=generator) * 0.3
        return ModuleWeights(a.T.contiguous() if site.kind == "embedding" else a, b, gain if name in gains else None)

    return HostAdapter(
        rank,
        {
            name: weights(site, name, width)
            for site in LM_SITES
            for name, width in zip(site.modules, site.slices, strict=True)
            if name in modules
        },
    )


def random_rows(num_rows: int) -> Tensor:
    """Input `[num_rows, 16]` of `TinyModel`, the same each time."""
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(7))


def module_name(layer: int, projection: str) -> str:
    """Normalised name of a projection, e.g. `layers.0.self_attn.q_proj`."""
    parent = "mlp" if projection in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"layers.{layer}.{parent}.{projection}"


ALL_MODULES = tuple(module_name(layer, projection) for layer in range(NUM_LAYERS) for projection in PROJECTIONS)


def random_pairs(seed: int, rank: int, modules: tuple[str, ...] = ALL_MODULES) -> dict[str, tuple[Tensor, Tensor]]:
    """A `[rank, in]` and B `[out, rank]` of each module."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for module in modules:
        out_features, in_features = PROJECTIONS[module.rpartition(".")[2]]
        a = torch.randn(rank, in_features, generator=generator) * 0.3
        b = torch.randn(out_features, rank, generator=generator) * 0.3
        pairs[module] = (a, b)
    return pairs


def save_adapter(folder: Path, pairs: Mapping[str, tuple[Tensor, Tensor]], alpha: float) -> Path:
    """Write a PEFT folder with these weights, all of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(pairs.values()))[0].shape[0]
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in pairs}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[f"base_model.model.model.{module}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.model.{module}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_model(pairs: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> TinyModel:
    """The dense truth: every weight is W + scale * B @ A."""
    model = TinyModel()
    with torch.no_grad():
        for layer in range(NUM_LAYERS):
            for target in TARGETS:
                weight = model.get_parameter(f"model.layers.{layer}.{target.path}.weight")
                row = 0
                for module, projection in zip(target.peft_modules(layer), target.projections, strict=True):
                    width = PROJECTIONS[projection][0]
                    if module in pairs:
                        a, b = pairs[module]
                        weight[row : row + width] += scale * (b @ a)
                    row += width
    return model


@dataclass(frozen=True)
class Recipe:
    """What an adapter is made of."""

    seed: int
    rank: int
    alpha: float
    modules: tuple[str, ...] = ALL_MODULES

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of each module."""
        return random_pairs(self.seed, self.rank, self.modules)


# "partial" has parts of fused targets and nothing in the second layer, "second" nothing in the first.
ADAPTERS = {
    "full": Recipe(0, 4, 8.0),
    "wide": Recipe(1, 8, 4.0),
    "partial": Recipe(2, 2, 6.0, tuple(module_name(0, p) for p in ("q_proj", "k_proj", "gate_proj", "o_proj"))),
    "second": Recipe(3, 1, 3.0, (module_name(1, "down_proj"), module_name(1, "v_proj"))),
}


def save_adapters(root: Path) -> dict[str, Path]:
    """Write every adapter of `ADAPTERS`; their folders by name."""
    return {name: save_adapter(root / name, recipe.pairs(), recipe.alpha) for name, recipe in ADAPTERS.items()}


def make_manager(num_slots: int = 2, *, enable_lora: bool = True, **arguments: Any) -> LoRAManagerV3:
    """A manager for `TinyModel`; further arguments replace its own."""
    return LoRAManagerV3(
        LoRAConfig(enable_lora=enable_lora, max_lora_rank=RANK, max_num_loras=num_slots),
        "base",
        arguments.pop("base_dtype", torch.float32),
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        max_lora_seq_len=256,
        **{"targets": TARGETS, "projections": PROJECTIONS, "num_layers": NUM_LAYERS, **arguments},
    )
