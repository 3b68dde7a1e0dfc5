"""Adapters of the embedding and the output head: equal to PEFT on tied and untied bases, or refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_core.errors import InvalidAdapter
from tests.factories import make_adapter, reference_logits, tiny_llama
from tests.unit.adapter_folders import (
    LINEAR_PROJECTIONS,
    PROJECTIONS,
    PROMPT,
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

pytestmark = [
    # Of a head adapted apart from the embedding it is tied to.
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

EMBEDDING = "base_model.model.model.embed_tokens"
HEAD = "base_model.model.lm_head"


@pytest.fixture(scope="module")
def untied_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("untied"), tied=False, seed=3)


@pytest.fixture(scope="module")
def bases(tiny_base: Path, untied_base: Path) -> dict[str, PlainBase]:
    return {"tied": plain_base(tiny_base), "untied": plain_base(untied_base)}


@pytest.fixture(scope="module")
def both(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the embedding, the head and one projection."""
    folder = tmp_path_factory.mktemp("both")
    return make_adapter(tiny_base, folder, targets=("q_proj", "embed_tokens", "lm_head"), seed=8)


@pytest.fixture
def folder(both: Path, tmp_path: Path) -> Path:
    """A copy of `both` to be spoiled."""
    return Path(shutil.copytree(both, tmp_path / "adapter"))


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize(
    "settings",
    [
        {"targets": ("embed_tokens",)},
        {"targets": ("lm_head",)},
        {"targets": ("embed_tokens", "lm_head"), "use_rslora": True},
        {"targets": ("q_proj", "embed_tokens", "lm_head"), "rank_pattern": {"lm_head": 7, "embed_tokens": 1}},
        {"targets": r".*(embed_tokens|up_proj)|lm_head", "alpha_pattern": {"^lm_head": 3, "model.embed_tokens": 20}},
        {"targets": ("down_proj", "embed_tokens", "lm_head"), "exclude_modules": ["lm_head"]},
        {"targets": ("q_proj", "model.embed_tokens", "lm_head"), "layers_to_transform": [1]},
    ],
    ids=str,
)
def test_equals_peft(
    tiny_base: Path, untied_base: Path, bases: dict[str, PlainBase], tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    base = tiny_base if kind == "tied" else untied_base
    make_adapter(base, tmp_path, seed=5, **settings)
    adapter = load(tmp_path, base=bases[kind])
    expected = reference_logits(base, tmp_path, PROMPT)
    assert (expected - reference_logits(base, None, PROMPT)).abs().max() > 0.1
    torch.testing.assert_close(adapted_logits(bases[kind], adapter), expected, rtol=1e-4, atol=1e-4)
    assert adapter.noop_modules == ()


def test_its_tensors(both: Path) -> None:
    adapter = load(both, max_rank=6)
    assert adapter.ranks["embed_tokens"] == adapter.ranks["lm_head"] == 4
    assert adapter.target_modules == ("embed_tokens", "lm_head", "q_proj")
    embedding, head = adapter.module("embed_tokens"), adapter.module("lm_head")
    assert embedding is not None
    assert head is not None
    assert (embedding.a.shape, embedding.b.shape) == ((128, 4), (64, 4))
    assert (head.a.shape, head.b.shape) == ((4, 64), (128, 4))
    assert embedding.gain is head.gain is None
    assert all(tensor.is_contiguous() for tensor in (embedding.a, embedding.b, head.a, head.b))
    padded = adapter.lora_A["embed_tokens.lora_A.weight"]
    assert padded.shape == (6, 128)
    assert torch.equal(padded[:4], embedding.a.T)
    assert not padded[4:].any()


@pytest.mark.parametrize("suffix", ["", ".weight", ".default", ".default.weight", ".my_task"])
def test_key_forms(both: Path, folder: Path, suffix: str) -> None:
    rename(folder, lambda key: key + suffix if "lora_embedding" in key else key)
    assert same_modules(load(folder), load(both))


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("embed_tokens", "lm_head"),
        ("base_model.model.embed_tokens", "base_model.lm_head"),
        ("base_model.model.model.language_model.embed_tokens", "base_model.model.language_model.lm_head"),
        ("base_model.model.language_model.model.embed_tokens", "base_model.model.lm_head"),
        ("_orig_mod.base_model.model.model.embed_tokens", "module.base_model.model.lm_head"),
    ],
)
def test_prefixes(both: Path, folder: Path, embedding: str, head: str) -> None:
    rename(folder, lambda key: key.replace(EMBEDDING, embedding).replace(HEAD, head))
    assert same_modules(load(folder), load(both))


