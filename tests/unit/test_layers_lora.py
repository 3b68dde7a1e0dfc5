"""LoRA layers: transparent to names and to base rows, in place for adapter rows."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from kernels import PackedLinear, build_routing
from lora_core.layers import LoRAEmbedding, LoRALinear, LoRAModelWrapper, RoutingContext
from lora_core.models.activations import ACTIVATIONS
from lora_core.models.linear import Linear
from lora_core.stacks import SiteStacks
from lora_core.targets import EMBEDDING_TARGET, LoRASite, lora_sites
from tests.kernels import interpreter
from tests.unit.adapted_model import NUM_LAYERS, PROJECTIONS, TARGETS

CPU = torch.device("cpu")
SITES = lora_sites(TARGETS, PROJECTIONS, NUM_LAYERS)
QKV_SITE = SITES[0]


def random_stacks(site: LoRASite, num_slots: int, rank: int) -> SiteStacks:
    """Every slot live, none with a gain."""
    a = torch.randn(num_slots, len(site.slices) * rank, site.in_features)
    b = torch.randn(num_slots, site.out_features, rank)
    return SiteStacks(a, b, torch.zeros(num_slots, site.out_features), frozenset(range(num_slots)))


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
    layer.stacks = random_stacks(QKV_SITE, num_slots=3, rank=4)
    a, b = layer.stacks.a, layer.stacks.b
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

    layer.stacks = random_stacks(QKV_SITE, num_slots=1, rank=2)
    a, b = layer.stacks.a, layer.stacks.b
    context.routing = build_routing([0], [0, 2], [2], num_rows=3, max_groups=1, device=CPU)
    y, plain = layer(x), base(x)
    delta = dense_delta(x[:2], a[0], b[0], QKV_SITE.slices)
    torch.testing.assert_close(y[:2], plain[:2] + delta, rtol=1e-5, atol=1e-5)
    assert torch.equal(y[2:], plain[2:])


def test_names_stay_and_both_see_every_change() -> None:
    base = nn.Linear(16, 32)
    layer = LoRALinear(base, QKV_SITE, RoutingContext())
    layer.stacks = random_stacks(QKV_SITE, num_slots=1, rank=2)
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


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that reach the device, and notes the shapes of what they are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[str] = []
        self.shapes: list[list[torch.Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launches.append(str(func))
        self.shapes.append([value.shape for value in args if isinstance(value, Tensor)])
        return func(*args, **(kwargs or {}))


def launches(layer: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
    counter = LaunchCounter()
    with torch.no_grad(), counter:
        layer(x)
    return counter.launches


def random_gains(stacks: SiteStacks, *slots: int) -> None:
    for slot in slots:
        stacks.gain[slot].normal_()
    stacks.gain_slots = frozenset(slots)


def test_a_layer_where_no_slot_of_the_step_is_live_launches_nothing() -> None:
    context = RoutingContext()
    base = nn.Linear(16, 32)
    layer = LoRALinear(base, QKV_SITE, context)
    layer.stacks = random_stacks(QKV_SITE, num_slots=3, rank=4)
    random_gains(layer.stacks, 1)
    x = torch.randn(6, 16)
    context.routing = build_routing([2, 0], [0, 3, 5], [4, 4, 4], num_rows=6, max_groups=3, device=CPU)
    plain = launches(base, x)
    layer.stacks.live_slots = frozenset({1})
    assert launches(layer, x) == plain
    assert not layer.is_live(context.routing)
    layer.stacks.live_slots = frozenset({1, 0})
    with_pair = launches(layer, x)
    assert len(with_pair) > len(plain)
    assert layer.is_live(context.routing)
    random_gains(layer.stacks, 0, 1)
    assert len(launches(layer, x)) > len(with_pair)
    # A slot without an adapter's rank is empty, whatever is said of it.
    context.routing = build_routing([0], [0, 5], [0, 4, 4], num_rows=6, max_groups=3, device=CPU)
    assert launches(layer, x) == plain


def test_rows_of_slots_that_are_not_live_keep_their_bits() -> None:
    torch.manual_seed(4)
    context = RoutingContext()
    base = nn.Linear(16, 32)
    layer = LoRALinear(base, QKV_SITE, context)
    layer.stacks = random_stacks(QKV_SITE, num_slots=4, rank=4)
    random_gains(layer.stacks, 0, 3)
    layer.stacks.live_slots = frozenset({3, 1})
    layer.stacks.gain_slots = frozenset({3})
    # What is in slots that are not live does not matter.
    layer.stacks.a[2].fill_(torch.nan)
    x = torch.randn(9, 16)
    context.routing = build_routing([3, 2, 1, 0], [0, 2, 4, 6, 8], [4] * 4, num_rows=9, max_groups=4, device=CPU)
    with torch.inference_mode():
        y, plain = layer(x), base(x)
    a, b, gain = layer.stacks.a, layer.stacks.b, layer.stacks.gain
    for slot, rows in ((3, slice(0, 2)), (1, slice(4, 6))):
        expected = plain[rows] + dense_delta(x[rows], a[slot], b[slot], QKV_SITE.slices)
        if slot == 3:
            expected += gain[3] * (plain[rows] - base.bias)
        torch.testing.assert_close(y[rows], expected, rtol=1e-5, atol=1e-5)
    for rows in (slice(2, 4), slice(6, 9)):
        assert torch.equal(y[rows], plain[rows])


@pytest.mark.parametrize("storage", ["plain", "packed", "only packed"])
def test_a_gain_leaves_out_the_bias_however_the_weight_is_stored(storage: str) -> None:
    torch.manual_seed(5)
    context = RoutingContext()
    base = Linear(16, 32)
    base.bias.detach().fill_(10.0)
    weight = base.weight.detach().clone()
    if storage == "packed":
        base.pack()
    packed = PackedLinear(weight, base.bias.detach())
    layer = LoRALinear(packed if storage == "only packed" else base, QKV_SITE, context)
    layer.stacks = random_stacks(QKV_SITE, num_slots=1, rank=2)
    layer.stacks.b.zero_()
    random_gains(layer.stacks, 0)
    x = torch.randn(3, 16)
    context.routing = build_routing([0], [0, 2], [2], num_rows=3, max_groups=1, device=CPU)
    with torch.inference_mode():
        y = layer(x)
    gains = torch.stack([1 + layer.stacks.gain[0], 1 + layer.stacks.gain[0], torch.ones(32)])
    torch.testing.assert_close(y, gains * (x @ weight.T) + 10.0, rtol=1e-5, atol=1e-5)


def test_leading_dimensions_are_rows() -> None:
    torch.manual_seed(6)
    context = RoutingContext()
    layer = LoRALinear(nn.Linear(16, 32), QKV_SITE, context)
    layer.stacks = random_stacks(QKV_SITE, num_slots=2, rank=4)
    random_gains(layer.stacks, 1)
    x = torch.randn(2, 5, 16)
    context.routing = build_routing([1, 0], [0, 5, 8], [4, 4], num_rows=10, max_groups=2, device=CPU)
    with torch.inference_mode():
        assert torch.equal(layer(x), layer(x.view(10, 16)).view(2, 5, 32))


def test_an_embedding_whose_base_scales_scales_the_product_too() -> None:
    """As PEFT does for Gemma 3's scaled embedding."""
    torch.manual_seed(7)
    context = RoutingContext()
    site = LoRASite(0, None, EMBEDDING_TARGET, 11, (16,))
    base = Gemma3TextScaledWordEmbedding(11, 16, padding_idx=0, embed_scale=4.0)
    layer = LoRAEmbedding(base, site, context)
    layer.stacks = SiteStacks(torch.randn(1, 11, 2), torch.randn(1, 16, 2), torch.zeros(1, 16), frozenset({0}))
    ids = torch.tensor([3, 10, 3, 5])
    context.routing = build_routing([0], [0, 3], [2], num_rows=4, max_groups=1, device=CPU)
    with torch.inference_mode():
        y, plain = layer(ids), base(ids)
    product = layer.stacks.a[0][ids[:3]] @ layer.stacks.b[0].T
    torch.testing.assert_close(y[:3], plain[:3] + 4 * product, rtol=1e-5, atol=1e-5)
    assert torch.equal(y[3:], plain[3:])


