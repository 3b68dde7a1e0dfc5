"""The decoder and its weights, against transformers."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_core.engine.attention import SequenceSpan, build_attention
from lora_core.engine.kv_cache import KVCache, KVLayout
from lora_core.errors import ConfigError, UnsupportedModel
from lora_core.models.decoder import Decoder
from lora_core.models.weights import load_decoder
from tests.factories import edit_config, reference_logits, reference_tokens, tiny_llama

CPU = torch.device("cpu")
PROMPT = [5, 17, 90, 3, 44, 44, 21, 8, 101, 63, 2]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + place / 8 for place in range(8)],
    "long_factor": [4.0] * 8,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "multi-head": {"kv_heads": 4},
    "multi-query": {"kv_heads": 1},
    "wide heads": {"head_dim": 24},
    "narrow heads": {"head_dim": 6, "heads": 8, "kv_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "coarse norm": {"rms_norm_eps": 1e-2},
    "rope theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "rope dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "rope llama3": {"rope_parameters": LLAMA3_ROPE},
    "rope yarn": {"rope_parameters": YARN_ROPE},
    "rope longrope": {"rope_parameters": LONG_ROPE},
}


class Greedy:
    """One sequence through a decoder and its paged cache."""

    def __init__(self, decoder: Decoder, *, num_tokens: int = 160, block_size: int = 16) -> None:
        config = decoder.config
        self.decoder = decoder
        self.layout = KVLayout(
            num_blocks=-(-num_tokens // block_size),
            num_kv_heads=config.num_kv_heads,
            block_size=block_size,
            head_dim=config.head_dim,
        )
        self.cache = KVCache(self.layout, config.num_layers, dtype=decoder.dtype, device=CPU)
        self.num_computed = 0

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """Logits after each of the next tokens."""
        start, stop = self.num_computed, self.num_computed + len(token_ids)
        self.num_computed = stop
        spans = [SequenceSpan(len(token_ids), stop, list(range(self.layout.num_blocks)))]
        attention = build_attention(
            spans, self.layout, windows=self.decoder.config.windows, dtype=self.decoder.dtype, device=CPU
        )
        hidden = self.decoder(torch.tensor(token_ids), torch.arange(start, stop), attention, self.cache.layers)
        return self.decoder.logits(hidden)

    def tokens(self, prompt: list[int], n: int) -> list[int]:
        token_ids = [int(self.logits(prompt)[-1].argmax())]
        while len(token_ids) < n:
            token_ids.append(int(self.logits(token_ids[-1:])[0].argmax()))
        return token_ids


def load(folder: Path, *, dtype: torch.dtype | None = torch.float32, pack: bool = False) -> Decoder:
    decoder, _ = load_decoder(folder, dtype=dtype, device=CPU, pack=pack)
    return decoder


@pytest.mark.parametrize("pack", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_equal_transformers(model: str, pack: bool, tmp_path: Path) -> None:
    base = tiny_llama(tmp_path, **MODELS[model])
    assert Greedy(load(base, pack=pack)).tokens(PROMPT, 24) == reference_tokens(base, None, PROMPT, 24)


@pytest.mark.parametrize("chunks", [[90], [1] * 90, [40, 1, 16, 33], [7, 83]])
def test_logits_equal_transformers_however_the_text_is_cut(chunks: list[int], tmp_path: Path) -> None:
    base = tiny_llama(tmp_path, rope_parameters=LLAMA3_ROPE)
    token_ids = torch.randint(128, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    greedy = Greedy(load(base), block_size=8)
    ends = itertools.accumulate(chunks)
    found = torch.cat([greedy.logits(token_ids[end - size : end]) for end, size in zip(ends, chunks, strict=True)])
    torch.testing.assert_close(found, reference_logits(base, None, token_ids), rtol=0, atol=5e-5)


TEXTS = (
    "The capital of France is Paris. The capital of Italy is",
    "Once upon a time there was a small village near the sea where",
    "def fibonacci(n):\n    if n < 2:\n        return n",
)


def test_real_model_is_close_to_transformers(demo_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_base)
    model = AutoModelForCausalLM.from_pretrained(demo_base, dtype=torch.bfloat16)
    fp32, bf16 = (load(demo_base, dtype=dtype, pack=True) for dtype in (torch.float32, None))
    errors, errors_of_transformers = [], []
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        expected = reference_logits(demo_base, None, token_ids)
        torch.testing.assert_close(Greedy(fp32).logits(token_ids), expected, rtol=0, atol=2e-3)
        with torch.inference_mode():
            rounded = model(torch.tensor([token_ids])).logits[0].float()
        errors.append((Greedy(bf16).logits(token_ids) - expected).abs().mean())
        errors_of_transformers.append((rounded - expected).abs().mean())
    # Further from the fp32 truth than transformers' own bf16 by a fifth at most. One text says little: the error of a
    # bf16 model is that of its few worst roundings, and halves or doubles with any of them.
    assert sum(errors) < 1.2 * sum(errors_of_transformers)


def test_dtype_is_the_checkpoints_unless_another_is_asked_for(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path)
    rewrite_weights(base, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    edit_config(base, dtype="bfloat16")
    assert load(base, dtype=None).dtype == torch.bfloat16
    assert load(base, dtype=torch.float16).dtype == torch.float16
    fp32 = load(base, dtype=torch.float32)
    assert {parameter.dtype for parameter in fp32.parameters()} == {torch.float32}
    edit_config(base, dtype=None)
    assert load(base, dtype=None).dtype == torch.bfloat16


def test_parameters_have_the_names_of_transformers_with_projections_fused(tiny_base: Path) -> None:
    decoder = load(tiny_base)
    layer = "model.layers.1."
    assert {name for name, _ in decoder.named_parameters() if name.startswith(layer)} == {
        f"{layer}{name}.weight"
        for name in (
            "input_layernorm",
            "self_attn.qkv_proj",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_up_proj",
            "mlp.down_proj",
        )
    }
    tensors = load_file(tiny_base / "model.safetensors")
    fused = torch.cat([tensors[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(decoder.state_dict()[f"{layer}self_attn.qkv_proj.weight"], fused)
    assert decoder.lm_head.weight.data_ptr() == decoder.model.embed_tokens.weight.data_ptr()


def test_packed_layers_let_go_of_their_plain_weights(tiny_base: Path) -> None:
    names = {name for name, _ in load(tiny_base, pack=True).named_parameters()}
    assert names == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(
            f"model.layers.{n}.{norm}.weight"
            for n in (0, 1)
            for norm in ("input_layernorm", "post_attention_layernorm")
        ),
    }


def test_weights_outlive_their_file(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path)
    greedy = Greedy(load(base))
    expected = reference_tokens(base, None, PROMPT, 8)
    weights = base / "model.safetensors"
    with weights.open("r+b") as file:
        file.write(b"\0" * weights.stat().st_size)
    assert greedy.tokens(PROMPT, 8) == expected


def test_shards_equal_one_file(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "one")
    sharded = split_into_shards(base, tmp_path / "sharded")
    assert Greedy(load(sharded)).tokens(PROMPT, 8) == reference_tokens(base, None, PROMPT, 8)


def test_a_head_saved_with_a_tied_model_is_used_as_transformers_uses_it(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path)
    head = "lm_head.weight"
    rewrite_weights(base, lambda tensors: {**tensors, head: tensors["model.embed_tokens.weight"].clone()})
    decoder = load(base)
    assert decoder.lm_head.weight.data_ptr() == decoder.model.embed_tokens.weight.data_ptr()
    rewrite_weights(base, lambda tensors: {**tensors, head: tensors[head].flip(0).contiguous()})
    assert Greedy(load(base)).tokens(PROMPT, 8) == reference_tokens(base, None, PROMPT, 8)


def test_rotary_frequencies_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite_weights(base, lambda tensors: {**tensors, **old})
    load(base)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"model.norm.weight": None}, "it lacks: model.norm.weight;", id="missing"),
        pytest.param({"model.layers.0.mlp.up_proj.weight": None}, "up_proj", id="part of a fused weight missing"),
        pytest.param(
            {"model.layers.2.input_layernorm.weight": torch.ones(64)},
            "does not: model.layers.2.input_layernorm.weight|not: model.layers.2.input_layernorm.weight",
            id="a layer too many",
        ),
        pytest.param({"extra": torch.ones(1)}, "it has tensors the model does not: extra;", id="unexpected"),
        pytest.param(
            {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "k_proj, v_proj", id="a bias of one projection"
        ),
        pytest.param(
            {"model.norm.weight": torch.ones(32)}, r"model.norm.weight \(32,\) instead of \(64,\)", id="other shape"
        ),
    ],
)
def test_every_tensor_is_accounted_for(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    base = tiny_llama(tmp_path)
    rewrite_weights(base, lambda tensors: {name: t for name, t in {**tensors, **change}.items() if t is not None})
    with pytest.raises(ConfigError, match=message):
        load(base)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path, tied=False)
    rewrite_weights(base, lambda tensors: {name: t for name, t in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(ConfigError, match=r"it lacks: lm_head\.weight"):
        load(base)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no base model at .*nowhere.*config\.json"):
        load(tmp_path / "nowhere")

    base = tiny_llama(tmp_path / "base")
    sharded = split_into_shards(base, tmp_path / "sharded")
    (sharded / "shard-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks 1 of the 2 shards.*shard-1\.safetensors"):
        load(sharded)

    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load(base)
    weights.rename(base / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"found: .*pytorch_model\.bin.*safetensors only"):
        load(base)
    (base / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load(base)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"architectures": ["OPTForCausalLM"]}, "is OPTForCausalLM; .* LlamaForCausalLM", id="architecture"
        ),
        pytest.param(
            {"architectures": ["NoSuchModel"], "model_type": "no-such"}, "is NoSuchModel", id="unknown to transformers"
        ),
        pytest.param({"architectures": None}, "model_type 'llama', with no architecture", id="no architecture"),
        pytest.param({"hidden_act": "mish"}, "hidden_act 'mish'.*expected silu", id="activation"),
        pytest.param(
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
            "rope_type 'proportional'.*expected default",
            id="rope",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
            id="partial rotary",
        ),
        pytest.param(
            {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config 'gptq'", id="quantised"
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = tiny_llama(tmp_path)
    edit_config(base, **fields)
    with pytest.raises(UnsupportedModel, match=message):
        load(base)


def test_a_configuration_transformers_refuses_is_refused(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path)
    edit_config(base, num_attention_heads=5)
    with pytest.raises(ConfigError, match="not a configuration transformers can read"):
        load(base)


def test_heads_of_odd_width_are_refused(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path)
    edit_config(base, head_dim=15)
    with pytest.raises(ConfigError, match=r"head_dim.*15"):
        load(base)


def rewrite_weights(base: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = base / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


def split_into_shards(base: Path, folder: Path) -> Path:
    """The same checkpoint in two shards that cut through fused projections."""
    tensors = load_file(base / "model.safetensors")
    shard_of = {name: f"shard-{index % 2}.safetensors" for index, name in enumerate(sorted(tensors))}
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    for shard in set(shard_of.values()):
        save_file({name: tensors[name].clone() for name in tensors if shard_of[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return folder