def test_they_are_refused_where_they_are_not_served(both: Path) -> None:
    with pytest.raises(InvalidAdapter, match=r"embed_tokens or lm_head.*lora_config.adapt_embeddings.*lm_head.lora_A"):
        load(both, projections=LINEAR_PROJECTIONS)


def test_the_setting_is_named_only_where_it_would_help(folder: Path) -> None:
    without_head = {name: shape for name, shape in PROJECTIONS.items() if name != "lm_head"}
    with pytest.raises(
        InvalidAdapter, match=r"does not adapt \(it adapts .* and embed_tokens\): \S*lm_head"
    ) as refusal:
        load(folder, projections=without_head)
    assert "adapt_embeddings" not in str(refusal.value)
    # The head's tensors in the form of an embedding's would be refused with the setting, too.
    rename(folder, lambda key: key.replace("lm_head.lora_A.weight", "lm_head.lora_embedding_A"))
    drop(folder, f"{HEAD}.lora_B.weight", f"{EMBEDDING}.lora_embedding_A", f"{EMBEDDING}.lora_embedding_B")
    with pytest.raises(InvalidAdapter, match=r"embedding on a linear layer .*lm_head") as refusal:
        load(folder, projections=LINEAR_PROJECTIONS)
    assert "adapt_embeddings" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"target_modules": "all-linear"}, r"target_modules is 'all-linear'.*lm_head, embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "tensors of embed_tokens;"),
        ({"exclude_modules": ["lm_head"]}, r"exclude_modules is \['lm_head'\].* tensors of lm_head;"),
        ({"target_modules": r"model\..*"}, "tensors of lm_head;"),
    ],
)
def test_tensors_that_peft_would_drop_are_refused(folder: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidAdapter, match=named):
        load(edit_config(folder, **settings))


def test_layers_to_transform_leaves_out_what_is_not_named_in_full(folder: Path) -> None:
    """As PEFT does: the embedding is in no layer, and the head's name is its full name."""
    edit_config(folder, layers_to_transform=[1], target_modules=["q_proj", "embed_tokens", "lm_head"])
    assert set(load(folder).ranks) == {"layers.1.self_attn.q_proj", "lm_head"}
    names = ["model.layers.0.self_attn.q_proj", "q_proj", "model.embed_tokens", "lm_head"]
    edit_config(folder, target_modules=names)
    assert len(load(folder).ranks) == 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{EMBEDDING}.lora_embedding_A", f"{EMBEDDING}.lora_A.weight"),
        (f"{HEAD}.lora_A.weight", f"{HEAD}.lora_embedding_A"),
        (f"{HEAD}.lora_A.weight", f"{HEAD}.lora_embedding_A.default.weight"),
    ],
)
def test_a_form_of_another_kind_of_layer(folder: Path, old: str, new: str) -> None:
    rename(folder, lambda key: key.replace(old, new))
    with pytest.raises(InvalidAdapter, match=rf"tensors of a linear layer on an embedding, or .*: {new}"):
        load(folder)


