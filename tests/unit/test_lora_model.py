"""From a PEFT folder to checked tensors: equal to PEFT's delta weights, or refused with the reason."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_core.errors import InvalidAdapter, InvalidAdapterPath
from lora_core.model import LoRAModel
from tests.factories import ATTENTION_TARGETS, LINEAR_TARGETS, make_adapter, reference_model, tiny_llama
from tests.unit.adapter_folders import (
    LINEAR_PROJECTIONS,
    PROJECTIONS,
    WEIGHTS,
    drop,
    edit_config,
    edit_weights,
    load,
    rename,
)

PATHS = tuple(
    f"{'mlp' if name in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'}.{name}" for name in LINEAR_PROJECTIONS
)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def deltas(adapter: LoRAModel) -> dict[str, Tensor]:
    """`B @ A` of each module, in fp32."""
    return {
        module: adapter.lora_B[f"{module}.lora_B.weight"].float() @ adapter.lora_A[f"{module}.lora_A.weight"].float()
        for module in adapter.ranks
    }


def peft_deltas(base: Path, folder: Path) -> dict[str, Tensor]:
    """Delta weight of each module that PEFT adapts, by its name from `layers` on."""
    prefix = "base_model.model.model."
    return {
        name.removeprefix(prefix): module.get_delta_weight("default").detach()
        for name, module in reference_model(base, folder).named_modules()
        if hasattr(module, "get_delta_weight")
    }


def assert_equals_peft(adapter: LoRAModel, base: Path, folder: Path) -> None:
    ours, theirs = deltas(adapter), peft_deltas(base, folder)
    assert ours.keys() == theirs.keys()
    for module, delta in theirs.items():
        assert delta.abs().max() > 0.01, module
        torch.testing.assert_close(ours[module], delta, rtol=1e-5, atol=1e-6, msg=module)


@pytest.fixture
def folder(tiny_adapters: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of an adapter of every linear layer, rank 4, to be spoiled."""
    return Path(shutil.copytree(tiny_adapters["linear-r4"], tmp_path / "adapter"))


# What loads


