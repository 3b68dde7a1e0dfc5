"""Tensor keys as PEFT and other training tools write them, taken apart."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lora_core.errors import InvalidAdapter
from lora_core.tensor_keys import parse_copy_key, parse_tensor_key, parse_whole_weight_key
from lora_core.types import LoRAType
from tests.unit.adapter_folders import edit_config, edit_weights, load, rename, same_modules

Q = "base_model.model.model.layers.3.self_attn.q_proj"


@pytest.fixture
def folder(tiny_adapters: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_adapters["linear-r4"], tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("key", "module", "part", "trained_as", "adapter"),
    [
        (f"{Q}.lora_A.weight", "layers.3.self_attn.q_proj", LoRAType.A, "model.layers.3.self_attn.q_proj", ""),
        (f"{Q}.lora_B.x.weight", "layers.3.self_attn.q_proj", LoRAType.B, "model.layers.3.self_attn.q_proj", "x"),
        (f"{Q}.lora_magnitude_vector", "layers.3.self_attn.q_proj", LoRAType.GAIN, Q.partition("l.")[2][6:], ""),
        ("layers.0.mlp.up_proj.lora_A.weight", "layers.0.mlp.up_proj", LoRAType.A, "layers.0.mlp.up_proj", ""),
        ("base_model.model.lm_head.lora_A.weight", "lm_head", LoRAType.A, "lm_head", ""),
        ("base_model.model.model.embed_tokens.lora_embedding_B", "embed_tokens", LoRAType.B, "model.embed_tokens", ""),
        (
            "_orig_mod.module.base_model.model._fsdp_wrapped_module.model.layers.7._checkpoint_wrapped_module.mlp."
            "_orig_mod.down_proj.lora_B.default.weight",
            "layers.7.mlp.down_proj",
            LoRAType.B,
            "model.layers.7.mlp.down_proj",
            "default",
        ),
    ],
)
def test_a_key_taken_apart(key: str, module: str, part: LoRAType, trained_as: str, adapter: str) -> None:
    parsed = parse_tensor_key(key)
    assert parsed is not None
    assert (parsed.key, parsed.module.name, parsed.part) == (key, module, part)
    assert parsed.trained_as == trained_as.removeprefix("base_model.")
    assert parsed.adapter == adapter


@pytest.mark.parametrize(
    "key",
    [
        f"{Q}.lora_A",
        f"{Q}.lora_A.a.b.weight",
        f"{Q}.lora_A.bias",
        f"{Q}.lora_E.weight",
        f"{Q}.base_layer.weight",
        "lora_A.weight",
        "model.layers.lora_A.weight",
        "model.layers.1.lora_A.weight",
        "model.layers.01.mlp.up_proj.lora_A.weight",
        "model.layers.1234567.mlp.up_proj.lora_A.weight",
        "model.layers.².mlp.up_proj.lora_A.weight",
        "vision_tower.layers.1.mlp.up_proj.lora_A.weight",
        "model.score.lora_A.weight",
        "",
        ".",
        "module",
    ],
)
def test_no_tensor_of_a_known_module(key: str) -> None:
    assert parse_tensor_key(key) is None


def test_base_weights() -> None:
    copy = parse_copy_key("module.base_model.model.lm_head.base_layer.weight")
    assert copy is not None
    assert (copy.name, copy.layer) == ("lm_head", None)
    norm = parse_copy_key("base_model.model.model.norm.base_layer.weight")
    assert norm is not None
    assert norm.layer is None
    assert parse_copy_key("lm_head.weight") is None
    whole = parse_whole_weight_key("base_model.model.model.embed_tokens.weight")
    assert whole is not None
    assert whole.name == "embed_tokens"
    assert parse_whole_weight_key(f"{Q}.weight") is None
    assert parse_whole_weight_key("base_model.model.model.norm.weight") is None


@pytest.mark.parametrize(
    "renamed",
    [
        lambda key: f"_orig_mod.{key}",
        lambda key: f"module.{key}",
        lambda key: f"_forward_module.{key}",
        lambda key: key.replace("base_model.model.", "base_model.model._orig_mod."),
        lambda key: key.replace("base_model.model.", "base_model.model.base_model.model."),
        lambda key: key.replace("model.layers", "model._fsdp_wrapped_module.layers"),
        lambda key: key.replace(".self_attn", "._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn"),
        lambda key: key.replace(".lora_", ".module.lora_"),
        lambda key: key.replace("lora_A.weight", "lora_A.default._orig_mod.weight"),
    ],
)
def test_wrappers_may_stand_anywhere(folder: Path, renamed: Callable[[str], str]) -> None:
    edit_config(folder, rank_pattern={"^model.layers.0.self_attn.q_proj": 4}, alpha_pattern={"^model.layers.1.mlp": 7})
    plain = load(folder)
    assert same_modules(load(rename(folder, renamed)), plain)


def test_two_keys_of_one_module_are_refused(folder: Path) -> None:
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for wrapped in (f"_orig_mod.{key}", key.replace("self_attn", "module.self_attn"), key.removeprefix("base_model.")):
        edit_weights(folder, lambda tensors, twin=wrapped: tensors.update({twin: torch.ones(4, 64)}))  # type: ignore[misc]
        with pytest.raises(
            InvalidAdapter, match=r"are the same part of one module; expected one, or equal tensors"
        ) as error:
            load(folder)
        assert key in str(error.value)
        assert wrapped in str(error.value)
        edit_weights(folder, lambda tensors, twin=wrapped: {k: t for k, t in tensors.items() if k != twin})  # type: ignore[misc]
