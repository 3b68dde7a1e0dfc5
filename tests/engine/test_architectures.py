"""Every declared architecture against transformers and PEFT, on tiny random models."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lora_core.engine.attention import SequenceSpan, build_attention
from lora_core.engine.kv_cache import KVCache, KVLayout
from lora_core.models.decoder import Decoder, DecoderConfig, LayerConfig
from lora_core.models.weights import load_decoder
from tests.engine.answers import PROMPTS, ask, assert_nothing_left, finish, make_engine
from tests.factories import TINY_SETTINGS, edit_config, linear_targets, make_adapter, reference_model, tiny_model

CPU = torch.device("cpu")
NUM_TOKENS = 48
BLOCK_SIZE = 8
# Shorter and longer than a block, a window of 20 tokens, and both.
TEXTS = [[(size * 37 + place * place * 11 + place) % 128 for place in range(size)] for size in (5, 30, 61)]

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128}

# By name: the architecture, and what differs from its settings in `TINY_SETTINGS`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name} tied": (name, {"tied": True}) for name in TINY_SETTINGS},
    **{f"{name} untied": (name, {"tied": False, "seed": 1}) for name in TINY_SETTINGS},
    "mistral without window, wide heads": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 24}),
    "mistral with a window of one block": ("MistralForCausalLM", {"sliding_window": 8, "layers": 3}),
    "mistral with a window of one token": ("MistralForCausalLM", {"sliding_window": 1}),
    "qwen2 without window": ("Qwen2ForCausalLM", {"use_sliding_window": False}),
    "qwen2 with yarn": ("Qwen2ForCausalLM", {"rope_parameters": YARN_ROPE}),
    "qwen3 with biases and windows": (
        "Qwen3ForCausalLM",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "gemma2 without caps, one KV head": (
        "Gemma2ForCausalLM",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "kv_heads": 1},
    ),
    "gemma2 with biases": ("Gemma2ForCausalLM", {"attention_bias": True, "layers": 3}),
    "gemma3 with final cap and pattern": (
        "Gemma3ForCausalLM",
        {"final_logit_softcapping": 1.0, "layer_types": None, "sliding_window_pattern": 3, "layers": 4},
    ),
    "gemma3 with full layers only": ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 2, "seed": 2}),
    "phi3 with window, whole heads": (
        "Phi3ForCausalLM",
        {"sliding_window": 20, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "phi3 partial": (
        "Phi3ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ),
    "granite with biases": ("GraniteForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "granite with linear rope": ("GraniteForCausalLM", {"rope_parameters": LINEAR_ROPE}),
    "smollm3 with windows and biases": (
        "SmolLM3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 20, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3 by interval": (
        "SmolLM3ForCausalLM",
        {"no_rope_layers": None, "no_rope_layer_interval": 2, "layers": 4},
    ),
}


class Sequences:
    """Several texts through one decoder and its paged cache, their tokens side by side in each step."""

    def __init__(self, decoder: Decoder, num_texts: int, *, max_len: int = 128) -> None:
        config = decoder.config
        self.decoder = decoder
        per_text = -(-max_len // BLOCK_SIZE)
        self.layout = KVLayout(
            num_blocks=num_texts * per_text,
            num_kv_heads=config.num_kv_heads,
            block_size=BLOCK_SIZE,
            head_dim=config.head_dim,
        )
        self.cache = KVCache(self.layout, config.num_layers, dtype=decoder.dtype, device=CPU)
        # Interleaved, so that no text's blocks lie together.
        self.tables = [list(range(text, num_texts * per_text, num_texts)) for text in range(num_texts)]
        self.lengths = [0] * num_texts

    @torch.inference_mode()
    def step(self, tokens: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """Logits after each of the next tokens of some texts."""
        spans: list[SequenceSpan] = []
        positions: list[int] = []
        for text, new in tokens.items():
            positions += range(self.lengths[text], self.lengths[text] + len(new))
            self.lengths[text] += len(new)
            spans.append(SequenceSpan(len(new), self.lengths[text], self.tables[text]))
        windows = self.decoder.config.windows
        attention = build_attention(spans, self.layout, windows=windows, dtype=self.decoder.dtype, device=CPU)
        ids = torch.tensor([token for new in tokens.values() for token in new])
        hidden = self.decoder(ids, torch.tensor(positions), attention, self.cache.layers)
        logits = torch.split(self.decoder.logits(hidden), [len(new) for new in tokens.values()])
        return dict(zip(tokens, logits, strict=True))

    def prefill(self, texts: list[list[int]], chunk: int) -> list[Tensor]:
        """All logits of all texts, `chunk` tokens of each in a step."""
        found: list[list[Tensor]] = [[] for _ in texts]
        for start in range(0, max(map(len, texts)), chunk):
            new = {text: ids[start : start + chunk] for text, ids in enumerate(texts) if start < len(ids)}
            for text, logits in self.step(new).items():
                found[text].append(logits)
        return [torch.cat(logits) for logits in found]


def load(folder: Path, *, dtype: torch.dtype = torch.float32, pack: bool = False) -> Decoder:
    decoder, _ = load_decoder(folder, dtype=dtype, device=CPU, pack=pack)
    return decoder


@torch.inference_mode()
def logits_of(model: torch.nn.Module, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def assert_greedy(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> None:
    """Each of the tokens is the model's first choice after all before it: what greedy decoding is."""
    logits = logits_of(model, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("model", MODELS)
def test_tokens_and_logits_equal_transformers(model: str, tmp_path: Path) -> None:
    """Chunked prefill of three texts at once, then greedy decoding of all three."""
    architecture, settings = MODELS[model]
    reference = reference_model(tiny_model(tmp_path, architecture, **settings))
    decoder = load(tmp_path, pack=True)
    sequences = Sequences(decoder, len(TEXTS))
    logits = sequences.prefill(TEXTS, chunk=26)
    for text, found in zip(TEXTS, logits, strict=True):
        torch.testing.assert_close(found, logits_of(reference, text), rtol=0, atol=1e-4)
    answers = [[int(found[-1].argmax())] for found in logits]
    for _ in range(NUM_TOKENS - 1):
        for index, found in sequences.step({index: tokens[-1:] for index, tokens in enumerate(answers)}).items():
            answers[index].append(int(found[0].argmax()))
    for text, tokens in zip(TEXTS, answers, strict=True):
        assert_greedy(reference, text, tokens)
    assert len({token for tokens in answers for token in tokens}) > 8, "answers that repeat themselves prove little"


@pytest.mark.parametrize("architecture", TINY_SETTINGS)
@pytest.mark.parametrize("chunk", [1, 7, 61])
def test_logits_equal_transformers_however_the_texts_are_cut(architecture: str, chunk: int, tmp_path: Path) -> None:
    reference = reference_model(tiny_model(tmp_path, architecture))
    for text, found in zip(TEXTS, Sequences(load(tmp_path), len(TEXTS)).prefill(TEXTS, chunk), strict=True):
        torch.testing.assert_close(found, logits_of(reference, text), rtol=0, atol=1e-4)


def without(config: DecoderConfig) -> Iterator[tuple[str, DecoderConfig]]:
    """The configuration less each of its features, of those that leave the weights as they are."""
    plain = {
        "norm_offset": False,
        "score_softcap": None,
        "logit_softcap": None,
        "embedding_scale": 1.0,
        "residual_scale": 1.0,
        "logit_divisor": 1.0,
        "attention_scale": config.head_dim**-0.5,
        "layers": tuple(LayerConfig(None, layer.rotary) for layer in config.layers),
    }
    for name, value in plain.items():
        if getattr(config, name) != value:
            yield name, replace(config, **{name: value})
    rotated_alike = tuple(LayerConfig(layer.window, 0) for layer in config.layers)
    if rotated_alike != config.layers:
        yield "rotary of each layer", replace(config, layers=rotated_alike)
    unscaled = tuple(replace(table, scale=1.0) for table in config.rotary_tables)
    if unscaled != config.rotary_tables:
        yield "rotary scale", replace(config, rotary_tables=unscaled)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("MistralForCausalLM", {"layers"}),
        ("Qwen2ForCausalLM", {"layers"}),
        (
            "Gemma2ForCausalLM",
            {"norm_offset", "score_softcap", "logit_softcap", "embedding_scale", "attention_scale", "layers"},
        ),
        ("Gemma3ForCausalLM", {"norm_offset", "embedding_scale", "attention_scale", "layers", "rotary of each layer"}),
        ("Phi3ForCausalLM", {"rotary scale"}),
        ("GraniteForCausalLM", {"embedding_scale", "attention_scale", "residual_scale", "logit_divisor"}),
        ("SmolLM3ForCausalLM", {"rotary of each layer"}),
    ],
)
def test_each_feature_shows_in_the_tiny_models(architecture: str, expected: set[str], tmp_path: Path) -> None:
    """Equality with transformers says something of a feature only where leaving it out would change the logits."""
    decoder = load(tiny_model(tmp_path, architecture))
    text = TEXTS[-1]
    (logits,) = Sequences(decoder, 1).prefill([text], len(text))
    seen = set()
    for feature, config in without(decoder.config):
        plain = Decoder(config, dtype=torch.float32, device=CPU)
        plain.load_state_dict(decoder.state_dict())
        (found,) = Sequences(plain, 1).prefill([text], len(text))
        assert (found - logits).abs().max() > 1e-2, feature
        seen.add(feature)
    assert seen == expected