@pytest.mark.parametrize(
    "settings",
    [
        {"targets": ATTENTION_TARGETS},
        {"targets": LINEAR_TARGETS},
        {"targets": "all-linear"},
        {"targets": r".*\.(q_proj|up_proj)"},
        {"targets": ("q_proj", "up_proj"), "use_rslora": True},
        {"targets": LINEAR_TARGETS, "rank_pattern": {"q_proj": 1, "layers.1.mlp.up_proj": 7}},
        {"targets": LINEAR_TARGETS, "rank_pattern": {"^model.layers.0.self_attn.v_proj": 2, r".*\.1\.mlp\..*": 3}},
        {"targets": LINEAR_TARGETS, "alpha_pattern": {"o_proj": 3, r"layers\.0\.mlp\.down_proj": 40}},
        {"use_rslora": True, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 5, "self_attn.q_proj": 1}},
        {"targets": ("q_proj", "v_proj"), "layers_to_transform": [0]},
        {"targets": LINEAR_TARGETS, "exclude_modules": ["k_proj"]},
        {"targets": ("v_proj",), "alpha": -3},
        {"init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_equals_pefts_delta_weights(tiny_base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    make_adapter(tiny_base, tmp_path, seed=5, **settings)
    adapter = load(tmp_path)
    assert_equals_peft(adapter, tiny_base, tmp_path)
    for module, rank in adapter.ranks.items():
        a, b = adapter.lora_A[f"{module}.lora_A.weight"], adapter.lora_B[f"{module}.lora_B.weight"]
        out_features, in_features = PROJECTIONS[module.rpartition(".")[2]]
        assert (a.shape, b.shape) == ((16, in_features), (out_features, 16))
        assert a[:rank].any(dim=1).all()
        assert not a[rank:].any()
        assert not b[:, rank:].any()
    assert adapter.rank == max(adapter.ranks.values())


def test_what_it_exposes(folder: Path) -> None:
    adapter = load(folder)
    assert (adapter.name, adapter.path) == ("x", folder)
    assert adapter.target_modules == tuple(sorted(LINEAR_TARGETS))
    assert set(adapter.ranks) == {
        f"layers.{layer}.{'self_attn' if name in ATTENTION_TARGETS else 'mlp'}.{name}"
        for layer in range(2)
        for name in LINEAR_TARGETS
    }
    assert adapter.adapter_config["r"] == 4
    assert adapter.lora_bias == {}
    for kind, tensors in (("lora_A", adapter.lora_A), ("lora_B", adapter.lora_B)):
        assert len(tensors) == 14
        found = adapter.get(f"layers.1.mlp.up_proj.{kind}.weight")
        assert found is not None
        assert torch.equal(found, tensors[f"layers.1.mlp.up_proj.{kind}.weight"])
    assert adapter.get("layers.2.mlp.up_proj.lora_A.weight") is None
    assert not adapter.has_gain
    assert set(adapter.phases_s) == {"read", "check", "convert", "canary"}
    assert min(adapter.phases_s.values()) > 0


@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_data_types(tiny_base: Path, tmp_path: Path, file_dtype: torch.dtype, base_dtype: torch.dtype) -> None:
    """B is scaled in fp32 and every tensor is rounded once, whatever the file's type."""
    make_adapter(tiny_base, tmp_path, alpha=7, seed=6, dtype=file_dtype, targets=("q_proj", "down_proj"))
    adapter = load(tmp_path, dtype=base_dtype)
    expected_dtype = torch.bfloat16 if base_dtype is torch.float8_e4m3fn else base_dtype
    assert adapter.dtype is expected_dtype
    tensors = load_file(tmp_path / WEIGHTS)
    a, b = tensors[f"{Q}.lora_A.weight"], tensors[f"{Q}.lora_B.weight"]
    ours_a, ours_b = (
        adapter.lora_A["layers.0.self_attn.q_proj.lora_A.weight"],
        adapter.lora_B["layers.0.self_attn.q_proj.lora_B.weight"],
    )
    assert ours_a.dtype is ours_b.dtype is expected_dtype
    assert torch.equal(ours_a[:4], a.to(expected_dtype))
    assert torch.equal(ours_b[:, :4], (b.float() * 7 / 4).to(expected_dtype))


@pytest.mark.parametrize(
    "renamed",
    [
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.removeprefix("base_model.model.model."),
        lambda key: key.replace("base_model.model.", "base_model.model.model."),
        lambda key: key.replace("base_model.model.model.", "base_model.model."),
        lambda key: key.replace("base_model.model.model.", "base_model.model.model.language_model."),
        lambda key: key.replace("base_model.model.", "base_model.model.language_model."),
        lambda key: key.replace(".weight", ".default.weight"),
        lambda key: key.replace(".weight", ".my_task.weight"),
        lambda key: key.replace("lora_A.weight", "lora_A.default.weight"),
    ],
)
def test_key_forms(folder: Path, renamed: Callable[[str], str]) -> None:
    plain = load(edit_config(folder, rank_pattern={"^model.layers.0.self_attn.q_proj": 4}, lora_alpha=5))
    other = load(rename(folder, renamed))
    assert other.ranks == plain.ranks
    for key, tensor in {**plain.lora_A, **plain.lora_B}.items():
        found = other.get(key)
        assert found is not None
        assert torch.equal(found, tensor), key


@pytest.mark.parametrize(
    "pattern", [r"^model\.language_model\.layers\.0\.self_attn\.q_proj", r"^model\.layers\.0\.self_attn\.q_proj"]
)
def test_patterns_match_the_name_a_module_was_trained_as(folder: Path, pattern: str) -> None:
    """And, where no pattern fits that, the name it has in a Llama."""
    plain = load(folder)
    rename(folder, lambda key: key.replace("model.model.layers", "model.model.language_model.layers"))
    patterned = load(edit_config(folder, alpha_pattern={pattern: 80}))
    for key, tensor in plain.lora_B.items():
        factor = 10 if key.startswith("layers.0.self_attn.q_proj") else 1
        torch.testing.assert_close(patterned.lora_B[key], tensor * factor)


def test_sharded_weights(folder: Path) -> None:
    single = load(folder)
    tensors = load_file(folder / WEIGHTS)
    shards = {f"adapter_model-0000{n}-of-00002.safetensors": sorted(tensors)[n - 1 :: 2] for n in (1, 2)}
    for name, keys in shards.items():
        save_file({key: tensors[key].clone() for key in keys}, folder / name)
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()
    sharded = load(folder)
    assert sharded.ranks == single.ranks
    assert all(torch.equal(tensor, single.lora_B[key]) for key, tensor in sharded.lora_B.items())

    stale = next(iter(weight_map))
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {**weight_map, "gone": weight_map[stale]}}))
    with pytest.raises(InvalidAdapter, match=r"index.json: disagrees with its shards on gone"):
        load(folder)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"key": "../outside.safetensors"}}))
    with pytest.raises(InvalidAdapter, match=r"names '../outside.safetensors'"):
        load(folder)
    (folder / f"{WEIGHTS}.index.json").write_text("{")
    with pytest.raises(InvalidAdapter, match="not a safetensors index"):
        load(folder)
    (folder / f"{WEIGHTS}.index.json").unlink()
    with pytest.raises(
        InvalidAdapter, match=r"found adapter_model-00001.*without adapter_model.safetensors.index.json"
    ):
        load(folder)


