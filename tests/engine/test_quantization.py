"""Quantised base models: against transformers and PEFT on a model that torchao quantised in the same way."""

import gc
import shutil
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig

from lora_core.config import Quantization
from lora_core.engine.engine import LLMEngine
from lora_core.engine.request import ScheduledBatch
from lora_core.errors import ConfigError
from lora_core.models.decoder import Decoder
from lora_core.models.linear import Linear
from lora_core.models.quantization import plan_quantization
from lora_core.models.weights import load_decoder
from tests.engine.answers import NUM_TOKENS, PROMPTS, ask, finish, make_engine
from tests.factories import make_adapter, reference_tokens, tiny_llama

# PEFT 0.21 says so of every torchao layer it wraps in a model that it did not see being quantised; nothing is merged.
pytestmark = pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning")

TORCHAO_TENSORS = ("Int8Tensor", "Int4OpaqueTensor")
CPU = torch.device("cpu")
QUANTIZED: tuple[Quantization, ...] = ("int8", "int4")
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"seed": 1},
    "untied": {"tied": False, "seed": 2},
    "biases": {"attention_bias": True, "mlp_bias": True, "seed": 3},
    "int4 groups of 64": {"hidden": 128, "intermediate": 192, "seed": 1},
}


def torchao_config(quantization: Quantization, group_size: int = 32) -> TorchAoConfig:
    if quantization == "int8":
        return TorchAoConfig(quant_type=Int8WeightOnlyConfig(set_inductor_config=False))
    return TorchAoConfig(quant_type=PrototypeInt4WeightOnlyConfig(group_size=group_size, set_inductor_config=False))


def reference_answer(base: Path, adapter: Path | None, prompt: Sequence[int], config: TorchAoConfig) -> list[int]:
    """Greedy tokens of the model as transformers quantises it, with the adapter through PEFT, in fp32."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    token_ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = model.eval()(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]
            first, second = logits.topk(2).values
            assert first - second > 1e-3, "a near tie: this model is of no use here, choose another seed"
            token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]


def load(folder: Path, quantization: Quantization, *, pack: bool = False) -> Decoder:
    decoder, _ = load_decoder(folder, dtype=torch.float32, device=CPU, pack=pack, quantization=quantization)
    return decoder


def answers_of(engine: LLMEngine, work: Sequence[tuple[str | None, int]]) -> list[list[int]]:
    for index, (name, size) in enumerate(work):
        ask(engine, str(index), name, size)
    answers = finish(engine)
    assert not [answer.error for answer in answers.values() if answer.error]
    return [answers[str(index)].tokens for index in range(len(work))]


# Exact tokens


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("model", MODELS)
def test_the_base_answers_as_transformers_quantised_by_the_same_torchao_config(
    model: str, quantization: Quantization, tmp_path: Path
) -> None:
    base = tiny_llama(tmp_path, **MODELS[model])
    config = torchao_config(quantization, 64 if "64" in model else 32)
    found = answers_of(make_engine(base, {}, slots=0, quantization=quantization), [(None, 12), (None, 3)])
    assert found == [reference_answer(base, None, PROMPTS[size], config) for size in (12, 3)]
    assert found != answers_of(make_engine(base, {}, slots=0), [(None, 12), (None, 3)]), "quantised or not is the same"


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_every_row_of_a_mixed_batch_answers_as_peft_on_the_quantised_model(
    quantization: Quantization, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    engine = make_engine(tiny_base, tiny_adapters, slots=4, quantization=quantization)
    work = [(None, 7), *((name, 7) for name in tiny_adapters), (None, 12), ("linear-r4", 20)]
    found = answers_of(engine, work)
    config = torchao_config(quantization)
    for tokens, (name, size) in zip(found, work, strict=True):
        adapter = None if name is None else tiny_adapters[name]
        assert tokens == reference_answer(tiny_base, adapter, PROMPTS[size], config), (name, size)
    assert [found[0], found[5]] == answers_of(engine, [(None, 7), (None, 12)]), "neighbours change a base row"


def dequantised_copy(base: Path, folder: Path, config: TorchAoConfig) -> Path:
    """The checkpoint with each quantised weight replaced by what torchao multiplies with."""
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config)
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ in TORCHAO_TENSORS:
            tensors[name] = F.linear(torch.eye(parameter.shape[1]), parameter).T.contiguous()
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_dora_on_a_quantised_base_answers_as_peft_on_its_dequantised_weights(
    quantization: Quantization, tiny_base: Path, tmp_path: Path
) -> None:
    """PEFT takes DoRA's norms from the dequantised weight, which torchao does not give for int4."""
    adapter = make_adapter(tiny_base, tmp_path / "dora", use_dora=True, seed=5)
    found = answers_of(make_engine(tiny_base, {"dora": adapter}, quantization=quantization), [("dora", 7), (None, 7)])
    config = torchao_config(quantization)
    plain = dequantised_copy(tiny_base, tmp_path / "dequantised", config)
    assert found == [reference_tokens(plain, folder, PROMPTS[7], NUM_TOKENS) for folder in (adapter, None)]
    if quantization == "int8":
        assert found[0] == reference_answer(tiny_base, adapter, PROMPTS[7], config)


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_base_requests_get_the_same_logits_bit_for_bit_with_lora_on(
    quantization: Quantization, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    logits: list[list[Tensor]] = []
    for slots in (0, 3):
        engine = make_engine(tiny_base, tiny_adapters, slots=slots, quantization=quantization)
        logits.append([])
        run = engine.runner.run

        def record(batch: ScheduledBatch, run: Any = run, into: list[Tensor] = logits[-1]) -> Tensor:
            into.append(run(batch).clone())
            return into[-1]

        engine.runner.run = record  # type: ignore[method-assign, assignment]
        answers_of(engine, [(None, 3), (None, 20)])
    assert len(logits[0]) == NUM_TOKENS
    assert all(torch.equal(off, on) for off, on in zip(*logits, strict=True))


# Layers


def linear(out: int, width: int, dtype: torch.dtype, *, bias: bool = True, seed: int = 0) -> Linear:
    layer = Linear(width, out, bias=bias).to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)
    return layer


