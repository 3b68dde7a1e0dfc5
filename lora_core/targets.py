"""The layers of a model that adapters may change, declared once per architecture.

The tuple of targets is the only source of truth for three things: which layers are wrapped, how the base
checkpoint's weights are fused, and which PEFT modules fill which part of a slot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lora_core.errors import ConfigError

TargetKind = Literal["layer", "embedding", "head"]


@dataclass(frozen=True)
class LoRATargetModule:
    """One layer that adapters may change, and the PEFT projections it computes.

    Attributes:
        path: Where the layer is, from its holder (see `kind`), e.g. `self_attn.qkv_proj`.
        projections: The PEFT projections it covers, in the order of its output rows, e.g. `("q_proj", "k_proj",
            "v_proj")`. They are siblings of `path` in the checkpoint and in adapters.
        stacked: The checkpoint stores the projections apart and the decoder stores them as one weight, so their rows
            are concatenated at load. False: the checkpoint already has a weight at `path`.
        kind: "layer": a linear layer inside every decoder layer. Once in the model: "embedding" is the token
            embedding, which stands beside the list of decoder layers, "head" the linear output head, at the root.
    """

    path: str
    projections: tuple[str, ...]
    stacked: bool = False
    kind: TargetKind = "layer"

    def siblings(self) -> tuple[str, ...]:
        """Paths of the projections from where `path` starts, in fused order, e.g. `self_attn.q_proj`."""
        parent, _, _ = self.path.rpartition(".")
        return tuple(self._sibling(parent, projection) for projection in self.projections)

    def peft_modules(self, layer: int | None) -> tuple[str, ...]:
        """Normalised names of the modules an adapter changes here, in fused order, e.g. `layers.3.self_attn.q_proj`.

        The layer is None for the kinds that a model has once.
        """
        return self.siblings() if layer is None else tuple(f"layers.{layer}.{path}" for path in self.siblings())

    def _sibling(self, parent: str, projection: str) -> str:
        # A target that is one projection has its own path, also where the projection's name has a dot (`to_out.0`).
        if self.path == projection or self.path.endswith(f".{projection}"):
            return self.path
        return f"{parent}.{projection}" if parent else projection


EMBEDDING_TARGET = LoRATargetModule("embed_tokens", ("embed_tokens",), kind="embedding")
HEAD_TARGET = LoRATargetModule("lm_head", ("lm_head",), kind="head")

LLAMA_TARGETS = (
    EMBEDDING_TARGET,
    LoRATargetModule("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"), stacked=True),
    LoRATargetModule("self_attn.o_proj", ("o_proj",)),
    LoRATargetModule("mlp.gate_up_proj", ("gate_proj", "up_proj"), stacked=True),
    LoRATargetModule("mlp.down_proj", ("down_proj",)),
    HEAD_TARGET,
)

# The checkpoint has the fused weights, and PEFT adapts each as the one linear layer it is there.
FUSED_TARGETS = (
    EMBEDDING_TARGET,
    LoRATargetModule("self_attn.qkv_proj", ("qkv_proj",)),
    LoRATargetModule("self_attn.o_proj", ("o_proj",)),
    LoRATargetModule("mlp.gate_up_proj", ("gate_up_proj",)),
    LoRATargetModule("mlp.down_proj", ("down_proj",)),
    HEAD_TARGET,
)

DECODER_PATHS: Mapping[str, str] = {
    projection: path
    for target in (*LLAMA_TARGETS, *FUSED_TARGETS)
    for path, projection in zip(target.siblings(), target.projections, strict=True)
}
"""Where the decoder has each PEFT projection, from the projection's holder, e.g. `self_attn.q_proj`."""


@dataclass(frozen=True)
class LoRASite:
    """One target in one place of the model: the place of one A stack, one B stack and one stack of gains.

    Attributes:
        index: Its place among the model's sites.
        layer: Index of the decoder layer; None for the embedding and the head.
        target: The target.
        in_features: Width K of the layer's input; of the embedding, the number of tokens it knows.
        slices: Output rows of each projection, in fused order; their sum is the layer's output width.
    """

    index: int
    layer: int | None
    target: LoRATargetModule
    in_features: int
    slices: tuple[int, ...]

    @property
    def kind(self) -> TargetKind:
        """What kind of layer it is."""
        return self.target.kind

    @property
    def name(self) -> str:
        """E.g. `layers.3.self_attn.qkv_proj`, `embed_tokens` or `lm_head`."""
        return self.target.path if self.layer is None else f"layers.{self.layer}.{self.target.path}"

    @property
    def modules(self) -> tuple[str, ...]:
        """Normalised names of the PEFT modules that fill this site, in fused order."""
        return self.target.peft_modules(self.layer)

    @property
    def out_features(self) -> int:
        """The layer's output width."""
        return sum(self.slices)


