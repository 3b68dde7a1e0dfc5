"""The base models this server can run: one declaration for each architecture of transformers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lora_core.errors import ConfigError, UnsupportedModel
from lora_core.models.activations import ACTIVATIONS
from lora_core.models.decoder import DecoderConfig, LayerConfig
from lora_core.models.rotary import RotaryTable
from lora_core.targets import FUSED_TARGETS, LLAMA_TARGETS, LoRATargetModule

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"is_causal": (None, True), "is_heterogeneous": (None, False)}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family of models.

    Attributes:
        name: As in `architectures` of a checkpoint's config.json.
        targets: The layers that adapters may change.
        features: Maps the checkpoint's configuration to those fields of `DecoderConfig` in which the family differs
            from the plain decoder: no biases, one norm before attention and one before the MLP, every layer rotated and
            attending to all of the past.
        partial_rotary: `partial_rotary_factor` turns the first channels of each head only.
        neutral: Fields of the configuration that stand for mathematics this server does not have, with the values under
            which they change nothing; any other value is refused.
    """

    name: str
    targets: tuple[LoRATargetModule, ...] = LLAMA_TARGETS
    features: Callable[[PreTrainedConfig], Mapping[str, Any]]
    partial_rotary: bool = False
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


LLAMA = Architecture(
    name="LlamaForCausalLM",
    features=lambda config: {
        "qkv_bias": config.attention_bias,
        "output_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    },
)

MISTRAL = Architecture(
    name="MistralForCausalLM",
    features=lambda config: {"layers": _uniform_layers(config)},
    # transformers computes one window for all layers whatever this says.
    neutral={"layer_types": (None,)},
)

QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    features=lambda config: {"qkv_bias": True, "layers": _layers_by_type(config)},
)

QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    features=lambda config: {
        "qkv_bias": config.attention_bias,
        "output_bias": config.attention_bias,
        "qk_norm": True,
        "layers": _layers_by_type(config),
    },
)

GEMMA2 = Architecture(
    name="Gemma2ForCausalLM",
    features=lambda config: {
        **_gemma_features(config),
        "layers": _layers_by_type(config),
        "score_softcap": config.attn_logit_softcapping,
    },
    neutral={"use_bidirectional_attention": (None, False)},
)

GEMMA3 = Architecture(
    name="Gemma3ForCausalLM",
    features=lambda config: {
        **_gemma_features(config),
        "qk_norm": True,
        "layers": _layers_by_type(config, rotary_of_type=_rotary_types(config).index),
        "rotary_tables": tuple(_rotary_table(config, layer_type) for layer_type in _rotary_types(config)),
    },
    # transformers has the soft cap among the settings and does not compute it.
    neutral={"use_bidirectional_attention": (None, False), "attn_logit_softcapping": (None,)},
)

PHI3 = Architecture(
    name="Phi3ForCausalLM",
    targets=FUSED_TARGETS,
    features=lambda config: {"layers": _uniform_layers(config)},
    partial_rotary=True,
)

GRANITE = Architecture(
    name="GraniteForCausalLM",
    features=lambda config: {
        **LLAMA.features(config),
        "attention_scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_divisor": config.logits_scaling,
    },
)

SMOLLM3 = Architecture(
    name="SmolLM3ForCausalLM",
    features=lambda config: {
        **LLAMA.features(config),
        "layers": tuple(
            layer if has_rotary else LayerConfig(window=layer.window, rotary=None)
            for layer, has_rotary in zip(_layers_by_type(config), config.no_rope_layers, strict=False)
        ),
    },
)

ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture
    for architecture in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, GRANITE, SMOLLM3)
}

# Of these, "dynamic" and "longrope" change their frequencies with the length of the text, from some length on; this
# server stops there.
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


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
    _check_neutral(architecture, hf_config)
    plain = {
        "attention_scale": _head_dim(hf_config) ** -0.5,
        "layers": (LayerConfig(),) * hf_config.num_hidden_layers,
    }
    fields = {**plain, **architecture.features(hf_config)}
    if "activation" not in fields:
        fields["activation"] = _activation(hf_config, "hidden_act")
    if "rotary_tables" not in fields:
        fields["rotary_tables"] = (_rotary_table(hf_config),)
    return DecoderConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=_head_dim(hf_config),
        norm_eps=hf_config.rms_norm_eps,
        tied_head=hf_config.tie_word_embeddings,
        max_model_len=_max_model_len(hf_config),
        targets=architecture.targets,
        **fields,
    )


def _declared(names: list[str] | None, model_type: str | None) -> Architecture:
    for name in names or ():
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(names or ()) or f"of model_type {model_type!r}, with no architecture named"
    raise UnsupportedModel(
        f"the base model is {found}; this server runs {', '.join(ARCHITECTURES)}: set model to one of these, "
        "or declare the architecture as docs/architectures.md shows"
    )