def quantize(layer: Linear, quantization: Quantization) -> Linear:
    shapes = {"layer": (layer.out_features, layer.in_features)}
    quantizer = plan_quantization(quantization, shapes, dtype=layer.weight.dtype, device=CPU)
    assert quantizer is not None
    layer.quantize(quantizer)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_fused_projections_quantise_as_they_do_apart(quantization: Quantization, dtype: torch.dtype) -> None:
    """Also where a projection ends inside a block of the int4 kernel, which has up to 64 rows."""
    parts = [linear(out, 96, dtype, seed=out) for out in (112, 16, 48)]
    fused = linear(176, 96, dtype)
    fused.weight.copy_(torch.cat([part.weight for part in parts]))
    fused.bias.copy_(torch.cat([part.bias for part in parts]))
    for layer in (fused, *parts):
        quantize(layer, quantization)
    assert torch.equal(fused.dense_weight(), torch.cat([part.dense_weight() for part in parts]))
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    apart = torch.cat([part(x) for part in parts], -1)
    torch.testing.assert_close(fused(x), apart, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("out", "width"), [(16, 32), (80, 64), (144, 384)])
@pytest.mark.parametrize("storage", ["plain", "packed", *QUANTIZED])
def test_the_dense_weight_is_what_the_layer_multiplies_with(
    storage: Any, out: int, width: int, dtype: torch.dtype
) -> None:
    layer = linear(out, width, dtype, bias=False)
    plain = layer.weight.clone()
    if storage == "packed":
        layer.pack()
    elif storage != "plain":
        quantize(layer, storage)
    dense = layer.dense_weight()
    assert dense.shape == (out, width)
    assert dense.dtype == dtype
    assert dense.layout == torch.strided
    products = layer(torch.eye(width, dtype=dtype)).T
    if storage not in QUANTIZED:
        assert torch.equal(dense, plain)
    else:
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(dense, products, rtol=2 * eps, atol=eps * float(plain.abs().max()))
        # Half a step of the coarser of the two: 15 steps in twice the largest weight, rounded to the data type.
        assert (dense - plain).abs().max() < {"int8": 1 / 127, "int4": 1 / 14}[storage] * plain.abs().max()
        held = weakref.ref(dense)
        del dense
        assert held() is None, "something keeps the dense weight"


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_the_dense_weight_may_be_asked_for_while_another_thread_multiplies(quantization: Quantization) -> None:
    layer = quantize(linear(144, 96, torch.bfloat16), quantization)
    x = torch.randn(3, 96).bfloat16()
    expected, dense = layer(x), layer.dense_weight()

    def ask_for_it() -> Tensor:
        return layer.dense_weight()

    with ThreadPoolExecutor(2) as pool, torch.inference_mode():
        futures = [pool.submit(ask_for_it) for _ in range(30)]
        products = [layer(x) for _ in range(60)]
        assert all(torch.equal(future.result(), dense) for future in futures)
    assert all(torch.equal(product, expected) for product in products)