def lora_sites(
    targets: Sequence[LoRATargetModule], projections: Mapping[str, tuple[int, int]], num_layers: int
) -> tuple[LoRASite, ...]:
    """Every place of every target: the embedding, then layer by layer in the targets' order, then the head.

    Args:
        targets: The architecture's targets.
        projections: `(out_features, in_features)` of each PEFT projection of the base model; of the embedding, the
            hidden size and the vocabulary.
        num_layers: Decoder layers of the base model.

    Raises:
        ConfigError: a target names a projection without a shape, fuses projections of different input widths, or
            shares its path with another target.
    """
    paths = [target.path for target in targets]
    if repeated := sorted({path for path in paths if paths.count(path) > 1}):
        raise ConfigError(f"LoRA targets name {', '.join(repeated)} more than once; each path is declared once")
    shapes = {target: _fused_shape(target, projections) for target in targets}
    by_kind = {kind: [target for target in targets if target.kind == kind] for kind in get_args(TargetKind)}
    places: list[tuple[int | None, LoRATargetModule]] = [
        *((None, target) for target in by_kind["embedding"]),
        *((layer, target) for layer in range(num_layers) for target in by_kind["layer"]),
        *((None, target) for target in by_kind["head"]),
    ]
    return tuple(LoRASite(index, layer, target, *shapes[target]) for index, (layer, target) in enumerate(places))


def _fused_shape(target: LoRATargetModule, projections: Mapping[str, tuple[int, int]]) -> tuple[int, tuple[int, ...]]:
    """Input width and output slices of a target."""
    unknown = [projection for projection in target.projections if projection not in projections]
    if unknown or not target.projections:
        raise ConfigError(
            f"LoRA target {target.path!r} covers {', '.join(unknown) or 'no projection'}, "
            f"expected some of the base model's projections: {', '.join(projections)}"
        )
    widths = {projection: projections[projection][1] for projection in target.projections}
    if len(set(widths.values())) > 1:
        raise ConfigError(f"LoRA target {target.path!r} fuses projections of different input widths: {widths}")
    return next(iter(widths.values())), tuple(projections[projection][0] for projection in target.projections)


def stack_weights(weights: Mapping[str, Tensor], targets: Sequence[LoRATargetModule]) -> dict[str, Tensor]:
    """Fuse the weights, biases and other per-row tensors of stacked targets along their output rows.

    Semantics, for every stacked target with projections p0, p1, ..., every prefix that ends in `layers.<n>.`, and every
    suffix (`weight`, `bias`, ...):
        out[prefix + path + suffix] = cat([weights[prefix + p0 + suffix], weights[prefix + p1 + suffix], ...], dim=0)
    Every other tensor passes through under its own name.

    Args:
        weights: A checkpoint's tensors by name, e.g. `model.layers.0.self_attn.q_proj.weight`.
        targets: The architecture's targets.

    Returns:
        A new dict in the order of first appearance; tensors that were not fused are shared, not copied.

    Raises:
        ValueError: some but not all projections of a fused tensor are present.
    """
    fused_parts = {
        path: (target, part) for target in targets if target.stacked for part, path in enumerate(target.siblings())
    }
    stacked: dict[str, Tensor] = {}
    groups: dict[str, dict[int, Tensor]] = {}
    owner: dict[str, LoRATargetModule] = {}
    for key, tensor in weights.items():
        prefix, path, suffix = _split_key(key)
        if path not in fused_parts:
            stacked[key] = tensor
            continue
        target, part = fused_parts[path]
        fused_key = f"{prefix}{target.path}.{suffix}"
        stacked.setdefault(fused_key, tensor)  # keeps the place; replaced below
        groups.setdefault(fused_key, {})[part] = tensor
        owner[fused_key] = target
    for fused_key, parts in groups.items():
        stacked[fused_key] = _concatenate(fused_key, owner[fused_key], parts)
    return stacked


def _split_key(key: str) -> tuple[str, str, str]:
    """Split `a.layers.3.self_attn.q_proj.weight` into (`a.layers.3.`, `self_attn.q_proj`, `weight`)."""
    names = key.split(".")
    for place in range(len(names) - 2, 0, -1):
        if names[place].isdigit() and names[place - 1] == "layers":
            head = ".".join(names[: place + 1]) + "."
            return head, ".".join(names[place + 1 : -1]), names[-1]
    return "", key, ""


def _concatenate(fused_key: str, target: LoRATargetModule, parts: Mapping[int, Tensor]) -> Tensor:
    absent = [name for part, name in enumerate(target.projections) if part not in parts]
    if absent:
        raise ValueError(
            f"the checkpoint has no {', '.join(absent)} for {fused_key!r}, "
            f"which fuses {', '.join(target.projections)}: all of them must be present, or none"
        )
    return torch.cat([parts[part] for part in range(len(target.projections))], dim=0)