def test_a_scaled_embedding_runs_the_same_whichever_rows_have_adapters() -> None:
    """With a tile table, as a captured graph has it; zeros of base rows keep their sign."""
    interpreter.install()
    torch.manual_seed(9)
    base = Gemma3TextScaledWordEmbedding(11, 16, padding_idx=0, embed_scale=4.0)
    base.weight.data[5] = -0.0
    layer = LoRAEmbedding(base, LoRASite(0, None, EMBEDDING_TARGET, 11, (16,)), RoutingContext())
    stacks = SiteStacks(torch.randn(1, 11, 2), torch.randn(1, 16, 2), torch.zeros(1, 16), frozenset({0}))
    layer.stacks = stacks
    ids, sizes = torch.tensor([3, 10, 3, 5, 5]), []
    for end in (1, 4):
        layer.context.routing = build_routing([0], [0, end], [2], num_rows=5, max_groups=1, device=CPU, block_m=8)
        with torch.inference_mode(), LaunchCounter() as operators:
            y, plain = layer(ids), base(ids)
        sizes.append(operators.shapes)
        product = stacks.a[0][ids[:end]] @ stacks.b[0].T
        torch.testing.assert_close(y[:end], plain[:end] + 4 * product, rtol=1e-5, atol=1e-5)
        assert torch.equal(y[end:], plain[end:])
        assert torch.equal(y[end:].signbit(), plain[end:].signbit())
        assert y[4].signbit().all()
    assert sizes[0] == sizes[1]