@pytest.mark.parametrize("architecture", TINY_SETTINGS)
def test_adapters_equal_peft_alone_and_in_a_mixed_batch(architecture: str, tmp_path: Path) -> None:
    """Every linear layer adapted, beside a second adapter of a few of them and the base model, in chunks."""
    base = tiny_model(tmp_path / "base", architecture, tied=False, seed=1)
    targets = linear_targets(architecture)
    adapters = {
        "all": make_adapter(base, tmp_path / "all", r=8, targets=targets, seed=1),
        "some": make_adapter(base, tmp_path / "some", r=3, targets=(targets[0], targets[-1]), seed=2),
    }
    engine = make_engine(base, adapters, slots=2, max_num_batched_tokens=40, block_size=BLOCK_SIZE)
    ask(engine, "alone", "all", size=33, max_tokens=NUM_TOKENS)
    answers = finish(engine)
    requests = [(name, size) for size in (33, 3, 20) for name in ("some", None, "all")]
    for name, size in requests:
        ask(engine, f"{name} {size}", name, size=size, max_tokens=NUM_TOKENS)
    finish(engine, answers)

    assert answers["alone"].tokens == answers["all 33"].tokens
    for name in (None, *adapters):
        reference = reference_model(base, None if name is None else adapters[name])
        for size in (33, 3, 20):
            assert_greedy(reference, PROMPTS[size], answers[f"{name} {size}"].tokens)
    assert len({tuple(answers[f"{name} 33"].tokens) for name in (None, *adapters)}) == 3
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    ("architecture", "tied"), [*((name, True) for name in TINY_SETTINGS), ("Qwen2ForCausalLM", False)]
)
def test_adapters_of_embedding_and_head_equal_peft(architecture: str, tied: bool, tmp_path: Path) -> None:
    """What scales embeddings and caps or divides logits applies to the adapter's share as well."""
    base = tiny_model(tmp_path / "base", architecture, tied=tied)
    targets = (*linear_targets(architecture), "embed_tokens", "lm_head")
    adapters = {"whole": make_adapter(base, tmp_path / "whole", r=4, targets=targets, seed=3, std=0.2)}
    engine = make_engine(base, adapters, slots=1, max_num_batched_tokens=40, block_size=BLOCK_SIZE)
    for name in (None, "whole"):
        ask(engine, f"{name}", name, size=33, max_tokens=NUM_TOKENS)
    answers = finish(engine)
    for name in (None, "whole"):
        reference = reference_model(base, None if name is None else adapters[name])
        assert_greedy(reference, PROMPTS[33], answers[f"{name}"].tokens)
    assert answers["whole"].tokens != answers["None"].tokens


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "GraniteForCausalLM"])
def test_embeddings_are_scaled_in_the_models_data_type_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    """8.06 is 8.0625 in bf16: a factor rounded first, or not, gives other embeddings."""
    settings: dict[str, Any] = {"embedding_multiplier": 8.06} if architecture == "GraniteForCausalLM" else {}
    base = tiny_model(tmp_path, architecture, hidden=60, heads=4, head_dim=16, **settings)
    ids = torch.arange(128)
    seen: list[Tensor] = []

    def keep(module: torch.nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).reshape(128, -1))

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.model.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    model(input_ids=ids[None])
    decoder: Any = load(base, dtype=torch.bfloat16)
    decoder.model.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    Sequences(decoder, 1).prefill([ids.tolist()], 128)
    assert torch.equal(seen[0], seen[1])


def test_bfloat16_is_as_close_to_fp32_as_transformers(tmp_path: Path) -> None:
    base = tiny_model(tmp_path, "Gemma2ForCausalLM")
    expected = logits_of(reference_model(base), TEXTS[-1])
    rounded = logits_of(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), TEXTS[-1]).float()
    (found,) = Sequences(load(base, dtype=torch.bfloat16), 1).prefill([TEXTS[-1]], 61)
    assert (found - expected).abs().mean() < 1.2 * (rounded - expected).abs().mean()


def test_longrope_ends_where_transformers_would_take_other_frequencies(tmp_path: Path) -> None:
    base = tiny_model(tmp_path, "Phi3ForCausalLM", original_max_position_embeddings=64)
    decoder, reference = load(base), reference_model(base)
    assert decoder.config.max_model_len == 64
    text = [place * 5 % 128 for place in range(65)]
    (found,) = Sequences(decoder, 1).prefill([text], 65)
    torch.testing.assert_close(found[:64], logits_of(reference, text[:64]), rtol=0, atol=1e-4)
    assert (found - logits_of(reference, text)).abs().max() > 1e-2

    edit_config(base, original_max_position_embeddings=4096)
    assert load(base).config.max_model_len == 512