def test_a_single_file_of_another_name(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model.safetensors")
    assert len(load(folder).ranks) == 14


def test_nothing_refers_to_the_folder_after_load(folder: Path) -> None:
    adapter = load(folder)
    before = {key: tensor.clone() for key, tensor in {**adapter.lora_A, **adapter.lora_B}.items()}
    edit_weights(folder, lambda tensors: {key: torch.full_like(tensor, 9.0) for key, tensor in tensors.items()})
    os.truncate(folder / WEIGHTS, 10)
    shutil.rmtree(folder)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(folder) not in maps.read_text()
    for key, tensor in before.items():
        found = adapter.get(key)
        assert found is not None
        assert torch.equal(found, tensor)


def test_content_hash_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    first = load(folder).content_hash
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert load(copy).content_hash == first
    edit_weights(copy, lambda tensors: tensors.update({f"{Q}.lora_A.weight": torch.ones(4, 64)}))
    second = load(copy).content_hash
    assert second != first
    assert load(edit_config(folder, lora_alpha=9)).content_hash not in (first, second)


def test_a_copy_of_a_base_weight_is_ignored(folder: Path) -> None:
    plain = load(folder)

    def add_copies(tensors: dict[str, Tensor]) -> None:
        tensors["base_model.model.lm_head.base_layer.weight"] = torch.ones(128, 64)
        tensors["base_model.model.model.embed_tokens.base_layer.weight"] = torch.ones(128, 64)
        tensors["base_model.model.model.layers.1.self_attn.k_proj.base_layer.weight"] = torch.ones(32, 64)

    edit_weights(folder, add_copies)
    assert load(folder).ranks == plain.ranks
    assert load(folder, projections=LINEAR_PROJECTIONS).ranks == plain.ranks
    with pytest.raises(InvalidAdapter, match=r"copies of base weights of another shape.*lm_head.base_layer.weight"):
        load(folder, projections={**PROJECTIONS, "lm_head": (130, 64)})


@pytest.mark.parametrize(
    ("key", "shape", "expected"),
    [
        ("base_model.model.lm_head.base_layer.weight", (128, 65), r"shape \[128, 65\], expected \[128, 64\]"),
        (
            "base_model.model.model.layers.0.self_attn.k_proj.base_layer.weight",
            (64, 64),
            r"shape \[64, 64\], expected \[32, 64\]",
        ),
        ("base_model.model.model.norm.base_layer.weight", (64,), r"shape \[64\], expected no such copy"),
    ],
)
def test_a_copy_of_another_shape_is_refused(folder: Path, key: str, shape: tuple[int, ...], expected: str) -> None:
    edit_weights(folder, lambda tensors: tensors.update({key: torch.ones(shape)}))
    with pytest.raises(InvalidAdapter, match=rf"copies of base weights of another shape.*{key} \({expected}\)"):
        load(folder)


def test_excluded_layers_equal_the_base(folder: Path) -> None:
    """Tensors of layers that the config does not transform are left out, as PEFT leaves them out."""
    edit_config(folder, layers_to_transform=[1], target_modules=list(LINEAR_TARGETS))
    assert {module.split(".")[1] for module in load(folder).ranks} == {"1"}
    edit_config(folder, layers_to_transform=[7])
    with pytest.raises(InvalidAdapter, match=r"no tensor of the adapter applies.*layers_to_transform is \[7\]"):
        load(folder)


def test_a_partial_file_is_an_adapter_of_what_is_in_it(folder: Path) -> None:
    edit_weights(folder, lambda tensors: {key: t for key, t in tensors.items() if "v_proj" in key or "up_proj" in key})
    assert load(folder).target_modules == ("up_proj", "v_proj")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"target_modules": ["q_proj"]}, "target_modules is ['q_proj'], and the file holds tensors of layers."),
        ({"target_modules": ["q_proj", "proj"]}, "and 9 more"),
        ({"target_modules": "q_proj"}, "target_modules is 'q_proj'"),
        ({"target_modules": "gate_proj"}, "and 11 more"),
        ({"target_modules": ["x_proj"]}, "and 11 more"),
        ({"target_modules": r"layers\..*"}, "and 11 more"),
        ({"target_modules": r"model\.layers\.\d\..*[qkvope]_proj"}, "down_proj"),
        ({"target_modules": "all-linear", "exclude_modules": ["v_proj"]}, "exclude_modules is ['v_proj']"),
        ({"exclude_modules": r"model\.layers\.0\.mlp\.up_proj"}, "tensors of layers.0.mlp.up_proj;"),
        ({"exclude_modules": ["model.layers.0.mlp.up_proj"]}, "tensors of layers.0.mlp.up_proj;"),
    ],
)
def test_tensors_that_peft_would_drop_are_refused(folder: Path, fields: dict[str, Any], named: str) -> None:
    edit_config(folder, **fields)
    with pytest.raises(InvalidAdapter) as refusal:
        load(folder)
    assert str(refusal.value).startswith("adapter_config.json: ")
    assert named in str(refusal.value)
    assert "PEFT would not apply them" in str(refusal.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj"},
        {"target_modules": r"model\.language_model\.layers\..*"},
        {"target_modules": r"language_model\.model\.layers\..*"},
        {"target_modules": r"layers\.\d+\..*"},
        {"target_modules": [f"model.layers.{n}.{path}" for n in range(2) for path in PATHS]},
        {"target_modules": "all-linear", "exclude_modules": r"^(?!.*language_model).*$"},
        {"target_modules": "all-linear", "exclude_modules": r".*(visual|vision).*"},
    ],
)
def test_targets_are_known_under_any_wrapper(folder: Path, fields: dict[str, Any]) -> None:
    edit_config(folder, **fields)
    for wrapped in ("model.language_model.", "language_model.model."):
        prefix = f"base_model.model.{wrapped}"
        rename(folder, lambda key, prefix=prefix: prefix + key[key.index("layers.") :])  # type: ignore[misc]
        assert len(load(folder).ranks) == 14