def test_an_embedding_of_another_shape_is_refused() -> None:
    site = LoRASite(0, None, EMBEDDING_TARGET, 11, (16,))
    with pytest.raises(ValueError, match=r"embed_tokens.*\(12, 16\).*\(11, 16\)"):
        LoRAEmbedding(nn.Embedding(12, 16), site, RoutingContext())


def test_a_routing_put_in_force_for_other_calls_ends_with_them() -> None:
    context = RoutingContext()
    wrapper = LoRAModelWrapper(nn.Identity(), context)
    routing = build_routing([], [0], [0], num_rows=1, max_groups=1, device=CPU)
    with wrapper.routed(routing):
        assert context.routing is routing
    with pytest.raises(RuntimeError, match="a fault"), wrapper.routed(routing):
        raise RuntimeError("a fault")
    assert context.routing is None


GATE_UP_SITE = SITES[2]


def gated_layer(
    base: Callable[[Tensor], Tensor], dtype: torch.dtype, num_slots: int = 2
) -> tuple[LoRALinear, SiteStacks]:
    """A layer of gate and up with stacks of some dtype, every slot live."""
    layer = LoRALinear(base, GATE_UP_SITE, RoutingContext())
    stacks = random_stacks(GATE_UP_SITE, num_slots, rank=4)
    layer.stacks = replace(stacks, a=stacks.a.to(dtype), b=stacks.b.to(dtype))
    return layer, layer.stacks


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_a_gated_layer_on_the_cpu_is_the_layer_and_then_the_gate(activation: str) -> None:
    torch.manual_seed(8)
    layer, _ = gated_layer(Linear(16, 48, bias=False), torch.float32)
    x = torch.randn(5, 16)
    for lora_ids, offsets in (([1, 0], [0, 2, 4]), ([], [0])):
        layer.context.routing = build_routing(lora_ids, offsets, [4, 4], num_rows=5, max_groups=2, device=CPU)
        with torch.inference_mode():
            gate, up = layer(x).chunk(2, -1)
            torch.testing.assert_close(layer.gated(x, activation), ACTIVATIONS[activation](gate) * up)


TILED_OPERATORS = {
    "silu": ["sgmv_swiglu"],
    "gelu_pytorch_tanh": ["sgmv_swiglu"],
    # These are no epilogue of the kernel.
    "relu": ["sgmv"],
    "silu with a gain": ["scale_rows", "sgmv"],
}


