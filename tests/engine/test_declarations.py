"""What declarations make of configurations: what is read, what is refused, and that nothing is left out."""

import json
import math
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from lora_core.engine.end_of_text import eos_token_ids
from lora_core.errors import UnsupportedModel
from lora_core.models.architectures import ARCHITECTURES, decoder_config, read_hf_config
from tests.factories import TINY_SETTINGS, edit_config, reference_model, tiny_model

DOCS = Path(__file__).parents[2] / "docs" / "architectures.md"


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 2}, r"layer_types .*expected None"),
        ("MistralForCausalLM", {"sliding_window": 0}, r"sliding_window 0.*expected a positive number"),
        ("MistralForCausalLM", {"is_causal": False}, r"is_causal False.*MistralForCausalLM; expected None or True"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types chunked_attention"),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": False, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types sliding_attention.*expected full_attention in each layer",
        ),
        (
            "SmolLM3ForCausalLM",
            {"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types sliding_attention",
        ),
        ("Qwen3ForCausalLM", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu'"),
        ("Qwen3ForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5.*expected 1"),
        (
            "Qwen3ForCausalLM",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config 'fp8'.*setting engine.quantization",
        ),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu_fast"}, "hidden_activation 'gelu_fast'"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (
            "Gemma3ForCausalLM",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "rope_type 'proportional'",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2}},
            "partial_rotary_factor 0.2.*expected an even share",
        ),
        ("GraniteForCausalLM", {"per_layer_config": {"0": {"intermediate_size": 8}}}, "is_heterogeneous True"),
        ("LlamaForCausalLM", {"architectures": ["MixtralForCausalLM"]}, r"is MixtralForCausalLM; this server runs .*"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    architecture: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = tiny_model(tmp_path, architecture)
    decoder_config(read_hf_config(base))
    edit_config(base, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        decoder_config(read_hf_config(base))


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "num_hidden_layers": 32,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "Phi-3-mini-128k-instruct": {
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "model_type": "phi3",
        "hidden_size": 3072,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.1] * 48, "long_factor": [9.0] * 48},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_hidden_layers": 36,
        "pretraining_tp": 2,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
}
"""What hubs have under these names, less some fields that change nothing here; written by older transformers."""


@pytest.mark.parametrize(
    ("name", "windows", "num_unrotated", "max_model_len", "slowest", "scale"),
    [
        ("Llama-3.2-1B", {None: 16}, 0, 131072, [500000 ** -(62 / 64) / 32], 1),
        ("Mistral-7B-v0.1", {4096: 32}, 0, 32768, [10000 ** -(126 / 128)], 1),
        ("Qwen2.5-0.5B", {None: 24}, 0, 32768, [1e6 ** -(62 / 64)], 1),
        ("gemma-3-1b-it", {512: 22, None: 4}, 0, 32768, [1e6 ** -(254 / 256), 1e4 ** -(254 / 256)], 1),
        (
            "Phi-3-mini-128k-instruct",
            {262144: 32},
            0,
            4096,
            [10000 ** -(94 / 96) / 1.1],
            (1 + math.log(32) / math.log(4096)) ** 0.5,
        ),
        ("SmolLM3-3B", {None: 36}, 9, 65536, [5e6 ** -(126 / 128)], 1),
    ],
)
def test_published_configurations(
    name: str,
    windows: dict[int | None, int],
    num_unrotated: int,
    max_model_len: int,
    slowest: list[float],
    scale: float,
    tmp_path: Path,
) -> None:
    """Fields as older transformers wrote them mean what they meant."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = decoder_config(read_hf_config(tmp_path))
    assert Counter(layer.window for layer in config.layers) == windows
    assert [layer.rotary for layer in config.layers].count(None) == num_unrotated
    assert config.max_model_len == max_model_len
    assert [table.frequencies[-1] for table in config.rotary_tables] == pytest.approx(slowest)
    assert [table.scale for table in config.rotary_tables] == pytest.approx([scale] * len(slowest))


def test_an_undeclared_architecture_is_told_what_is_served_and_how_to_add_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}))
    with pytest.raises(UnsupportedModel) as refusal:
        read_hf_config(tmp_path)
    assert "OlmoForCausalLM" in str(refusal.value)
    assert all(name in str(refusal.value) for name in ARCHITECTURES)
    assert "docs/architectures.md" in str(refusal.value)
    assert DOCS.is_file()


def test_the_page_on_adding_one_shows_the_code_as_it_is() -> None:
    """Lines that its diffs add are in the files they name."""
    text = DOCS.read_text()
    checked = set()
    for block in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("+++ b/"):
                name = line.removeprefix("+++ b/")
                lines = (DOCS.parents[1] / name).read_text().splitlines()
                checked.add(name)
            elif line.startswith("+"):
                assert line[1:] in lines, f"{name} has no line {line[1:]!r}"
    assert len(checked) == 5
    assert all(f"`{name}`" in text for name in ARCHITECTURES)


# Fields of configurations that change no logit: special tokens, training, storage, and what follows from others.
IRRELEVANT = {
    *("pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "output_hidden_states", "return_dict"),
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "initializer_range", "problem_type", "id2label", "label2id"),
    *("transformers_version", "dtype", "pretraining_tp", "chunk_size_feed_forward", "is_encoder_decoder"),
    # These give `layer_types` and `no_rope_layers`, which are read.
    *("max_window_layers", "no_rope_layer_interval"),
    # transformers copies it into `rope_parameters`, which are read.
    "original_max_position_embeddings",
}


class Recorder:
    """A configuration that remembers which of its fields were read."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.config, name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_field_of_the_configuration_is_accounted_for(architecture: str) -> None:
    """A field that a later transformers adds is read, or named irrelevant, before its models are served."""
    config_class = getattr(transformers, architecture).config_class
    names = {field.name for field in fields(config_class)}
    # Switched off, it hides the window.
    switches = {"use_sliding_window": True} if "use_sliding_window" in names else {}
    recorder: Any = Recorder(config_class(architectures=[architecture], **switches))
    decoder_config(recorder)
    assert names - recorder.read - IRRELEVANT == set()


@pytest.mark.parametrize("architecture", TINY_SETTINGS)
def test_end_of_text_ids_come_from_the_generation_config_or_else_the_config(architecture: str, tmp_path: Path) -> None:
    base = tiny_model(tmp_path, architecture, eos_token_id=[7, 9])
    assert eos_token_ids(base) == {7, 9}
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 3]}))
    assert eos_token_ids(base) == {11, 3}
    (base / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 64, "top_p": 0.95}))
    assert eos_token_ids(base) == {7, 9}
    (base / "generation_config.json").unlink()
    edit_config(base, eos_token_id=5)
    assert eos_token_ids(base) == {5}


def test_tiny_models_cover_every_declaration() -> None:
    assert TINY_SETTINGS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_targets_cover_every_linear_layer_of_a_decoder_layer(architecture: str, tmp_path: Path) -> None:
    base = tiny_model(tmp_path, architecture)
    model = reference_model(base)
    (stack,) = (module for name, module in model.named_modules() if name.endswith("layers"))
    found = {
        name: tuple(module.weight.shape)
        for name, module in stack[0].named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    config = decoder_config(AutoConfig.from_pretrained(base))
    covered = [path for target in config.targets if target.kind == "layer" for path in target.siblings()]
    assert sorted(covered) == sorted(found)
    assert {path.rpartition(".")[2]: shape for path, shape in found.items()}.items() <= config.projections.items()
