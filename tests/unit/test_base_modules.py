"""The base model's weights and outputs by PEFT module."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from lora_core.base_modules import ModelBaseModules
from lora_core.layers import RoutingContext
from lora_core.models.linear import Linear
from lora_core.models.quantization import WeightQuantizer
from lora_core.wrapping import wrap_targets
from tests.unit.adapted_model import HIDDEN, KV, LM_MODULES, LM_SITES, VOCABULARY, TinyLM


def wrapped(model: TinyLM) -> TinyLM:
    wrap_targets(model, LM_SITES, RoutingContext())
    return model


def dense(module: str) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a module, straight from the model's parameters."""
    model = TinyLM()
    site = next(site for site in LM_SITES if module in site.modules)
    name = site.name if site.kind == "head" else f"model.{site.name}"
    state = model.state_dict()
    start = sum(site.slices[: site.modules.index(module)])
    rows = slice(None) if site.kind == "embedding" else slice(start, start + site.slices[site.modules.index(module)])
    bias = state.get(f"{name}.bias")
    return state[f"{name}.weight"][rows], None if bias is None else bias[rows]


def with_packed_layers(model: TinyLM) -> TinyLM:
    """The same model with the decoder's linear layers for plain ones, packed."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            packed = Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            packed.load_state_dict(layer.state_dict())
            packed.pack()
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, packed)
    return model


def whole_weight(base: ModelBaseModules, module: str) -> Tensor:
    with base.open_weight(module) as weight:
        return torch.cat([weight.rows(start, start + 5) for start in range(0, len(weight.stored), 5)])


@pytest.mark.parametrize("pack", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("module", LM_MODULES)
def test_weights_and_canaries_are_those_of_the_projection(module: str, pack: bool) -> None:
    base = ModelBaseModules(wrapped(with_packed_layers(TinyLM()) if pack else TinyLM()))
    weight, bias = dense(module)
    found = whole_weight(base, module)
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
    assert torch.equal(found, weight)
    x, y = base.canary(module)
    if module == "embed_tokens":
        assert x.dtype == torch.int64
        assert torch.equal(y, weight[x])
        return
    assert (x.shape, x.dtype) == (weight.shape[1:], torch.float32)
    torch.testing.assert_close(x.square().mean(), torch.tensor(1.0))
    torch.testing.assert_close(y, nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_inputs_are_fixed_by_width_and_outputs_are_kept() -> None:
    first, second = ModelBaseModules(wrapped(TinyLM())), ModelBaseModules(wrapped(TinyLM()))
    q, head = "layers.0.self_attn.q_proj", "lm_head"
    assert torch.equal(first.canary(q)[0], second.canary(head)[0])
    ids, _ = first.canary("embed_tokens")
    assert ids.tolist() == list(range(VOCABULARY))
    # One run of a fused layer serves all of its projections.
    q_y, v_y = first.canary(q)[1], first.canary("layers.0.self_attn.v_proj")[1]
    assert (q_y.shape, v_y.shape) == ((HIDDEN,), (KV,))
    assert v_y.data_ptr() - q_y.data_ptr() == (HIDDEN + KV) * 4
    assert first.canary(q)[1].data_ptr() == q_y.data_ptr()


def test_a_model_of_bf16_answers_in_bf16() -> None:
    base = ModelBaseModules(wrapped(TinyLM().bfloat16()))
    x, y = base.canary("lm_head")
    weight = whole_weight(base, "lm_head")
    assert (x.dtype, y.dtype, weight.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert torch.equal(x, x.bfloat16().float())
    torch.testing.assert_close(y.float(), weight @ x, rtol=1e-2, atol=1e-2)


def test_a_quantised_layer_answers_with_what_it_multiplies_with() -> None:
    model = TinyLM()
    layer = Linear(HIDDEN, HIDDEN, bias=False)
    attention = model.get_submodule("model.layers.0.self_attn")
    layer.load_state_dict(attention.get_submodule("o_proj").state_dict())
    layer.requires_grad_(False).quantize(WeightQuantizer("int8", None))
    attention.o_proj = layer
    base, name = ModelBaseModules(wrapped(model)), "layers.0.self_attn.o_proj"
    weight, (x, y) = whole_weight(base, name), base.canary(name)
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, dense(name)[0])
    torch.testing.assert_close(y, weight @ x, rtol=1e-4, atol=1e-4)


def test_an_unknown_module_is_a_key_error() -> None:
    base = ModelBaseModules(wrapped(TinyLM()))
    with pytest.raises(KeyError, match="cross_attn"):
        base.canary("layers.0.cross_attn.q_proj")
    with pytest.raises(KeyError, match="cross_attn"), base.open_weight("layers.0.cross_attn.q_proj"):
        pass


@pytest.mark.parametrize(
    ("pack", "room", "meets"),
    [(False, 0, True), (True, 0, False), (True, 2**28, True)],
    ids=["plain", "packed, no room for two", "packed"],
)
def test_unpacked_weights_take_bounded_memory(
    pack: bool, room: int, meets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_core.base_modules._UNPACKED_BYTES", room)
    base = ModelBaseModules(wrapped(with_packed_layers(TinyLM()) if pack else TinyLM()))
    both_open = threading.Barrier(2)

    def meet(name: str) -> bool:
        with base.open_weight(name):
            try:
                both_open.wait(5 if meets else 0.3)
            except threading.BrokenBarrierError:
                return False
            return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(meet, ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"))) == [meets] * 2


def test_a_plain_weight_is_the_models_own() -> None:
    base = ModelBaseModules(wrapped(TinyLM()))
    with base.open_weight("lm_head") as first, base.open_weight("lm_head") as second:
        assert first.stored.data_ptr() == second.stored.data_ptr()


def test_threads_may_ask_while_the_model_runs() -> None:
    model = wrapped(TinyLM())
    base, truth = ModelBaseModules(model), ModelBaseModules(wrapped(TinyLM()))
    stop, ids = threading.Event(), torch.arange(20)

    def step() -> None:
        with torch.inference_mode():
            expected = model(ids)
            while not stop.is_set():
                assert torch.equal(model(ids), expected)

    with ThreadPoolExecutor(5) as pool:
        steps = pool.submit(step)
        answers = list(pool.map(base.canary, LM_MODULES * 20))
        stop.set()
        steps.result(30)
    for (x, y), module in zip(answers, LM_MODULES * 20, strict=True):
        expected_x, expected_y = truth.canary(module)
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)
