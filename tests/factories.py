"""Tiny models and adapters for tests, made by transformers and PEFT, and their answers as the truth to compare with."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_TARGETS = (*ATTENTION_TARGETS, "gate_proj", "up_proj", "down_proj")
FUSED_LINEAR_TARGETS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")

TINY_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 20},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"head_dim": 24},
    "Gemma2ForCausalLM": {
        "head_dim": 16,
        "sliding_window": 20,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.0,
    },
    "Gemma3ForCausalLM": {
        "head_dim": 16,
        "sliding_window": 20,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 2000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "Phi3ForCausalLM": {
        "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [4.0, 4.0, 4.0, 4.0],
        },
    },
    "GraniteForCausalLM": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    },
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0]},
}
"""The architectures `tiny_model` makes, with fields of their configurations under which what sets them apart shows."""


def linear_targets(architecture: str) -> tuple[str, ...]:
    """All linear layers of a decoder layer, by the names PEFT finds them under."""
    return FUSED_LINEAR_TARGETS if architecture == "Phi3ForCausalLM" else LINEAR_TARGETS


def tiny_llama(folder: Path, **settings: Any) -> Path:
    """`tiny_model` of a plain Llama."""
    return tiny_model(folder, "LlamaForCausalLM", **settings)


def tiny_model(
    folder: Path,
    architecture: str,
    *,
    tied: bool = True,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 96,
    vocab: int = 128,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Save a random fp32 model without a tokenizer, and return its folder.

    Args:
        folder: Where to save it; made if absent.
        architecture: A key of `TINY_SETTINGS`.
        config: Further fields of the architecture's configuration, e.g. `head_dim`, `rope_parameters`; those of
            `TINY_SETTINGS` hold where they are not given.
    """
    model_class = getattr(transformers, architecture)
    settings: dict[str, Any] = {
        "max_position_embeddings": 512,
        # Wide enough that greedy answers wander instead of repeating one token, so that a fault can show in them.
        "initializer_range": 0.2,
        # Nothing stops an answer early: every id of so small a vocabulary comes up by chance.
        "bos_token_id": None,
        "eos_token_id": None,
        # By default some are past so small a vocabulary.
        "pad_token_id": None,
        **TINY_SETTINGS[architecture],
        **config,
    }
    model_config = model_class.config_class(
        tie_word_embeddings=tied,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(model_config)
        # Biases and norms start at 0 or 1, values that hide a missing bias or norm weight.
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(parameter, mean=float(parameter.detach()[0]), std=0.1)
        if hasattr(model.model.embed_tokens, "embed_scale"):
            # Else the scaled embeddings outweigh what the layers add, and answers repeat one token.
            model.model.embed_tokens.weight.data /= 4
    model.save_pretrained(folder)
    return folder


def edit_config(base: Path, **fields: Any) -> None:
    """Set fields of a checkpoint's config.json, or with None remove them."""
    path = base / "config.json"
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def make_adapter(
    base: Path,
    folder: Path,
    *,
    r: int = 4,
    alpha: float = 8,
    targets: Sequence[str] | str = LINEAR_TARGETS,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    use_rslora: bool = False,
    std: float = 0.1,
    save_embedding_layers: bool | str = "auto",
    **config: Any,
) -> Path:
    """Save a PEFT adapter of `base` with random A and B, and return its folder.

    Args:
        targets: PEFT's `target_modules`: names, a regex, or "all-linear".
        dtype: Data type of the saved tensors.
        std: Standard deviation of both A and B, and relative to its own value of DoRA's magnitude; the default visibly
            changes greedy answers of `tiny_model`.
        save_embedding_layers: As PEFT's `save_pretrained` takes it.
        config: Further fields of `LoraConfig`, e.g. `rank_pattern`, `layers_to_transform`.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    target_modules = targets if isinstance(targets, str) else list(targets)
    lora_config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        target_modules=target_modules,
        use_rslora=use_rslora,
        task_type="CAUSAL_LM",
        **config,
    )
    with _tied_layers_adapted_apart():
        adapted = get_peft_model(model, lora_config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator).mul_(std)
                parameter.data = (parameter * (1 + noise) if "magnitude" in name else noise).detach().to(dtype)
        adapted.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    return folder


def reference_model(base: Path, adapter: Path | None = None) -> torch.nn.Module:
    """The base model through transformers, with the adapter through PEFT: fp32, in evaluation mode."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        with _tied_layers_adapted_apart():
            model = PeftModel.from_pretrained(model, adapter)
    return model.eval()


@contextmanager
def _tied_layers_adapted_apart() -> Iterator[None]:
    """PEFT warns of adapters of an embedding or a head that are tied, and of the copies it saves with them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def reference_logits(base: Path, adapter: Path | None, token_ids: Sequence[int]) -> Tensor:
    """fp32 logits `[len(token_ids), vocab]` after each token."""
    with torch.inference_mode():
        output = reference_model(base, adapter)(input_ids=torch.tensor([list(token_ids)]))
    logits: Tensor = output.logits[0]
    return logits


def reference_tokens(base: Path, adapter: Path | None, prompt: Sequence[int], n: int) -> list[int]:
    """The `n` tokens that greedily follow `prompt`, in fp32."""
    model = reference_model(base, adapter)
    token_ids = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            # The whole text each time: nothing here depends on a KV cache being right.
            logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits
            token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[len(prompt) :]