def test_an_ambiguous_name_is_excluded_under_any_spelling(folder: Path) -> None:
    rename(folder, lambda key: key.replace("base_model.model.", "base_model.model.model."))
    with pytest.raises(InvalidAdapter, match=r"exclude_modules is .* tensors of layers.0.mlp.up_proj;"):
        load(edit_config(folder, exclude_modules=r"model\.layers\.0\.mlp\.up_proj"))


def test_a_non_strict_load_leaves_out_only_unserved_modules(folder: Path) -> None:
    extra = f"{Q.replace('self_attn.q_proj', 'mlp.router')}.lora_A.weight"
    edit_weights(folder, lambda tensors: tensors.update({extra: torch.ones(4, 64)}))
    with pytest.raises(InvalidAdapter, match="modules this server does not adapt"):
        load(folder)
    assert len(load(folder, strict=False).ranks) == 14
    edit_weights(folder, lambda tensors: tensors.update({f"{Q}.lora_B.bias": torch.ones(64)}))
    with pytest.raises(InvalidAdapter, match="biases"):
        load(folder, strict=False)


# What is refused


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (f"{Q}.lora_magnitude_vector.weight", "DoRA magnitude vectors"),
        (f"{Q}.lora_magnitude_vector", "DoRA magnitude vectors"),
        (f"{Q}.lora_magnitude_vector.default.weight", "DoRA magnitude vectors"),
        (f"{Q}.lora_B.bias", "biases"),
        (f"{Q}.lora_B.default.bias", "biases"),
        (f"{Q}.base_layer.bias", "biases"),
        (f"{Q}.lora.bias", "biases"),
        ("base_model.model.lm_head.lora_A.default", "modules this server does not adapt"),
        ("base_model.model.model.embed_tokens.lora_embedding_A.a.b", "modules this server does not adapt"),
        ("base_model.model.model.layers.0.embed_tokens.lora_embedding_A", "modules this server does not adapt"),
        ("base_model.model.model.layers.0.lm_head.lora_A.weight", "modules this server does not adapt"),
        ("base_model.model.lm_head.weight", "whole weights"),
        ("base_model.model.model.embed_tokens.weight", "whole weights"),
        ("base_model.model.model.norm.weight", "whole weights"),
        ("base_model.model.score.modules_to_save.default.weight", "whole weights"),
        ("base_model.model.model.layers.0.mlp.experts.lora_A", "modules this server does not adapt"),
        ("base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight", "modules this server does not adapt"),
        ("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", "modules this server does not adapt"),
        ("base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", "modules this server does not adapt"),
        ("base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight", "modules this server does not adapt"),
        ("model.visual.encoder.layers.1.self_attn.q_proj.lora_B.weight", "modules this server does not adapt"),
        (f"{Q}.lora_A.a.b.weight", "modules this server does not adapt"),
        (f"{Q}.lora_E.weight", "modules this server does not adapt"),
        (f"{Q}.lora_diag", "modules this server does not adapt"),
        ("base_model.model.model.embed_tokens.trainable_tokens_delta", "modules this server does not adapt"),
        ("base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight", "layers this base model does not have"),
        ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", "modules this server does not adapt"),
    ],
)
def test_a_tensor_without_a_place_is_named(folder: Path, key: str, reason: str) -> None:
    edit_weights(folder, lambda tensors: tensors.update({key: torch.ones(4, 64)}))
    with pytest.raises(InvalidAdapter) as refusal:
        load(folder)
    assert reason in str(refusal.value)
    assert key in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (
            "layers.0.mlp.router.lora_A.weight",
            "(it adapts self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, self_attn.o_proj, mlp.gate_proj, "
            "mlp.up_proj, mlp.down_proj in each layer, and embed_tokens and lm_head): layers.0.mlp.router",
        ),
        ("layers.2.self_attn.q_proj.lora_A.weight", "(it has 2, counted from 0): layers.2."),
        ("layers.0.self_attn.q_proj.lora_embedding_A", "(expected lora_embedding_A and lora_embedding_B of embed_toke"),
        ("embed_tokens.lora_A.weight", "(expected lora_embedding_A and lora_embedding_B of embed_tokens, lora_A and"),
    ],
)
def test_a_tensor_without_a_place_is_told_what_has_one(folder: Path, key: str, expected: str) -> None:
    edit_weights(folder, lambda tensors: tensors.update({key: torch.ones(4, 64)}))
    with pytest.raises(InvalidAdapter) as refusal:
        load(folder)
    assert expected in str(refusal.value)