def _require(is_served: bool, hf_config: PreTrainedConfig, found: str, expected: str) -> None:
    if not is_served:
        raise UnsupportedModel(
            f"the base model has {found}, which this server does not compute for {architecture_for(hf_config).name}; "
            f"expected {expected}"
        )


def _check_neutral(architecture: Architecture, hf_config: PreTrainedConfig) -> None:
    quantization = getattr(hf_config, "quantization_config", None) or {}
    _require(
        not quantization,
        hf_config,
        f"quantization_config {_first(quantization)}",
        "a checkpoint in bf16, fp16 or fp32, which the setting engine.quantization quantises at start",
    )
    for name, values in {**_NEUTRAL, **architecture.neutral}.items():
        found = getattr(hf_config, name, None)
        _require(found in values, hf_config, f"{name} {found!r}", " or ".join(map(repr, values)))


def _first(quantization: Any) -> str:
    values = quantization if isinstance(quantization, dict) else vars(quantization)
    return repr(values.get("quant_method", "unknown"))


def _gemma_features(config: PreTrainedConfig) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    return {
        # There may be a `hidden_act` too, which is of no effect.
        "activation": _activation(config, "hidden_activation"),
        "qkv_bias": config.attention_bias,
        "output_bias": config.attention_bias,
        "norm_offset": True,
        "sandwich_norms": True,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "embedding_scale": config.hidden_size**0.5,
        "embedding_scale_rounded": True,
        "logit_softcap": config.final_logit_softcapping,
    }


def _activation(config: PreTrainedConfig, name: str) -> str:
    activation: str = getattr(config, name)
    # One function of two names; the gated kernels know it by this one.
    activation = "silu" if activation == "swish" else activation
    _require(activation in ACTIVATIONS, config, f"{name} {activation!r}", ", ".join(ACTIVATIONS))
    return activation


def _head_dim(config: PreTrainedConfig) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    _require(head_dim % 2 == 0, config, f"head_dim {head_dim}", "an even number")
    return head_dim


def _uniform_layers(config: PreTrainedConfig) -> tuple[LayerConfig, ...]:
    """All layers with the configuration's window, if it has one."""
    return (LayerConfig(_window(config)),) * int(config.num_hidden_layers)


def _layers_by_type(
    config: PreTrainedConfig, rotary_of_type: Callable[[str], int] = lambda layer_type: 0
) -> tuple[LayerConfig, ...]:
    """The layers as `layer_types` declares them: with a window, or attending to all of the past."""
    # A window that is switched off leaves no layer type that would need it.
    window = _window(config) if getattr(config, "use_sliding_window", True) else None
    windows: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        windows["sliding_attention"] = window
    unserved = sorted(set(config.layer_types) - windows.keys())
    _require(not unserved, config, f"layer_types {', '.join(unserved)}", f"{' or '.join(windows)} in each layer")
    return tuple(LayerConfig(windows[layer_type], rotary_of_type(layer_type)) for layer_type in config.layer_types)


def _window(config: PreTrainedConfig) -> int | None:
    window: int | None = config.sliding_window
    _require(window is None or window > 0, config, f"sliding_window {window}", "a positive number, or none")
    return window


def _rotary_types(config: PreTrainedConfig) -> list[str]:
    """The layer types, each of which has rotary parameters of its own."""
    return sorted(set(config.layer_types))


def _rotary_table(config: PreTrainedConfig, layer_type: str | None = None) -> RotaryTable:
    """The rotation that `rope_parameters` describes, for all layers or for those of one type."""
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    rope_type = parameters.get("rope_type")
    _require(rope_type in _ROPE_TYPES, config, f"rope_type {rope_type!r}", ", ".join(_ROPE_TYPES))
    factor = parameters.get("partial_rotary_factor", 1)
    num_rotated = int(_head_dim(config) * factor)
    if architecture_for(config).partial_rotary:
        is_served, expected = factor <= 1 and num_rotated > 0 and num_rotated % 2 == 0, "an even share of head_dim"
    else:
        is_served, expected = factor == 1, "1"
    _require(is_served, config, f"partial_rotary_factor {factor} in rope_parameters", expected)
    if rope_type == "default":
        # transformers has this one in each model's file, not in its table.
        exponents = torch.arange(0, num_rotated, 2, dtype=torch.float32) / num_rotated
        return RotaryTable(tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()))
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, layer_type=layer_type)
    return RotaryTable(tuple(frequencies.tolist()), float(scale))


def _max_model_len(config: PreTrainedConfig) -> int:
    """Where the model ends, or before it the length from which "longrope" takes other frequencies."""
    parameters = config.rope_parameters
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    originals = [p["original_max_position_embeddings"] for p in nested if p.get("rope_type") == "longrope"]
    return int(min([config.max_position_embeddings, *originals]))