@pytest.mark.parametrize("num_rows", [1, 5, 70])
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_a_quantised_layer_in_bf16_multiplies_with_its_dense_weight(quantization: Quantization, num_rows: int) -> None:
    layer = quantize(linear(144, 384, torch.bfloat16), quantization)
    x = torch.randn(num_rows, 384, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = F.linear(x.double(), layer.dense_weight().double(), layer.bias.double())
    torch.testing.assert_close(layer(x).double(), exact, rtol=0.02, atol=0.02)


# Loading


@pytest.mark.parametrize("pack", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_only_the_linear_layers_of_decoder_layers_are_quantised(
    quantization: Quantization, pack: bool, tiny_base: Path
) -> None:
    decoder = load(tiny_base, quantization, pack=pack)
    layers = {name: layer for name, layer in decoder.named_modules() if isinstance(layer, Linear)}
    quantised = {name for name, layer in layers.items() if type(layer.weight).__name__ in TORCHAO_TENSORS}
    assert quantised == layers.keys() - {"lm_head"}
    checkpoint = load_file(tiny_base / "model.safetensors")
    embedding = checkpoint["model.embed_tokens.weight"]
    assert torch.equal(decoder.model.embed_tokens.weight, embedding)
    assert torch.equal(decoder.lm_head.dense_weight(), embedding)
    if not pack:
        assert decoder.lm_head.weight.data_ptr() == decoder.model.embed_tokens.weight.data_ptr()


def test_without_quantisation_the_decoder_layers_are_packed(tiny_base: Path) -> None:
    decoder = load(tiny_base, "none", pack=True)
    layers = [layer for layer in decoder.modules() if isinstance(layer, Linear)]
    assert len(layers) == 9
    assert all(layer.weight is None for layer in layers)


def test_no_more_than_one_decoder_layer_is_held_unquantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_llama(tmp_path, layers=6, vocab=160)
    # The layers themselves, not their ids: a layer of another test that is freed meanwhile gives its id to a new one.
    before = [layer for layer in gc.get_objects() if type(layer) is Linear]
    known = {id(layer) for layer in before}
    num_plain: list[int] = []
    quantize_layer = Linear.quantize

    def count_plain(layer: Linear, quantizer: Any) -> None:
        loading = [found for found in gc.get_objects() if type(found) is Linear and id(found) not in known]
        loaded = [found.weight for found in loading if not found.weight.is_meta and found.out_features != 160]
        num_plain.append(sum(type(weight) is torch.nn.Parameter for weight in loaded))
        quantize_layer(layer, quantizer)

    monkeypatch.setattr(Linear, "quantize", count_plain)
    load(base, "int8")
    assert num_plain == [4, 3, 2, 1] * 6


def test_torchao_is_imported_only_where_it_is_used() -> None:
    code = "import sys, lora_core.engine.engine; sys.exit('torchao' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# What cannot be


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"hidden": 48},
            r"quantization is 'int4'.*layers.0.self_attn.qkv_proj.*in_features 48.*multiple of 32.*'int8'",
        ),
        ({"intermediate": 80}, r"layers.0.mlp.down_proj.*in_features 80"),
        ({"head_dim": 4, "heads": 8, "kv_heads": 1}, r"qkv_proj.*out_features 40, expected a multiple of 16"),
    ],
    ids=["input", "input of the last", "output"],
)
def test_int4_refuses_shapes_its_kernel_has_not_and_int8_serves_them(
    model: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = tiny_llama(tmp_path, **model)
    with pytest.raises(ConfigError, match=message):
        make_engine(base, {}, slots=0, quantization="int4")
    assert answers_of(make_engine(base, {}, slots=0, quantization="int8"), [(None, 7)])


def test_int4_is_refused_on_other_devices() -> None:
    shapes = {"layer": (64, 64)}
    with pytest.raises(ConfigError, match=r"quantization is 'int4' and device is 'cuda'.*'int8'"):
        plan_quantization("int4", shapes, dtype=torch.bfloat16, device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("quantization", "module"), [("int4", "torchao.prototype.quantization.int4"), ("int8", "torchao.quantization")]
)
def test_a_torchao_without_the_quantisation_is_named(
    quantization: Quantization, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"quantization is '{quantization}'.*install torchao 0.18"):
        plan_quantization(quantization, {"layer": (64, 64)}, dtype=torch.bfloat16, device=CPU)


@pytest.mark.parametrize(
    ("widths", "group_size"), [((128, 384), 128), ((576, 1536), 64), ((128, 96), 32), ((32, 4096), 32)]
)
def test_the_int4_group_is_the_largest_that_divides_every_input(widths: tuple[int, ...], group_size: int) -> None:
    shapes = {str(width): (64, width) for width in widths}
    quantizer = plan_quantization("int4", shapes, dtype=torch.bfloat16, device=CPU)
    assert quantizer is not None
    assert quantizer.group_size == group_size


def test_int4_outside_bfloat16_is_served_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for dtype, num_warnings in ((torch.bfloat16, 0), (torch.float16, 1)):
        caplog.clear()
        plan_quantization("int4", {"layer": (64, 64)}, dtype=dtype, device=CPU)
        assert len(caplog.records) == num_warnings