# The interpreter is numpy, which says that the exponential of a large number is infinite.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("kind", TILED_OPERATORS)
def test_a_gated_layer_with_tiles_is_one_operation_where_it_can_be(kind: str) -> None:
    interpreter.install()
    torch.manual_seed(9)
    activation, _, gain = kind.partition(" ")
    base = Linear(16, 48, bias=False).to(torch.bfloat16)
    layer, stacks = gated_layer(base, torch.bfloat16)
    if gain:
        random_gains(stacks, 0)
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    routing = build_routing([1, 0], [0, 2, 4], [4, 4], num_rows=5, max_groups=2, device=CPU, block_m=8)
    layer.context.routing = routing
    ran = [name.split(".")[1] for name in launches(lambda x: layer.gated(x, activation), x) if "lora_fleet" in name]
    assert ran == TILED_OPERATORS[kind]
    with torch.inference_mode():
        found = layer.gated(x, activation)
        gate, up = layer(x).chunk(2, -1)
        expected = ACTIVATIONS[activation](gate) * up
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-5)
        # Base rows are those of a step without adapters.
        plain = base(x)[4:].chunk(2, -1)
        torch.testing.assert_close(found[4:], ACTIVATIONS[activation](plain[0]) * plain[1], rtol=2**-7, atol=1e-5)
    nobody = build_routing([], [0], [4, 4], num_rows=5, max_groups=2, device=CPU, block_m=8)
    layer.context.routing = nobody
    assert not [name for name in launches(lambda x: layer.gated(x, activation), x) if "lora_fleet" in name]


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What compares the arguments of `sgmv`, each time it does."""
    module, checks = sys.modules["kernels.sgmv"], []
    plain: Callable[..., None] = module.check_sgmv

    def check_sgmv(*args: Any) -> None:
        checks.append("sgmv")
        plain(*args)

    monkeypatch.setattr(module, "check_sgmv", check_sgmv)
    return checks


def test_arguments_are_compared_once_for_each_binding_and_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LoRALinear(nn.Linear(16, 32), QKV_SITE, RoutingContext())
    layer.stacks = random_stacks(QKV_SITE, num_slots=2, rank=4)
    layer.context.routing = build_routing([0], [0, 2], [4, 4], num_rows=5, max_groups=2, device=CPU)
    checks = count_checks(monkeypatch)
    with torch.inference_mode():
        for _ in range(3):
            layer(torch.randn(5, 16))
        assert len(checks) == 1
        # Rows that the routing does not know of.
        layer(torch.randn(6, 16))
        assert len(checks) == 2
        with pytest.raises(ValueError, match="x has 1 rows, fewer than the routing's end, row 2"):
            layer(torch.randn(1, 16))
        layer.stacks = random_stacks(QKV_SITE, num_slots=2, rank=4)
        layer(torch.randn(5, 16))
        assert len(checks) == 4


def test_stacks_that_do_not_fit_are_refused_at_the_first_step_with_them() -> None:
    layer = LoRALinear(nn.Linear(16, 32), QKV_SITE, RoutingContext())
    good = random_stacks(QKV_SITE, num_slots=2, rank=4)
    layer.context.routing = build_routing([0], [0, 2], [4, 4], num_rows=5, max_groups=2, device=CPU)
    with torch.inference_mode():
        for stacks in (good, replace(good, b=good.b.bfloat16()), replace(good, b=good.b.bfloat16())):
            layer.stacks = stacks
            if stacks is good:
                layer(torch.randn(5, 16))
                continue
            with pytest.raises(ValueError, match=r"b_stack is torch.bfloat16"):
                layer(torch.randn(5, 16))


@pytest.mark.parametrize(
    ("ranks", "device", "message"),
    [
        ([4, 4], "cpu", r"the routing has 2 slots of ranks up to 4, the model's LoRA layers 3 slots of rank 4"),
        ([4, 5, 0], "cpu", r"the routing has 3 slots of ranks up to 5, .* 3 slots of rank 4"),
        ([4, 4, 4], "meta", r"the routing is on meta, the LoRA layers' slots on cpu"),
    ],
)
def test_a_steps_routing_is_compared_with_the_slots_once(ranks: list[int], device: str, message: str) -> None:
    layer = LoRALinear(nn.Linear(16, 32), QKV_SITE, RoutingContext())
    layer.stacks = random_stacks(QKV_SITE, num_slots=3, rank=4)
    wrapper = LoRAModelWrapper(nn.Sequential(layer), layer.context)
    assert [name for name, _ in wrapper.named_parameters()] == ["model.0.weight", "model.0.bias"]
    good = build_routing([0], [0, 2], [4, 4, 4], num_rows=5, max_groups=2, device=CPU)
    with torch.inference_mode():
        assert wrapper(torch.randn(5, 16), routing=good).shape == (5, 32)
    bad = build_routing([0], [0, 2], ranks, num_rows=5, max_groups=2, device=torch.device(device))
    with pytest.raises(ValueError, match=message), wrapper.routed(bad):
        pass
    assert layer.context.routing is None
