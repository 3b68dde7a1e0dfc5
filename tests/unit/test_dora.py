"""DoRA adapters: equal to PEFT with the base's weights unmerged, or refused."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lora_core import dora
from lora_core.errors import InvalidAdapter
from lora_core.module_weights import BaseWeight
from tests.factories import LINEAR_TARGETS, make_adapter, reference_logits, reference_model, tiny_llama
from tests.unit.adapter_folders import (
    PROMPT,
    WEIGHTS,
    PlainBase,
    adapted_logits,
    drop,
    edit_config,
    edit_weights,
    load,
    plain_base,
    rename,
    same_modules,
)

pytestmark = pytest.mark.filterwarnings(
    # Of a head adapted apart from the embedding it is tied to.
    "ignore:Model with `tie_word_embeddings=True`",
    "ignore:Model has `tie_word_embeddings=True`",
)

Q = "base_model.model.model.layers.0.self_attn.q_proj"
Q_MODULE = "layers.0.self_attn.q_proj"
ALL_TARGETS = (*LINEAR_TARGETS, "embed_tokens", "lm_head")


@pytest.fixture(scope="module")
def bases(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {
        "tied": tiny_base,
        "untied": tiny_llama(root / "untied", tied=False, seed=3),
        "biases": tiny_llama(root / "biases", attention_bias=True, mlp_bias=True, seed=4),
    }


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> PlainBase:
    return plain_base(tiny_base)


@pytest.fixture(scope="module")
def linear(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DoRA adapter of every linear layer."""
    return make_adapter(tiny_base, tmp_path_factory.mktemp("linear"), use_dora=True, seed=8)


