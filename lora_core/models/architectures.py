"""The base models this server can run: one declaration for each architecture of transformers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lora_core.errors import ConfigError, UnsupportedModel
from lora_core.models.decoder import ACTIVATIONS, DecoderConfig
from lora_core.targets import LoRATargetModule

LLAMA_TARGETS = (
    LoRATargetModule("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"), stacked=True),
    LoRATargetModule("self_attn.o_proj", ("o_proj",)),
    LoRATargetModule("mlp.gate_up_proj", ("gate_proj", "up_proj"), stacked=True),
    LoRATargetModule("mlp.down_proj", ("down_proj",)),
)


@dataclass(frozen=True)
class Architecture:
    """One family of models.

    Attributes:
        name: As in `architectures` of a checkpoint's config.json.
        targets: The linear layers that adapters may change, in every decoder layer.
        features: Maps the checkpoint's configuration to those fields of `DecoderConfig` in which families differ.
    """

    name: str
    targets: tuple[LoRATargetModule, ...]
    features: Callable[[PreTrainedConfig], Mapping[str, Any]]


LLAMA = Architecture(
    name="LlamaForCausalLM",
    targets=LLAMA_TARGETS,
    features=lambda config: {
        "activation": config.hidden_act,
        "qkv_bias": config.attention_bias,
        "output_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    },
)

ARCHITECTURES: Mapping[str, Architecture] = {architecture.name: architecture for architecture in (LLAMA,)}

# The others change their frequencies with the length of the text ("longrope"), or belong to no family served.
# "dynamic" does so only past `max_position_embeddings`, where this server stops.
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def read_hf_config(folder: Path) -> PreTrainedConfig:
    """Read a checkpoint's config.json.

    Raises:
        UnsupportedModel: its architecture is not declared.
        ConfigError: there is no such file, or transformers cannot read it.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"no base model at {folder}: {path.name} cannot be read ({error.strerror}); "
            "set model to a folder with config.json, *.safetensors and tokenizer files"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); download the base model again") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, expected an object; download the base model again")
    # First: an architecture unknown to transformers too is refused in our words.
    _declared(values.get("architectures"), values.get("model_type"))
    try:
        hf_config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    except Exception as error:
        # Validation in transformers raises types of several libraries.
        raise ConfigError(f"{path} is not a configuration transformers can read: {error}") from error
    return hf_config


def architecture_for(hf_config: PreTrainedConfig) -> Architecture:
    """The declaration of a checkpoint's architecture.

    Raises:
        UnsupportedModel: it is not declared; the message names it and those that are.
    """
    return _declared(hf_config.architectures, hf_config.model_type)


def decoder_config(hf_config: PreTrainedConfig) -> DecoderConfig:
    """What the decoder must compute for a checkpoint.

    Raises:
        UnsupportedModel: the architecture is not declared, or the configuration asks for mathematics this server does
            not have; both are named.
    """
    architecture = architecture_for(hf_config)
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    features = architecture.features(hf_config)
    _check_features(architecture, hf_config, features, head_dim)
    frequencies, scale = _rotary(hf_config, head_dim)
    return DecoderConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=hf_config.rms_norm_eps,
        tied_head=hf_config.tie_word_embeddings,
        rotary_frequencies=frequencies,
        rotary_scale=scale,
        max_model_len=hf_config.max_position_embeddings,
        targets=architecture.targets,
        **features,
    )


def _declared(names: list[str] | None, model_type: str | None) -> Architecture:
    for name in names or ():
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(names or ()) or f"of model_type {model_type!r}, with no architecture named"
    raise UnsupportedModel(
        f"the base model is {found}; this server runs {', '.join(ARCHITECTURES)}: set model to one of these"
    )


def _check_features(
    architecture: Architecture, hf_config: PreTrainedConfig, features: Mapping[str, Any], head_dim: int
) -> None:
    rope = hf_config.rope_parameters
    quantization = getattr(hf_config, "quantization_config", None) or {}
    rope_type, activation = rope.get("rope_type"), features["activation"]
    for is_served, found, expected in (
        (not quantization, f"quantization_config {_first(quantization)}", "a checkpoint in bf16, fp16 or fp32"),
        (activation in ACTIVATIONS, f"hidden_act {activation!r}", ", ".join(ACTIVATIONS)),
        (rope_type in _ROPE_TYPES, f"rope_type {rope_type!r}", ", ".join(_ROPE_TYPES)),
        (rope.get("partial_rotary_factor", 1) == 1, "a partial_rotary_factor in rope_parameters", "1"),
        (head_dim % 2 == 0, f"head_dim {head_dim}", "an even number"),
    ):
        if not is_served:
            raise UnsupportedModel(
                f"the base model has {found}, which this server does not compute for {architecture.name}; "
                f"expected {expected}"
            )


def _rotary(hf_config: PreTrainedConfig, head_dim: int) -> tuple[tuple[float, ...], float]:
    rope_type = hf_config.rope_parameters["rope_type"]
    if rope_type == "default":
        # transformers has this one in each model's file, not in its table.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return tuple((1.0 / hf_config.rope_parameters["rope_theta"] ** exponents).tolist()), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](hf_config)
    return tuple(frequencies.tolist()), float(scale)


def _first(quantization: Any) -> str:
    values = quantization if isinstance(quantization, dict) else vars(quantization)
    return repr(values.get("quant_method", "unknown"))
