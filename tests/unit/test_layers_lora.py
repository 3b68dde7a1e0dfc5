"""LoRA layers: transparent to names and to base rows, in place for adapter rows."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from kernels import PackedLinear, build_routing
from lora_core.layers import (
    LoRALinear,
    LoRAModelWrapper,
    RoutingContext,
    lora_layers,
    lora_parameters,
    wrap_targets,
)
from lora_core.targets import LoRASite, LoRATargetModule, lora_sites
from lora_core.types import LoRAType
from tests.unit.adapted_model import NUM_LAYERS, PROJECTIONS, TARGETS, TinyModel, random_rows

CPU = torch.device("cpu")
SITES = lora_sites(TARGETS, PROJECTIONS, NUM_LAYERS)
QKV_SITE = SITES[0]


def random_stacks(site: LoRASite, num_slots: int, rank: int) -> tuple[Tensor, Tensor]:
    a = torch.randn(num_slots, len(site.slices) * rank, site.in_features)
    return a, torch.randn(num_slots, sum(site.slices), rank)


def dense_delta(x: Tensor, a: Tensor, b: Tensor, slices: Sequence[int]) -> Tensor:
    """B @ A of one slot applied to x, projection by projection."""
    rank = b.shape[1]
    parts = zip(torch.split(a, rank), torch.split(b, list(slices)), strict=True)
    return torch.cat([x @ (b_part @ a_part).T for a_part, b_part in parts], dim=1)


def test_rows_get_their_slot_and_base_rows_keep_their_bits() -> None:
    torch.manual_seed(1)
    context = RoutingContext()
    base = nn.Linear(16, 32)
    layer = LoRALinear(base, QKV_SITE, context)
    a, b = random_stacks(QKV_SITE, num_slots=3, rank=4)
    layer.bind(a, b)
    x = torch.randn(9, 16)
    context.routing = build_routing([2, 0], [0, 3, 7], [4, 4, 4], num_rows=9, max_groups=3, device=CPU)
    with torch.inference_mode():
        y, plain = layer(x), base(x)
    torch.testing.assert_close(y[:3], plain[:3] + dense_delta(x[:3], a[2], b[2], QKV_SITE.slices), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        y[3:7], plain[3:7] + dense_delta(x[3:7], a[0], b[0], QKV_SITE.slices), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(y[7:], plain[7:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_adapter_rows_the_output_is_the_bases_own(dtype: torch.dtype) -> None:
    context = RoutingContext()
    base = nn.Linear(16, 32, dtype=dtype)
    layer = LoRALinear(base, QKV_SITE, context)
    x = torch.randn(5, 16, dtype=dtype)
    assert torch.equal(layer(x), base(x))
    context.routing = build_routing([], [0], [0], num_rows=5, max_groups=1, device=CPU)
    assert torch.equal(layer(x), base(x))


def test_any_callable_can_be_the_base() -> None:
    torch.manual_seed(3)
    context = RoutingContext()
    base = PackedLinear(torch.randn(32, 16), torch.randn(32))
    layer = LoRALinear(base, QKV_SITE, context)
    assert list(layer.state_dict()) == []
    x = torch.randn(3, 16)
    assert torch.equal(layer(x), base(x))

    a, b = random_stacks(QKV_SITE, num_slots=1, rank=2)
    layer.bind(a, b)
    context.routing = build_routing([0], [0, 2], [2], num_rows=3, max_groups=1, device=CPU)
    y, plain = layer(x), base(x)
    delta = dense_delta(x[:2], a[0], b[0], QKV_SITE.slices)
    torch.testing.assert_close(y[:2], plain[:2] + delta, rtol=1e-5, atol=1e-5)
    assert torch.equal(y[2:], plain[2:])


def test_names_stay_and_both_see_every_change() -> None:
    base = nn.Linear(16, 32)
    layer = LoRALinear(base, QKV_SITE, RoutingContext())
    layer.bind(*random_stacks(QKV_SITE, num_slots=1, rank=2))
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert dict(layer.named_parameters()).keys() == {"weight", "bias"}

    weight, bias = torch.randn(32, 16), torch.randn(32)
    layer.load_state_dict({"weight": weight, "bias": bias}, assign=True)
    x = torch.randn(2, 16)
    assert torch.equal(layer(x), nn.functional.linear(x, weight, bias))
    layer.to(torch.bfloat16)
    assert layer(x.bfloat16()).dtype is torch.bfloat16


def test_a_base_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers.0.self_attn.qkv_proj.*\(16, 31\).*\(16, 32\)"):
        LoRALinear(nn.Linear(16, 31), QKV_SITE, RoutingContext())


def test_wrapping_keeps_names_places_and_outputs() -> None:
    plain, model = TinyModel(), TinyModel()
    wrap_targets(model, SITES, RoutingContext())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model.get_submodule("model.layers.1.mlp.gate_up_proj"), LoRALinear)
    x = random_rows(6)
    assert torch.equal(model(x), plain(x))


def test_order_is_layers_then_targets_then_a_before_b() -> None:
    model = TinyModel()
    wrap_targets(model, SITES, RoutingContext())
    paths = [target.path for target in TARGETS]
    names = [f"model.layers.{layer}.{path}" for layer in range(NUM_LAYERS) for path in paths]
    assert [name for name, _ in lora_layers(model)] == names
    assert [(name, kind) for name, kind, _ in lora_parameters(model)] == [
        (name, kind) for name in names for kind in (LoRAType.A, LoRAType.B)
    ]


def test_order_is_the_targets_even_where_the_model_has_another() -> None:
    model = TinyModel()
    sites = lora_sites(tuple(reversed(TARGETS)), PROJECTIONS, NUM_LAYERS)
    wrap_targets(model, sites, RoutingContext())
    assert [layer.site for _, layer in lora_layers(model)] == list(sites)


def test_the_wrapper_sets_the_routing_for_one_call_and_clears_it_after_an_error() -> None:
    context = RoutingContext()
    routing = build_routing([], [0], [0], num_rows=1, max_groups=1, device=CPU)
    seen = []

    class Probe(nn.Module):
        def forward(self, x: Tensor, *, fail: bool) -> Tensor:
            seen.append(context.routing)
            if fail:
                raise RuntimeError("a fault in the model")
            return x

    wrapper = LoRAModelWrapper(Probe(), context)
    wrapper(torch.zeros(1), fail=False, routing=routing)
    with pytest.raises(RuntimeError, match="a fault"):
        wrapper(torch.zeros(1), fail=True, routing=routing)
    assert context.routing is None
    wrapper(torch.zeros(1), fail=False)
    assert seen == [routing, routing, None]


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