def test_all_tensors_without_a_place_are_listed(folder: Path) -> None:
    rename(folder, lambda key: key.replace("self_attn", "attention").replace("mlp", "feed_forward"))
    with pytest.raises(InvalidAdapter) as refusal:
        load(folder)
    assert str(refusal.value).count("layers.") == 20
    assert "and 8 more" in str(refusal.value)


# PEFT takes the biases it saves itself for tensors that were cut up.
@pytest.mark.filterwarnings("ignore:Adapter 'default'")
def test_trained_biases_are_refused_with_and_without_their_flag(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", attention_bias=True)
    make_adapter(base, tmp_path, targets=ATTENTION_TARGETS, lora_bias=True)
    with pytest.raises(InvalidAdapter, match="lora_bias is True"):
        load(tmp_path)
    edit_config(tmp_path, lora_bias=False)
    with pytest.raises(InvalidAdapter, match=r"biases, not served.*q_proj.lora_B.bias"):
        load(tmp_path)


def test_saved_modules_are_refused_with_and_without_their_field(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", tied=False)
    make_adapter(base, tmp_path, modules_to_save=["lm_head"])
    with pytest.raises(InvalidAdapter, match="modules_to_save"):
        load(tmp_path)
    edit_config(tmp_path, modules_to_save=None)
    with pytest.raises(InvalidAdapter, match=r"whole weights .*lm_head.weight"):
        load(tmp_path)


def test_rank_over_the_limit_names_both_numbers(tiny_base: Path, tmp_path: Path) -> None:
    make_adapter(tiny_base, tmp_path, r=4, rank_pattern={"up_proj": 24})
    with pytest.raises(InvalidAdapter, match=r"up_proj.*rank 24 is larger than max_lora_rank 16"):
        load(tmp_path)
    assert load(tmp_path, max_rank=24).rank == 24


def test_a_transposed_tensor_is_not_called_a_large_rank(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({f"{Q}.lora_A.weight": torch.ones(64, 4)}))
    with pytest.raises(InvalidAdapter, match=r"lora_A.weight: shape \[64, 4\], expected \[4, 64\] \(rank 4 by"):
        load(folder)


def test_rank_of_the_file_must_be_the_configs(folder: Path) -> None:
    with pytest.raises(InvalidAdapter, match=r"shape \[4, \d+\], expected \[6, \d+\] .rank 6 by adapter_config.json"):
        load(edit_config(folder, r=6))


@pytest.mark.parametrize(
    ("key", "shape", "expected"),
    [
        (f"{Q}.lora_A.weight", (4, 32), r"\[4, 32\], expected \[4, 64\]"),
        (f"{Q}.lora_B.weight", (128, 4), r"\[128, 4\], expected \[64, 4\]"),
        (f"{Q}.lora_B.weight", (4, 64), r"\[4, 64\], expected \[64, 4\]"),
        (f"{Q}.lora_B.weight", (64, 1), r"\[64, 1\], expected \[64, 4\]"),
        (f"{Q}.lora_A.weight", (4, 64, 1), r"\[4, 64, 1\], expected \[4, 64\]"),
        (f"{Q}.lora_A.weight", (256,), r"\[256\], expected \[4, 64\]"),
        (f"{Q}.lora_A.weight", (0, 64), r"\[0, 64\], expected \[4, 64\]"),
    ],
)
def test_wrong_shape_names_both(folder: Path, key: str, shape: tuple[int, ...], expected: str) -> None:
    edit_weights(folder, lambda tensors: tensors.update({key: torch.ones(shape)}))
    with pytest.raises(InvalidAdapter, match=rf"{key}: shape {expected}"):
        load(folder)


def test_the_adapter_of_a_smaller_model_is_refused(folder: Path) -> None:
    smaller = {name: (out // 2, width // 2) for name, (out, width) in PROJECTIONS.items()}
    assert load(folder).rank == 4
    with pytest.raises(InvalidAdapter, match=r"shape \[4, \d+\], expected \[4, \d+\]"):
        LoRAModel("x", folder, torch.float32, 16, 2, 1, 16, projections=smaller, num_layers=2)


def test_a_lone_tensor_is_named(folder: Path) -> None:
    drop(folder, f"{Q}.lora_B.weight")
    with pytest.raises(InvalidAdapter, match=rf"without their partner.*{Q}.lora_A.weight"):
        load(folder)


def test_two_adapters_in_one_file(folder: Path) -> None:
    twin = f"{Q}.lora_A.other.weight"
    edit_weights(folder, lambda tensors: tensors.update({twin: torch.ones(4, 64)}))
    with pytest.raises(InvalidAdapter, match=r"A.other.weight and .*lora_A.weight are the same part of one"):
        load(folder)
    edit_weights(folder, lambda tensors: {k.replace("_A.weight", "_A.one.weight"): t for k, t in tensors.items()})
    drop(folder, f"{Q}.lora_A.one.weight")
    with pytest.raises(InvalidAdapter, match="several adapters: one, other"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_non_finite_weights(folder: Path, part: str, value: float) -> None:
    key = f"{Q}.{part}.weight"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[key][1, 2] = value

    edit_weights(folder, spoil)
    with pytest.raises(InvalidAdapter, match=rf"{key}: 1 NaN or infinite"):
        load(folder)


def test_values_beyond_the_base_dtype(folder: Path) -> None:
    def enlarge(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.lora_B.weight"][0, 0] = 40_000.0  # times the scale of 2: more than fp16 holds

    edit_weights(folder, enlarge)
    assert load(folder, dtype=torch.bfloat16).rank == 4
    with pytest.raises(InvalidAdapter, match=r"lora_B.weight: 1 values overflow torch.float16 at scale 2"):
        load(folder, dtype=torch.float16)


def test_values_whose_sum_overflows_are_finite(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({f"{Q}.lora_A.weight": torch.full((4, 64), 3e38)}))
    assert load(folder).lora_A["layers.0.self_attn.q_proj.lora_A.weight"].max() == 3e38


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_data_types(folder: Path, dtype: torch.dtype) -> None:
    edit_weights(folder, lambda tensors: {key: tensor.to(dtype) for key, tensor in tensors.items()})
    with pytest.raises(InvalidAdapter, match=r"expected one of F32, F16, BF16"):
        load(folder)


def test_no_tensors(folder: Path) -> None:
    edit_weights(folder, lambda _: {})
    with pytest.raises(InvalidAdapter, match="no tensor at all"):
        load(folder)


def test_only_ignored_tensors(folder: Path) -> None:
    edit_weights(folder, lambda _: {"lm_head.base_layer.weight": torch.ones(128, 64)})
    with pytest.raises(InvalidAdapter, match="no tensor of the adapter applies"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    size = (folder / WEIGHTS).stat().st_size
    os.truncate(folder / WEIGHTS, keep if keep >= 0 else size + keep)
    with pytest.raises(InvalidAdapter, match=rf"{WEIGHTS}: .*{'empty' if keep == 0 else 'truncated'}"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\x03\x04" + b"\0" * 100, "header"),
        ((20).to_bytes(8, "little") + b"{]" + b" " * 18, "not a safetensors header"),
        ((40).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1]}}'.ljust(40), "not a safetensors header"),
        ((40).to_bytes(8, "little") + b'["not an object"]'.ljust(40), "not a safetensors header"),
        ((2**40).to_bytes(8, "little") + b"{}", "truncated or not safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "truncated or not safetensors"),
    ],
)
def test_not_safetensors(folder: Path, content: bytes, reason: str) -> None:
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(InvalidAdapter, match=rf"{WEIGHTS}: .*{reason}"):
        load(folder)


def test_a_file_longer_than_its_header_says(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"\0" * 7)
    with pytest.raises(InvalidAdapter, match="longer than its header says"):
        load(folder)


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (([4, 64], 0, 1024), ([64, 4], 512, 1536), "lora_B.weight' of shape .* is at 512..1536, expected 1024"),
        (([4, 64], 0, 1024), ([64, 4], 1032, 2056), "lora_B.weight' of shape .* is at 1032..2056, expected 1024"),
        (([4, 64], 8, 1032), ([64, 4], 1032, 2056), "lora_A.weight' of shape .* is at 8..1032, expected 0"),
        (([4, 64], 1024, 0), ([64, 4], 0, 1024), "is at 1024..0, expected 1024"),
        (([4, 64], 0, 1024), ([64, 8], 1024, 2048), r"of F32 \[64, 8\] has 1024 bytes"),
        (([-4, -64], 0, 1024), ([64, 4], 1024, 2048), r"of shape \[-4, -64\]"),
        (([4, 2**62], 0, 1024), ([64, 4], 1024, 2048), "has 1024 bytes"),
    ],
)
def test_tensors_out_of_place(
    folder: Path, a: tuple[list[int], int, int], b: tuple[list[int], int, int], reason: str
) -> None:
    header = {
        f"{Q}.{part}.weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        for part, (shape, *offsets) in (("lora_A", a), ("lora_B", b))
    }
    encoded = json.dumps(header).encode()
    size = max(a[2], b[2])
    (folder / WEIGHTS).write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"\0" * size)
    with pytest.raises(InvalidAdapter, match=reason):
        load(folder)


def test_a_header_of_any_length(folder: Path) -> None:
    """The format does not promise that tensors begin at a multiple of their size."""
    plain = load(folder)
    content = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    padded = content[8 : 8 + length] + b" "
    (folder / WEIGHTS).write_bytes(len(padded).to_bytes(8, "little") + padded + content[8 + length :])
    shifted = load(folder)
    assert all(torch.equal(shifted.lora_A[key], tensor) for key, tensor in plain.lora_A.items())


@pytest.mark.parametrize("name", ["adapter_model.bin", "pytorch_model.pt"])
def test_pickled_weights_are_never_opened(folder: Path, name: str) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / name)  # opening it would block for ever
    with pytest.raises(InvalidAdapter, match=rf"{name} and no {WEIGHTS}: pickled weights are never read"):
        load(folder)


def test_missing_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(InvalidAdapter, match="the adapter's weights are missing"):
        load(folder)
    os.mkfifo(folder / WEIGHTS)
    with pytest.raises(InvalidAdapter, match="missing or not a regular file"):
        load(folder)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterPath, match="is not a folder"):
        load(tmp_path / "absent")


