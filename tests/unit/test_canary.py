"""Adapters that change nothing are told from those that do."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.factories import make_adapter
from tests.unit.adapter_folders import PlainBase, edit_weights, load, plain_base

pytestmark = pytest.mark.filterwarnings(
    "ignore:Model with `tie_word_embeddings=True`",
    "ignore:Model has `tie_word_embeddings=True`",
)
MODEL = "base_model.model.model"


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> PlainBase:
    return plain_base(tiny_base)


@pytest.fixture
def folder(tiny_adapters: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_adapters["attention-r2"], tmp_path / "adapter"))


def clear(folder: Path, *parts: str) -> Path:
    """Set to zero every tensor whose key has one of the parts."""

    def zero(tensors: dict[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            if any(part in key for part in parts):
                tensor.zero_()

    return edit_weights(folder, zero)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_an_untrained_adapter_is_a_noop(folder: Path, base: PlainBase, part: str) -> None:
    assert load(folder).noop_modules == load(folder, base=base).noop_modules == ()
    clear(folder, f"0.self_attn.q_proj.{part}", f"1.self_attn.o_proj.{part}")
    expected = {"layers.0.self_attn.q_proj", "layers.1.self_attn.o_proj"}
    assert set(load(folder).noop_modules) == set(load(folder, base=base).noop_modules) == expected
    clear(folder, part)
    for adapter in (load(folder), load(folder, base=base)):
        assert set(adapter.noop_modules) == set(adapter.ranks)


def test_a_delta_that_rounding_swallows_is_a_noop(tiny_base: Path, folder: Path, base: PlainBase) -> None:
    def shrink(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            tensor.mul_(0.001)

    edit_weights(folder, shrink)
    assert load(folder, base=base).noop_modules == ()
    half = load(folder, base=plain_base(tiny_base, torch.bfloat16), dtype=torch.bfloat16)
    assert set(half.noop_modules) == set(half.ranks)
    assert load(folder, dtype=torch.bfloat16).noop_modules == ()


def test_a_gain_alone_changes_the_output(tiny_base: Path, tmp_path: Path, base: PlainBase) -> None:
    make_adapter(tiny_base, tmp_path, targets=("q_proj", "embed_tokens"), use_dora=True)
    clear(tmp_path, "lora_B", "lora_embedding_B")
    assert load(tmp_path, base=base).noop_modules == ()

    half = plain_base(tiny_base, torch.bfloat16)

    def as_the_base(tensors: dict[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            if "magnitude" in key:
                name = key.removeprefix(f"{MODEL}.").rpartition(".")[0]
                tensor.copy_(
                    half.module(name).get_parameter("weight").float().norm(dim=0 if name == "embed_tokens" else 1)
                )

    edit_weights(tmp_path, as_the_base)
    # The embedding's copy in the file is the unrounded base's.
    edit_weights(tmp_path, lambda tensors: {key: t for key, t in tensors.items() if "base_layer" not in key})
    adapter = load(tmp_path, base=half, dtype=torch.bfloat16)
    assert set(adapter.noop_modules) == set(adapter.ranks)


def test_an_embedding_trained_on_other_tokens_is_no_noop(tiny_base: Path, tmp_path: Path, base: PlainBase) -> None:
    make_adapter(tiny_base, tmp_path, targets=("embed_tokens",))
    key = f"{MODEL}.embed_tokens.lora_embedding_A"

    def keep_one_token(tensors: dict[str, Tensor]) -> None:
        tensors[key][:, torch.arange(128) != 100] = 0

    edit_weights(tmp_path, keep_one_token)
    assert load(tmp_path, base=base).noop_modules == ()
    clear(tmp_path, "lora_embedding_A")
    assert load(tmp_path, base=base).noop_modules == load(tmp_path).noop_modules == ("embed_tokens",)