@pytest.fixture
def folder(linear: Path, tmp_path: Path) -> Path:
    """A copy of `linear` to be spoiled."""
    return Path(shutil.copytree(linear, tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("tied", {"targets": LINEAR_TARGETS}),
        ("tied", {"targets": "all-linear", "use_rslora": True}),
        ("tied", {"targets": ALL_TARGETS}),
        ("untied", {"targets": ("embed_tokens",), "use_rslora": True, "rank_pattern": {"embed_tokens": 3}}),
        ("untied", {"targets": ("lm_head", "k_proj"), "alpha_pattern": {"lm_head": 5}}),
        ("tied", {"targets": ("q_proj", "up_proj"), "rank_pattern": {"q_proj": 1}, "alpha_pattern": {"up_proj": 30}}),
        ("tied", {"targets": ("v_proj", "gate_proj"), "layers_to_transform": [1]}),
        ("tied", {"targets": ("v_proj",), "alpha": 0}),
        ("tied", {"targets": ("v_proj",), "alpha": -6}),
        ("biases", {"targets": LINEAR_TARGETS}),
    ],
    ids=str,
)
def test_equals_peft(bases: dict[str, Path], tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    make_adapter(bases[kind], tmp_path, use_dora=True, seed=5, **settings)
    model = plain_base(bases[kind])
    adapter = load(tmp_path, base=model)
    expected = reference_logits(bases[kind], tmp_path, PROMPT)
    torch.testing.assert_close(adapted_logits(model, adapter), expected, rtol=1e-4, atol=1e-4)
    without_gain = load(drop_vectors(tmp_path))
    assert (adapted_logits(model, without_gain) - expected).abs().max() > 0.1
    assert adapter.has_gain
    assert not without_gain.has_gain
    assert adapter.noop_modules == ()


def drop_vectors(folder: Path) -> Path:
    edit_weights(folder, lambda tensors: {key: t for key, t in tensors.items() if "magnitude" not in key})
    return edit_config(folder, use_dora=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_bases_differ_from_peft_by_rounding_alone(
    tiny_base: Path, linear: Path, dtype: torch.dtype
) -> None:
    """PEFT keeps the norms, A and B in fp32 there; here the norms are in fp32, and A and g * scale * B rounded once."""
    model = plain_base(tiny_base, dtype)
    adapter = load(linear, dtype=dtype, base=model)
    theirs = reference_model(tiny_base, linear)
    for name in adapter.ranks:
        weights = adapter.module(name)
        assert weights is not None
        assert (weights.a.dtype, weights.b.dtype) == (dtype, dtype)
        layer: Any = theirs.get_submodule(f"base_model.model.model.{name}")
        a, b = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
        magnitude = layer.lora_magnitude_vector["default"]
        norms = magnitude.get_weight_norm(model.module(name).weight.float(), b @ a, layer.scaling["default"])
        factor = (magnitude.weight / norms).detach()
        torch.testing.assert_close(weights.gain, factor - 1, rtol=1e-5, atol=1e-6)
        assert torch.equal(weights.a, a.to(dtype))
        expected_b = b * (factor * layer.scaling["default"])[:, None]
        torch.testing.assert_close(weights.b.float(), expected_b, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("suffix", [".weight", ".default", ".default.weight", ".my_task.weight"])
def test_key_forms(linear: Path, folder: Path, base: PlainBase, suffix: str) -> None:
    rename(folder, lambda key: key + suffix if "magnitude" in key else key)
    assert same_modules(load(folder, base=base), load(linear, base=base))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_of_any_served_data_type(folder: Path, base: PlainBase, dtype: torch.dtype) -> None:
    exact = load(folder, base=base)
    edit_weights(folder, lambda tensors: {k: t.to(dtype) if "magnitude" in k else t for k, t in tensors.items()})
    rounded = load(folder, base=base)
    ours, theirs = exact.module(Q_MODULE), rounded.module(Q_MODULE)
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours.gain, theirs.gain, rtol=0, atol=0.02)


def test_a_part_of_a_fused_group_has_its_own_gain(folder: Path, base: PlainBase) -> None:
    edit_weights(folder, lambda tensors: {k: t for k, t in tensors.items() if "k_proj" in k or "up_proj" in k})
    adapter = load(folder, base=base)
    assert adapter.target_modules == ("k_proj", "up_proj")
    weights = adapter.module("layers.1.self_attn.k_proj")
    assert weights is not None
    assert weights.gain is not None
    assert (weights.gain.shape, weights.gain.dtype) == ((32,), torch.float32)


# What is refused


def test_it_needs_the_base(folder: Path) -> None:
    with pytest.raises(InvalidAdapter, match="use_dora is true, which needs the base model's weights"):
        load(folder)


def test_vectors_without_use_dora(folder: Path, base: PlainBase) -> None:
    edit_config(folder, use_dora=False)
    with pytest.raises(InvalidAdapter, match=r"use_dora is false, and .* magnitude vectors: .*lora_magnitude_vector"):
        load(folder, base=base)
    edit_config(folder, use_dora=None)
    with pytest.raises(InvalidAdapter, match="use_dora is false"):
        load(folder, base=base)


def test_use_dora_without_vectors(folder: Path, base: PlainBase) -> None:
    drop(folder, f"{Q}.lora_magnitude_vector")
    with pytest.raises(InvalidAdapter, match=rf"use_dora is true, and .* no lora_magnitude_vector of {Q_MODULE};"):
        load(folder, base=base)


def test_a_vector_without_its_pair(folder: Path, base: PlainBase) -> None:
    drop(folder, f"{Q}.lora_A.weight", f"{Q}.lora_B.weight")
    with pytest.raises(InvalidAdapter, match=rf"without their partner.*{Q}.lora_magnitude_vector"):
        load(folder, base=base)


def with_tensor(key: str, tensor: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, key: tensor}


def test_two_vectors_of_one_module(folder: Path, base: PlainBase) -> None:
    twin = f"{Q}.lora_magnitude_vector.weight"
    for other in (torch.ones(64), torch.ones(64, dtype=torch.bfloat16), torch.ones(1, 64)):
        edit_weights(folder, partial(with_tensor, twin, other))
        with pytest.raises(InvalidAdapter, match=rf"{Q}.lora_magnitude_vector and {twin} are the same part of one"):
            load(folder, base=base)


def test_a_vector_that_peft_saves_twice(tiny_base: Path, tmp_path: Path, base: PlainBase) -> None:
    """That of an embedding, with `save_embedding_layers`."""
    targets = ("q_proj", "model.embed_tokens")
    make_adapter(tiny_base, tmp_path, targets=targets, use_dora=True, save_embedding_layers=True)
    name = "base_model.model.model.embed_tokens.lora_magnitude_vector"
    assert {name, f"{name}.weight"} <= load_file(tmp_path / WEIGHTS).keys()
    expected = reference_logits(tiny_base, tmp_path, PROMPT)
    torch.testing.assert_close(adapted_logits(base, load(tmp_path, base=base)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(65,), (1, 64), (64, 1), (1,), ()])
def test_wrong_shape(folder: Path, base: PlainBase, shape: tuple[int, ...]) -> None:
    edit_weights(folder, lambda tensors: tensors.update({f"{Q}.lora_magnitude_vector": torch.ones(shape)}))
    with pytest.raises(InvalidAdapter, match=rf"{Q}.lora_magnitude_vector: shape .*, expected \[64\]"):
        load(folder, base=base)


@pytest.mark.parametrize("part", ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"])
def test_non_finite_values(folder: Path, base: PlainBase, part: str) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.{part}"].view(-1)[7] = torch.inf

    with pytest.raises(InvalidAdapter, match=rf"{Q}.{part}: 1 NaN or infinite values"):
        load(edit_weights(folder, spoil), base=base)


def test_rows_of_zeros_have_no_direction(tiny_base: Path, folder: Path) -> None:
    model = plain_base(tiny_base)
    model.module(Q_MODULE).get_parameter("weight").data[3:5] = 0

    def clear(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.lora_B.weight"][3:5] = 0

    edit_weights(folder, clear)
    with pytest.raises(InvalidAdapter, match=rf"{Q}.lora_magnitude_vector: 2 of 64 output rows of {Q_MODULE}'s"):
        load(folder, base=model)


def test_factors_beyond_the_base_dtype(tiny_base: Path, folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({f"{Q}.lora_magnitude_vector": torch.full((64,), 1e7)}))
    with pytest.raises(InvalidAdapter, match=rf"{Q}.lora_B.weight: .* overflow torch.float16 at .*DoRA's factor"):
        load(folder, dtype=torch.float16, base=plain_base(tiny_base, torch.float16))


# The norms


@pytest.mark.parametrize("rows", [1, 7, 5000])
def test_norms_are_exact_across_blocks(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, 500, generator=generator)
    a, b = torch.randn(3, 500, generator=generator), torch.randn(rows, 3, generator=generator)
    dense = weight.double() + 0.7 * (b.double() @ a.double())
    torch.testing.assert_close(dora.row_norms(BaseWeight(weight), a, b, 0.7), dense.norm(dim=1).float())
    torch.testing.assert_close(dora.column_norms(BaseWeight(weight), b.T, a.T, 0.7), dense.norm(dim=0).float())


def test_norms_are_of_the_sum() -> None:
    """Where the delta cancels the weight, squares added one by one would lose everything."""
    a, b = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), torch.ones(3, 2)
    weight = -(b @ a) + 1e-4
    torch.testing.assert_close(dora.row_norms(BaseWeight(weight), a, b, 1.0), torch.full((3,), 8e-4), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_take_little_memory_beside_the_weight(dtype: torch.dtype) -> None:
    weight, a, b = torch.zeros(4096, 2048, dtype=dtype), torch.ones(4, 2048), torch.ones(4096, 4)
    with LargestResult() as largest:  # type: ignore[no-untyped-call]
        dora.row_norms(BaseWeight(weight), a, b, 1.0)
    assert 2**20 < largest.num_bytes <= 2**22
    with LargestResult() as largest:  # type: ignore[no-untyped-call]
        dora.column_norms(BaseWeight(weight), b.T, a.T, 1.0)
    assert 2**20 < largest.num_bytes <= 2**22


class LargestResult(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size of the largest tensor that operators make, views left out."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result._is_view():
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result
