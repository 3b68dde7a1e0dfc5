"""Wrapping a model: the targets are found, and names, places and outputs stay."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lora_core.layers import LoRAEmbedding, LoRALinear, RoutingContext, lora_layers, lora_parameters
from lora_core.targets import LoRASite, LoRATargetModule, lora_sites
from lora_core.types import LoRAType
from lora_core.wrapping import wrap_targets
from tests.unit.adapted_model import (
    LM_PROJECTIONS,
    LM_SITES,
    LM_TARGETS,
    NUM_LAYERS,
    PROJECTIONS,
    TARGETS,
    TinyLM,
    TinyModel,
    random_rows,
)

SITES = lora_sites(TARGETS, PROJECTIONS, NUM_LAYERS)


def test_wrapping_keeps_names_places_and_outputs() -> None:
    plain, model = TinyModel(), TinyModel()
    wrap_targets(model, SITES, RoutingContext())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model.get_submodule("model.layers.1.mlp.gate_up_proj"), LoRALinear)
    x = random_rows(6)
    assert torch.equal(model(x), plain(x))


def test_order_is_layers_then_targets_then_a_b_gain() -> None:
    model = TinyModel()
    wrap_targets(model, SITES, RoutingContext())
    paths = [target.path for target in TARGETS]
    names = [f"model.layers.{layer}.{path}" for layer in range(NUM_LAYERS) for path in paths]
    assert [name for name, _ in lora_layers(model)] == names
    assert [(name, kind) for name, kind, _ in lora_parameters(model)] == [
        (name, kind) for name in names for kind in (LoRAType.A, LoRAType.B, LoRAType.GAIN)
    ]


def test_order_is_the_targets_even_where_the_model_has_another() -> None:
    model = TinyModel()
    sites = lora_sites(tuple(reversed(TARGETS)), PROJECTIONS, NUM_LAYERS)
    wrap_targets(model, sites, RoutingContext())
    assert [layer.site for _, layer in lora_layers(model)] == list(sites)


def sites_with(path: str, *projections: str) -> tuple[LoRASite, ...]:
    return lora_sites((TARGETS[1], LoRATargetModule(path, projections)), PROJECTIONS, NUM_LAYERS)


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        (sites_with("self_attn.absent", "q_proj"), "'self_attn.absent' matches no callable layer at layers.0"),
        (sites_with("cross_attn.o_proj", "q_proj"), "matches no callable"),
        (sites_with("mlp.down_proj", "q_proj"), r"\(24, 16\).*\(16, 16\)"),
        (lora_sites(TARGETS, PROJECTIONS, 3), "2 decoder layers, num_layers says 3"),
    ],
)
def test_a_model_that_cannot_be_wrapped_is_left_as_it_was(sites: tuple[LoRASite, ...], message: str) -> None:
    model = TinyModel()
    with pytest.raises(ValueError, match=message):
        wrap_targets(model, sites, RoutingContext())
    assert lora_layers(model) == []


def test_a_model_is_wrapped_once() -> None:
    model = TinyModel()
    wrap_targets(model, SITES, RoutingContext())
    with pytest.raises(ValueError, match="wrapped already"):
        wrap_targets(model, SITES, RoutingContext())


def test_the_decoder_layers_must_be_found() -> None:
    with pytest.raises(ValueError, match="Linear has 0 module lists named `layers`"):
        wrap_targets(nn.Linear(2, 2), SITES, RoutingContext())


def lm_sites_without(name: str) -> tuple[LoRASite, ...]:
    """The sites of a `TinyLM`, one target renamed to what it has not."""
    renamed = (
        replace(target, path=f"absent_{target.path}") if target.path == name else target for target in LM_TARGETS
    )
    return lora_sites(tuple(renamed), LM_PROJECTIONS, NUM_LAYERS)


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_an_embedding_or_head_that_is_not_there_is_refused(name: str) -> None:
    model = TinyLM()
    with pytest.raises(ValueError, match=f"'absent_{name}' matches no callable layer"):
        wrap_targets(model, lm_sites_without(name), RoutingContext())
    assert lora_layers(model) == []
    # The head is not looked for beside the embedding, nor the other way round.
    with pytest.raises(ValueError, match="'lm_head' matches no callable layer"):
        wrap_targets(model.model, LM_SITES, RoutingContext())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_wrapping_embedding_and_head_keeps_names_ties_and_outputs(tied: bool) -> None:
    plain, model = TinyLM(tied=tied), TinyLM(tied=tied)
    wrap_targets(model, LM_SITES, RoutingContext())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert isinstance(model.model.embed_tokens, LoRAEmbedding)
    assert isinstance(model.lm_head, LoRALinear)
    assert [layer.site for _, layer in lora_layers(model)] == list(LM_SITES)
    ids = torch.arange(5)
    assert torch.equal(model(ids), plain(ids))
