"""Targets: names, sites, and the fusion of base weights."""

import re

import pytest
import torch

from lora_core.errors import ConfigError
from lora_core.targets import LoRATargetModule, lora_sites, stack_weights
from tests.unit.adapted_model import HIDDEN, LM_PROJECTIONS, LM_TARGETS, PROJECTIONS, TARGETS, VOCABULARY

QKV, O_PROJ = TARGETS[:2]


def test_names() -> None:
    assert QKV.peft_modules(3) == tuple(f"layers.3.self_attn.{p}_proj" for p in "qkv")
    assert O_PROJ.peft_modules(0) == ("layers.0.self_attn.o_proj",)
    assert LoRATargetModule("attn.to_out.0", ("to_out.0",)).siblings() == ("attn.to_out.0",)
    assert LoRATargetModule("fused", ("one", "two")).siblings() == ("one", "two")


def test_sites_are_layer_by_layer_in_target_order() -> None:
    sites = lora_sites(TARGETS, PROJECTIONS, num_layers=2)
    assert [site.name for site in sites[:5]] == [
        "layers.0.self_attn.qkv_proj",
        "layers.0.self_attn.o_proj",
        "layers.0.mlp.gate_up_proj",
        "layers.0.mlp.down_proj",
        "layers.1.self_attn.qkv_proj",
    ]
    assert (sites[0].in_features, sites[0].slices) == (16, (16, 8, 8))


def test_the_embedding_is_the_first_site_and_the_head_the_last() -> None:
    sites = lora_sites(LM_TARGETS, LM_PROJECTIONS, num_layers=2)
    assert [site.name for site in sites] == [
        "embed_tokens",
        *(site.name for site in lora_sites(TARGETS, PROJECTIONS, num_layers=2)),
        "lm_head",
    ]
    assert [site.index for site in sites] == list(range(10))
    assert [site.kind for site in sites] == ["embedding", *["layer"] * 8, "head"]
    embedding, head = sites[0], sites[-1]
    assert (embedding.layer, embedding.modules, embedding.in_features, embedding.slices) == (
        None,
        ("embed_tokens",),
        VOCABULARY,
        (HIDDEN,),
    )
    assert (head.layer, head.modules, head.in_features, head.slices) == (None, ("lm_head",), HIDDEN, (VOCABULARY,))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([QKV, QKV], "self_attn.qkv_proj more than once"),
        ([LoRATargetModule("a.b", ("other",))], "covers other, expected some of .*q_proj"),
        ([LoRATargetModule("a.b", ())], "covers no projection"),
        ([LoRATargetModule("mlp.all", ("up_proj", "down_proj"))], "different input widths"),
    ],
)
def test_targets_that_disagree_with_the_base_are_refused(targets: list[LoRATargetModule], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lora_sites(targets, PROJECTIONS, num_layers=1)


def test_only_stacked_targets_are_concatenated() -> None:
    weights = {
        f"model.layers.{layer}.self_attn.{name}": torch.full((2, 3), float(10 * layer + index))
        for layer in range(2)
        for index, name in enumerate(["v_proj.weight", "q_proj.weight", "o_proj.weight", "k_proj.weight"])
    }
    weights |= {
        f"model.layers.0.self_attn.{p}_proj.bias": torch.full((2,), float(index)) for index, p in enumerate("qkv")
    }
    weights["model.norm.weight"] = torch.ones(3)
    stacked = stack_weights(weights, TARGETS)
    assert set(stacked) == {
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.qkv_proj.bias",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.1.self_attn.qkv_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.norm.weight",
    }
    fused = stacked["model.layers.1.self_attn.qkv_proj.weight"]
    assert fused[:, 0].tolist() == [11, 11, 13, 13, 10, 10]
    assert stacked["model.layers.0.self_attn.qkv_proj.bias"].tolist() == [0, 0, 1, 1, 2, 2]
    assert stacked["model.norm.weight"] is weights["model.norm.weight"]


def test_targets_that_are_not_stacked_pass_through() -> None:
    target = LoRATargetModule("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"))
    weights = {"layers.0.self_attn.qkv_proj.weight": torch.ones(6, 3)}
    assert stack_weights(weights, [target]) == weights


def test_a_missing_part_is_refused_by_name() -> None:
    weights = {
        "layers.0.self_attn.q_proj.weight": torch.ones(2, 3),
        "layers.0.self_attn.v_proj.weight": torch.ones(2, 3),
    }
    message = "has no k_proj for 'layers.0.self_attn.qkv_proj.weight', which fuses q_proj, k_proj, v_proj"
    with pytest.raises(ValueError, match=re.escape(message)):
        stack_weights(weights, TARGETS)