@pytest.mark.parametrize(
    ("key", "shape", "expected"),
    [
        (f"{EMBEDDING}.lora_embedding_A", (4, 64), r"\[4, 64\], expected \[4, 128\]"),
        (f"{EMBEDDING}.lora_embedding_A", (128, 4), r"\[128, 4\], expected \[4, 128\]"),
        (f"{EMBEDDING}.lora_embedding_B", (4, 64), r"\[4, 64\], expected \[64, 4\]"),
        (f"{HEAD}.lora_B.weight", (130, 4), r"\[130, 4\], expected \[128, 4\]"),
    ],
)
def test_wrong_shapes(folder: Path, key: str, shape: tuple[int, ...], expected: str) -> None:
    edit_weights(folder, lambda tensors: tensors.update({key: torch.ones(shape)}))
    with pytest.raises(InvalidAdapter, match=rf"{key}: .*{expected}"):
        load(folder)


def test_non_finite_values(folder: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{EMBEDDING}.lora_embedding_A"][2, 100] = torch.nan

    with pytest.raises(InvalidAdapter, match=rf"{EMBEDDING}.lora_embedding_A: 1 NaN or infinite"):
        load(edit_weights(folder, spoil))


# Copies of base weights


def test_copies_of_the_bases_own_values_change_nothing(both: Path, folder: Path, bases: dict[str, PlainBase]) -> None:
    plain = load(drop(folder, f"{EMBEDDING}.base_layer.weight", f"{HEAD}.base_layer.weight"))
    assert same_modules(load(both, base=bases["tied"]), plain)
    assert same_modules(load(both), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_may_be_rounded(folder: Path, bases: dict[str, PlainBase], tiny_base: Path, dtype: torch.dtype) -> None:
    def cast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor.to(dtype) if "base_layer" in key else tensor for key, tensor in tensors.items()}

    assert load(edit_weights(folder, cast), base=bases["tied"]).rank == 4
    assert load(folder, dtype=dtype, base=plain_base(tiny_base, dtype)).rank == 4


@pytest.mark.parametrize("key", [f"{EMBEDDING}.base_layer.weight", f"{HEAD}.base_layer.weight"])
def test_copies_of_other_values_are_refused(folder: Path, bases: dict[str, PlainBase], key: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[key][127, 5] += 0.01

    edit_weights(folder, change)
    with pytest.raises(InvalidAdapter, match=rf"{key}: a copy of .* whose values are not this base model's"):
        load(folder, base=bases["tied"])
    assert load(folder).rank == 4


def test_saved_embeddings_of_the_bases_own_values_are_ignored(
    folder: Path, both: Path, bases: dict[str, PlainBase]
) -> None:
    """PEFT's `save_embedding_layers=True` writes them whole when nothing adapts them."""
    weight = bases["tied"].module("embed_tokens").get_parameter("weight").detach()
    keys = [f"{EMBEDDING}.weight", f"{HEAD}.weight"]
    edit_weights(folder, lambda tensors: tensors.update({key: weight.clone() for key in keys}))
    assert same_modules(load(folder, base=bases["tied"]), load(both))
    with pytest.raises(InvalidAdapter, match=rf"whole weights.*{EMBEDDING}.weight"):
        load(folder)
    edit_weights(folder, lambda tensors: tensors.update({keys[1]: weight * 2}))
    with pytest.raises(InvalidAdapter, match=rf"{HEAD}.weight: a copy of lm_head's weight whose values"):
        load(folder, base=bases["tied"])


def test_copies_of_other_data_types_are_refused(folder: Path, bases: dict[str, PlainBase]) -> None:
    key = f"{HEAD}.base_layer.weight"
    edit_weights(folder, lambda tensors: tensors.update({key: torch.ones(128, 64, dtype=torch.float64)}))
    with pytest.raises(InvalidAdapter, match=rf"{key}: dtype F64, expected one of F32, F16, BF16"):
        load(folder, base=bases["tied"])


@pytest.mark.parametrize("projections", [PROJECTIONS, LINEAR_PROJECTIONS])
def test_copies_of_what_is_not_adapted_are_dropped_as_peft_drops_them(
    tiny_base: Path, folder: Path, bases: dict[str, PlainBase], projections: dict[str, tuple[int, int]]
) -> None:
    edit_weights(folder, lambda tensors: {k: t for k, t in tensors.items() if "q_proj" in k})
    edit_config(folder, target_modules=["q_proj"])
    plain = reference_logits(tiny_base, folder, PROMPT)
    edit_weights(folder, lambda tensors: tensors.update({f"{HEAD}.base_layer.weight": torch.ones(128, 64)}))
    assert torch.equal(reference_logits(tiny_base, folder, PROMPT), plain)
    adapter = load(folder, projections=projections, base=bases["tied"])
    torch.testing.assert_close(adapted_logits(bases["tied"], adapter), plain, rtol=1e-4, atol=1e-4)


def test_saved_embeddings_that_cannot_be_compared_are_refused(folder: Path, bases: dict[str, PlainBase]) -> None:
    edit_weights(folder, lambda tensors: {k: t for k, t in tensors.items() if "q_proj" in k})
    edit_weights(folder, lambda tensors: tensors.update({f"{HEAD}.weight": torch.ones(128, 64)}))
    with pytest.raises(InvalidAdapter, match=rf"whole weights.*{HEAD}.weight"):
        load(folder, projections=LINEAR_PROJECTIONS, base=bases["tied"])
    with pytest.raises(InvalidAdapter, match=rf"{HEAD}.weight: a copy of lm_head's weight whose values"):
        load(folder, base=bases["tied"])


# Tied pairs

TIED_ONLY: list[dict[str, Any]] = [
    {},
    {"rank_pattern": {"lm_head": 2}, "target_modules": ["lm_head"]},
    {"exclude_modules": ["lm_head"], "target_modules": ["lm_head"]},
    {"layers_to_transform": [0], "target_modules": ["model.embed_tokens"]},
    {"init_lora_weights": "orthogonal"},
]
"""Configs that mean the head only because the embedding is tied to it."""


def tie(folder: Path) -> Path:
    """Make the head's pair the transpose of the embedding's, as PEFT saves it with `ensure_weight_tying`."""

    def tied(tensors: dict[str, Tensor]) -> None:
        tensors[f"{HEAD}.lora_A.weight"] = tensors[f"{EMBEDDING}.lora_embedding_B"].T.contiguous()
        tensors[f"{HEAD}.lora_B.weight"] = tensors[f"{EMBEDDING}.lora_embedding_A"].T.contiguous()

    edit_weights(folder, tied)
    return edit_config(folder, ensure_weight_tying=True, target_modules=["q_proj", "model.embed_tokens"])


def test_tied_pairs_equal_peft(tiny_base: Path, folder: Path, bases: dict[str, PlainBase]) -> None:
    adapter = load(tie(folder), base=bases["tied"])
    expected = reference_logits(tiny_base, folder, PROMPT)
    torch.testing.assert_close(adapted_logits(bases["tied"], adapter), expected, rtol=1e-4, atol=1e-4)
    assert same_modules(load(folder), adapter)


def test_pairs_that_peft_would_tie_are_refused(folder: Path, bases: dict[str, PlainBase]) -> None:
    """On an untied base PEFT ties nothing."""
    edit_config(folder, ensure_weight_tying=True)
    copies = (f"{EMBEDDING}.base_layer.weight", f"{HEAD}.base_layer.weight")
    drop(folder, *copies)
    for base in (bases["tied"], None):
        with pytest.raises(InvalidAdapter, match="ensure_weight_tying is true, and the files do not hold"):
            load(folder, base=base)
    assert len(load(folder, base=bases["untied"]).ranks) == 4
    drop(folder, f"{HEAD}.lora_A.weight", f"{HEAD}.lora_B.weight")
    with pytest.raises(InvalidAdapter, match="ensure_weight_tying is true"):
        load(folder, base=bases["tied"])


def test_a_tied_head_has_the_embeddings_rank_and_the_scale_of_its_own(
    tiny_base: Path, folder: Path, bases: dict[str, PlainBase]
) -> None:
    edit_config(tie(folder), rank_pattern={"lm_head": 2}, use_rslora=True)
    adapter = load(folder, base=bases["tied"])
    assert adapter.ranks["lm_head"] == adapter.ranks["embed_tokens"] == 4
    expected = reference_logits(tiny_base, folder, PROMPT)
    torch.testing.assert_close(adapted_logits(bases["tied"], adapter), expected, rtol=1e-4, atol=1e-4)


def test_a_tied_head_is_adapted_whichever_layers_are_transformed(
    tiny_base: Path, folder: Path, bases: dict[str, PlainBase]
) -> None:
    edit_config(tie(folder), layers_to_transform=[1], exclude_modules=["lm_head"])
    adapter = load(folder, base=bases["tied"])
    assert adapter.ranks.keys() == {"embed_tokens", "lm_head", "layers.1.self_attn.q_proj"}
    expected = reference_logits(tiny_base, folder, PROMPT)
    torch.testing.assert_close(adapted_logits(bases["tied"], adapter), expected, rtol=1e-4, atol=1e-4)
    # Without the embedding's own tensors PEFT would take them from the head's.
    edit_config(folder, target_modules=["q_proj", "lm_head"])
    drop(folder, f"{EMBEDDING}.lora_embedding_A", f"{EMBEDDING}.lora_embedding_B")
    with pytest.raises(InvalidAdapter, match="ensure_weight_tying is true, and the files do not hold"):
        load(folder, base=bases["tied"])


@pytest.mark.parametrize("fields", TIED_ONLY, ids=str)
def test_a_head_that_only_a_tied_base_has_is_refused_on_another(
    folder: Path, bases: dict[str, PlainBase], fields: dict[str, Any]
) -> None:
    """PEFT ties nothing there: it would want another rank, or drop the pair of a head the config does not mean."""
    edit_config(tie(folder), **fields)
    edit_config(folder, target_modules=["q_proj", "embed_tokens", *fields.get("target_modules", ())])
    drop(folder, f"{EMBEDDING}.base_layer.weight", f"{HEAD}.base_layer.weight")
    assert load(folder, base=bases["tied"]).ranks["lm_head"] == 4
    with pytest.raises(InvalidAdapter, match=r"ensure_weight_tying is true.*this base's are not tied"):
        load(folder, base=bases["untied"])


@pytest.mark.parametrize("init", ["orthogonal", "mica"])
def test_initialisations_that_untie_pairs_are_served(
    tiny_base: Path, tmp_path: Path, bases: dict[str, PlainBase], init: str
) -> None:
    """PEFT replaces the pair it has tied by one of the module's own, when it loads the adapter too."""
    targets = ("q_proj", "embed_tokens")
    make_adapter(tiny_base, tmp_path, targets=targets, ensure_weight_tying=True, init_lora_weights=init)
    expected = reference_logits(tiny_base, tmp_path, PROMPT)
    adapter = load(tmp_path, base=bases["tied"])
    assert "lm_head" in adapter.ranks
    torch.testing.assert_close(adapted_logits(bases["tied"], adapter), expected, rtol=1e-4, atol=1e-4)


def test_ranks_apart_on_an_untied_base_are_served(untied_base: Path, tmp_path: Path) -> None:
    """Where PEFT ties nothing, the head has its own rank whatever `ensure_weight_tying` says."""
    targets = ("embed_tokens", "lm_head")
    make_adapter(untied_base, tmp_path, targets=targets, rank_pattern={"lm_head": 2})
    edit_config(tmp_path, ensure_weight_tying=True)
    assert load(tmp_path, base=plain_base(untied_base)).ranks == {"embed_tokens": 4, "lm_head": 2}


def test_tying_without_adapted_embeddings_means_nothing(tiny_base: Path, tmp_path: Path) -> None:
    make_adapter(tiny_base, tmp_path, targets=("q_proj",))
    assert load(edit_config(tmp_path, ensure_weight_tying=True)).target_modules == ("q_proj",)