def test_a_refusal_leaves_no_file_open(folder: Path) -> None:
    def open_files() -> set[str]:
        return {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}

    edit_weights(folder, lambda tensors: tensors.update({f"{Q}.lora_B.bias": torch.ones(64)}))
    with pytest.raises(InvalidAdapter):
        load(folder)
    assert not any(str(folder) in path for path in open_files())


def test_the_base_models_numbers_must_agree(folder: Path) -> None:
    with pytest.raises(ValueError, match="k_proj has 32 outputs, but 4 heads of 16 were given"):
        LoRAModel("x", folder, torch.float32, 16, 4, 4, 16, projections=PROJECTIONS, num_layers=2)
    with pytest.raises(ValueError, match=r"base_dtype is torch.int8"):
        load(folder, dtype=torch.int8)


def test_projections_may_be_named_by_their_path(tiny_base: Path, tmp_path: Path) -> None:
    make_adapter(tiny_base, tmp_path, targets=("o_proj",))
    adapter = load(tmp_path, projections={"self_attn.o_proj": (64, 64)})
    assert set(adapter.ranks) == {"layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"}
    assert adapter.target_modules == ("o_proj",)
    with pytest.raises(
        InvalidAdapter, match=r"modules this server does not adapt \(it adapts mlp.o_proj in each layer\)"
    ):
        load(tmp_path, projections={"mlp.o_proj": (64, 64)})
    with pytest.raises(ValueError, match=r"self_attn.q_proj has 96 outputs, but 4 heads of 16"):
        load(tmp_path, projections={"self_attn.q_proj": (96, 64)})


@pytest.mark.parametrize("name", ["o_proj", "self_attn.o_proj"])
@pytest.mark.parametrize("path", ["o_proj", "mlp.o_proj", "cross.self_attn.o_proj", "self_attn.experts.0.o_proj"])
def test_a_projection_is_where_the_decoder_has_it_and_nowhere_else(
    tiny_base: Path, tmp_path: Path, name: str, path: str
) -> None:
    make_adapter(tiny_base, tmp_path, targets=("o_proj",))
    assert len(load(tmp_path, projections={name: (64, 64)}).ranks) == 2
    rename(tmp_path, lambda key: key.replace("layers.1.self_attn.o_proj", f"layers.1.{path}"))
    with pytest.raises(InvalidAdapter, match=rf"modules this server does not adapt .*layers.1.{path}.lora_A.weight"):
        load(tmp_path, projections={name: (64, 64)})
