"""One GGUF file of SmolLM2 to a plain Hugging Face folder. Run as a script: `gguf_checkpoint.py FILE FOLDER`."""

import shutil
import sys
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def dequantise(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of `gguf` to `folder`, as bf16 safetensors with every file that loading needs.

    Weights are dequantised to fp32 and rounded once to bf16.
    """
    _load_model(gguf).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers reads the vocabulary but not `tokenizer.ggml.pre`, and would merge the spaces before a digit wrongly.
    # "smollm" means: split off each digit, then GPT-2's rule.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # Not in the GGUF either; without it the tokenizer claims to take 10**30 tokens.
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)
    # safetensors makes its file private; let whoever reads the configuration read the weights too.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def _load_model(gguf: Path) -> LlamaForCausalLM:
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A model loaded from GGUF refuses to be saved, so its weights move to a fresh one.
    values = quantised.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        values.pop(key, None)
    # GGUF keeps it as a float32, which reads back as 9.99999974e-06.
    values["rms_norm_eps"] = 1e-5
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.bfloat16()
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    return model


if __name__ == "__main__":
    dequantise(Path(sys.argv[1]), Path(sys.argv[2]))
