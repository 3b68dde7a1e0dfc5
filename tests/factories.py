"""Tiny models and adapters for tests, made by transformers and PEFT, and their answers as the truth to compare with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_TARGETS = (*ATTENTION_TARGETS, "gate_proj", "up_proj", "down_proj")


def tiny_llama(
    folder: Path,
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
    """Save a random fp32 Llama without a tokenizer, and return its folder.

    Args:
        folder: Where to save it; made if absent.
        config: Further fields of `LlamaConfig`, e.g. `head_dim`, `rope_parameters`, `attention_bias`.
    """
    settings: dict[str, Any] = {
        "max_position_embeddings": 512,
        # Wide enough that greedy answers wander instead of repeating one token, so that a fault can show in them.
        "initializer_range": 0.2,
        # Nothing stops an answer early: every id of so small a vocabulary comes up by chance.
        "bos_token_id": None,
        "eos_token_id": None,
        **config,
    }
    llama_config = LlamaConfig(
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
        model = LlamaForCausalLM(llama_config)
        # Biases and norms start at 0 and 1, values that hide a missing bias or norm weight.
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    model.save_pretrained(folder)
    return folder


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
    **config: Any,
) -> Path:
    """Save a PEFT adapter of `base` with random A and B, and return its folder.

    Args:
        targets: PEFT's `target_modules`: names, a regex, or "all-linear".
        dtype: Data type of the saved tensors.
        std: Standard deviation of both A and B; the default visibly changes greedy answers of `tiny_llama`.
        config: Further fields of `LoraConfig`, e.g. `rank_pattern`, `layers_to_transform`.
    """
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    target_modules = targets if isinstance(targets, str) else list(targets)
    lora_config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        target_modules=target_modules,
        use_rslora=use_rslora,
        task_type="CAUSAL_LM",
        **config,
    )
    adapted = get_peft_model(model, lora_config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).mul_(std).to(dtype)
    adapted.save_pretrained(folder)
    return folder


def reference_model(base: Path, adapter: Path | None = None) -> torch.nn.Module:
    """The base model through transformers, with the adapter through PEFT: fp32, in evaluation mode."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    return model.eval()


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
