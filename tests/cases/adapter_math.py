"""Section A, what must load: every adapter's tokens and logits are PEFT's."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lora_core.base_modules import ModelBaseModules
from lora_core.config import Quantization
from lora_core.models.architectures import ARCHITECTURES
from lora_core.models.weights import load_decoder
from tests.cases.adapters import ATTENTION_TARGETS, LINEAR_TARGETS, edit_config, edit_weights, rename, shard
from tests.cases.families import FAMILIES
from tests.cases.registry import OWN, Got, all_of, case
from tests.cases.serving import (
    LOGITS_TOLERANCE,
    PROMPTS,
    alone,
    equals_peft,
    finish,
    load,
    loaded,
    manager_of,
    read,
    ref_of,
    same_tokens,
    submit,
    unload,
)
from tests.cases.world import World, start_engine

EQUAL = "tokens and logits equal PEFT's"
PATTERNS: dict[str, Any] = {"rank_pattern": {"q_proj": 1, r"layers\.1\.mlp\.up_proj": 7}}

RSLORA: dict[str, tuple[str, dict[str, Any]]] = {
    "qkv and gate_up": ("llama", {"targets": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}),
    "k without q and v": ("llama", {"targets": ("k_proj",)}),
    "up without gate": ("untied", {"targets": ("up_proj",)}),
    "v, gate, with biases": ("biased", {"targets": ("v_proj", "gate_proj")}),
    "a plain projection": ("llama", {"targets": ("o_proj", "down_proj")}),
    "with rank_pattern": ("llama", {"rank_pattern": {"k_proj": 9, "gate_proj": 2}}),
    "with alpha_pattern": ("llama", {"alpha_pattern": {"v_proj": 3, "up_proj": 21}}),
    "four layers": ("deep", {"targets": LINEAR_TARGETS}),
}


@case("vllm#55545", "rsLoRA on a packed projection", EQUAL, RSLORA)
def rslora(world: World, how: tuple[str, dict[str, Any]]) -> Got:
    family, settings = how
    return equals_peft(world, world.adapter(family, r=6, use_rslora=True, seed=3, **settings), family)


@case("vllm#55545", "rsLoRA is the plain scale times sqrt(r), in every part of a group", "B is sqrt(r) times as large")
def rslora_scale(world: World) -> Got:
    plain = world.adapter(r=4, seed=3)
    first, second = read(world, plain), read(world, edit_config(world.copy(plain), use_rslora=True))
    ratios = {round(float((second.lora_B[k] / first.lora_B[k]).nanmedian()), 4) for k in first.lora_B}
    return Got(f"ratio {ratios} over {len(first.lora_B)} modules", ratios == {2.0} and len(first.lora_B) == 14)


TARGET_FORMS: dict[str, Any] = {
    "all-linear": "all-linear",
    "a regex": r".*\.(q|k|v|o|gate|up|down)_proj",
    "a regex of the whole path": r"model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj",
    "a list": list(LINEAR_TARGETS),
    "a list in another order": list(reversed(LINEAR_TARGETS)),
    "a list of paths": [f"self_attn.{name}" for name in ATTENTION_TARGETS]
    + [f"mlp.{name}" for name in LINEAR_TARGETS[4:]],
    "a list with names no module has": [*LINEAR_TARGETS, "c_attn"],
}


@case("peft#2964", "target_modules in each form", "loads as the list does, equal to PEFT", TARGET_FORMS)
def target_forms(world: World, targets: Any) -> Got:
    as_list = world.adapter(seed=5)
    other = edit_config(world.copy(as_list), target_modules=targets)
    first, second = read(world, as_list), read(world, other)
    same = (
        first.ranks == second.ranks
        and all(torch.equal(first.lora_A[key], second.lora_A[key]) for key in first.lora_A)
        and all(torch.equal(first.lora_B[key], second.lora_B[key]) for key in first.lora_B)
    )
    return all_of(Got("the same tensors", same), equals_peft(world, other, sizes=(7,)))


ALL_LINEAR = {"tied": "llama", "untied": "untied", "with biases": "biased", "8 heads, 4 layers": "deep"}


@case("verl#7288", "an adapter trained with all-linear, on a base", EQUAL, ALL_LINEAR)
def all_linear(world: World, family: str) -> Got:
    return equals_peft(world, world.adapter(family, targets="all-linear", seed=6), family)


LAYERS: dict[str, dict[str, Any]] = {
    "[0]": {"layers_to_transform": [0]},
    "[1]": {"layers_to_transform": [1]},
    "a number": {"layers_to_transform": 1},
    "[0] with layers_pattern": {"layers_to_transform": [0], "layers_pattern": "layers"},
    "[1, 3] of four": {"layers_to_transform": [1, 3]},
}


@case("TensorRT-LLM#2192", "layers_to_transform", "equal to PEFT; the other layers equal the base", LAYERS)
def layers_to_transform(world: World, settings: dict[str, Any]) -> Got:
    family = "deep" if settings["layers_to_transform"] == [1, 3] else "llama"
    folder = world.adapter(family, seed=7, **settings)
    wanted = settings["layers_to_transform"]
    layers = set(wanted if isinstance(wanted, list) else [wanted])
    engine = world.engine(family)
    with loaded(world, engine, folder) as (name,):
        alone(engine, name, PROMPTS[7], 2)
        slot = engine.manager.slot_of(ref_of(engine, name))
        touched = nonzero_layers(engine, slot)
    return all_of(Got(f"layers {sorted(touched)} changed", touched == layers), equals_peft(world, folder, family))


def nonzero_layers(engine: Any, slot: int | None) -> set[int]:
    """Decoder layers whose stacks hold anything in a slot."""
    assert slot is not None
    buffers = zip(engine.manager.symbolic_inputs()[3:], engine.manager.input_buffers()[3:], strict=True)
    names = {spec.name for spec, tensor in buffers if bool(tensor[slot].any())}
    return {int(part) for name in names for part in name.split(".") if part.isdigit()}


@case(
    "TensorRT-LLM#2192", "tensors of a layer that layers_to_transform leaves out", "as PEFT: that layer equals the base"
)
def left_out_layer(world: World) -> Got:
    folder = edit_config(world.copy(world.adapter(seed=7)), layers_to_transform=[0])
    return equals_peft(world, folder)


RANK_ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "rank_pattern q 1": ("llama", {"r": 8, "rank_pattern": {"q_proj": 1}}),
    "rank_pattern k 1 in layer 0": ("llama", {"r": 8, "rank_pattern": {r"layers\.0\.self_attn\.k_proj": 1}}),
    "rank_pattern up 1, gate 5": ("untied", {"r": 8, "rank_pattern": {"up_proj": 1, "gate_proj": 5}}),
    "r 1 everywhere": ("llama", {"r": 1}),
    "r 1, v 12 by pattern": ("llama", {"r": 1, "rank_pattern": {"v_proj": 12}}),
    "r 1 with alpha_pattern": ("biased", {"r": 1, "alpha_pattern": {"q_proj": 2.5}}),
    "rsLoRA, o 1": ("llama", {"r": 4, "use_rslora": True, "rank_pattern": {"o_proj": 1}}),
    "every part of a group another rank": (
        "llama", {"r": 2, "rank_pattern": {"q_proj": 1, "k_proj": 16, "v_proj": 3}, "alpha_pattern": {"k_proj": 5}},
    ),
}  # fmt: skip


@case("MAX 26.7", "a true rank of 1", "equal to PEFT, never a broadcast", RANK_ONE)
def rank_one(world: World, how: tuple[str, dict[str, Any]]) -> Got:
    family, settings = how
    return equals_peft(world, world.adapter(family, seed=8, alpha=3, **settings), family)


FUSED_SUBSETS = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "q and v": ("q_proj", "v_proj"),
    "k and v": ("k_proj", "v_proj"),
    "gate": ("gate_proj",),
    "up and down": ("up_proj", "down_proj"),
    "o": ("o_proj",),
    "attention": ATTENTION_TARGETS,
}


@case(OWN, "a subset of a fused group", "equal to PEFT; the absent parts are zero", FUSED_SUBSETS)
def fused_subsets(world: World, targets: tuple[str, ...]) -> Got:
    return equals_peft(world, world.adapter(targets=targets, seed=9, alpha=16), sizes=(7,))


LONG = {"tied": "llama", "untied": "untied", "with biases": "biased", "8 heads, 4 layers": "deep"}


@case("vllm#10798", "64 greedy tokens and logprobs against PEFT, merged and not", EQUAL, LONG)
def sixty_four(world: World, family: str) -> Got:
    folder = world.adapter(family, r=8, seed=10, **PATTERNS)
    engine, base = world.engine(family), world.base(family)
    with loaded(world, engine, folder) as (name,):
        tokens, logits = alone(engine, name, PROMPTS[20], 64)
    ours = torch.log_softmax(logits, -1)
    parts = []
    for label, merged in (("unmerged", False), ("merged", True)):
        found = world.truth.compare(base, folder, PROMPTS[20], tokens, merged=merged)
        truth = world.truth.logits(base, folder, [*PROMPTS[20], *tokens[:-1]], merged=merged)[-64:]
        error = float((torch.log_softmax(truth, -1) - ours).abs().max())
        right = found.token is None and error < 2e-2 and len(tokens) == 64
        parts.append(Got(f"{label}: first difference {found.token}, logprobs within {error:.0e}", right))
    return all_of(*parts)


DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@case("tensorrtllm_backend#791", "one adapter as a file of", "the same output within tolerance", DTYPES)
def file_dtypes(world: World, dtype: torch.dtype) -> Got:
    folder = world.adapter(seed=11, targets=LINEAR_TARGETS)
    cast = world.adapter(seed=11, targets=LINEAR_TARGETS, dtype=dtype)
    engine = world.engine()
    with loaded(world, engine, folder, cast) as (one, two):
        _, exact = alone(engine, one, PROMPTS[33], 1)
        _, rounded = alone(engine, two, PROMPTS[33], 1)
    error = float((exact - rounded).abs().max() / exact.abs().max())
    near = Got(f"within {error:.0e} of fp32", error < 0.05 and (dtype is torch.float32) == (error == 0))
    return all_of(near, equals_peft(world, cast, sizes=(7,)))


@case("MAX 26.7", "a mixed file: one tensor fp32, the others bf16", EQUAL)
def mixed_dtypes(world: World) -> Got:
    folder = world.copy(world.adapter(seed=12, dtype=torch.bfloat16))
    edit_weights(folder, lambda t: {k: v.float() if "q_proj" in k else v for k, v in t.items()})
    return equals_peft(world, folder, sizes=(7,))


BASE_DTYPES = {
    f"{base} base, {file} file": (base, DTYPES[file])
    for base in ("bfloat16", "float16")
    for file in ("float32", "bfloat16", "float16")
}


@case(OWN, "half-precision bases", "logits within the base's own rounding of PEFT's", BASE_DTYPES)
def base_dtypes(world: World, how: tuple[str, torch.dtype]) -> Got:
    base_dtype, dtype = how
    folder = world.adapter(seed=11, targets=LINEAR_TARGETS, dtype=dtype)
    engine = start_engine(world.base(), dtype=base_dtype)
    with loaded(world, engine, folder) as (name,):
        _, ours = alone(engine, name, PROMPTS[20], 1)
        _, base = alone(engine, None, PROMPTS[20], 1)
    truth = world.truth.logits(world.base(), folder, PROMPTS[20])[-1:]
    plain = world.truth.logits(world.base(), None, PROMPTS[20])[-1:]
    scale = float(truth.abs().max())
    error, own = float((ours - truth).abs().max()) / scale, float((base - plain).abs().max()) / scale
    effect = float((truth - plain).abs().max()) / scale
    return Got(f"{error:.3f}, base alone {own:.3f}, effect {effect:.2f}", error < max(4 * own, 0.05) < effect)


DORA: dict[str, tuple[str, dict[str, Any]]] = {
    "every linear layer": ("llama", {}),
    "attention only": ("untied", {"targets": ATTENTION_TARGETS}),
    "q only of the fused group": ("llama", {"targets": ("q_proj",)}),
    "k and v": ("llama", {"targets": ("k_proj", "v_proj")}),
    "up without gate": ("llama", {"targets": ("up_proj",)}),
    "down only": ("llama", {"targets": ("down_proj",)}),
    "on a base with biases": ("biased", {}),
    "with rsLoRA": ("llama", {"use_rslora": True}),
    "rank 1": ("llama", {"r": 1}),
    "with rank_pattern and alpha_pattern": ("deep", {**PATTERNS, "alpha_pattern": {"k_proj": 3}}),
    "one layer": ("llama", {"layers_to_transform": [1]}),
    "bf16 file": ("llama", {"dtype": torch.bfloat16}),
    "fp16 file": ("llama", {"dtype": torch.float16, "targets": ("v_proj", "gate_proj")}),
    "untied head": ("untied", {"targets": (*LINEAR_TARGETS, "lm_head")}),
    "tied head": ("llama", {"targets": ("q_proj", "lm_head")}),
    "embedding, untied": ("untied", {"targets": ("embed_tokens",)}),
    "embedding and head, tied": ("llama", {"targets": ("embed_tokens", "lm_head"), "r": 3}),
}


@case("vllm#6983", "DoRA, use_dora true", EQUAL, DORA)
def dora(world: World, how: tuple[str, dict[str, Any]]) -> Got:
    family, settings = how
    return equals_peft(world, world.adapter(family, seed=13, use_dora=True, **settings), family)


@case("vllm#6983", "DoRA, LoRA and base rows in one batch, then the slots change hands", "each as alone, as PEFT")
def dora_beside_lora(world: World) -> Got:
    dora_folder, plain = world.adapter(seed=13, use_dora=True), world.adapter(seed=14, targets=("k_proj",))
    engine, parts = start_engine(world.base(), slots=2), []
    for turn in range(3):
        with loaded(world, engine, *((dora_folder, plain) if turn % 2 == 0 else (plain, dora_folder))) as names:
            folders = dict(zip(names, (dora_folder, plain) if turn % 2 == 0 else (plain, dora_folder), strict=True))
            for index, who in enumerate((*names, None, *names)):
                submit(engine, f"{index} {who}", who, PROMPTS[7 + 13 * (index % 2)])
            for request_id, answer in finish(engine).items():
                place, _, name = request_id.partition(" ")
                prompt = PROMPTS[7 + 13 * (int(place) % 2)]
                parts.append(same_tokens(world, "llama", folders.get(name), prompt, answer.tokens, f"{turn}: "))
    return Got(all_of(*parts).text, all_of(*parts).right)


EMBEDDINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "lm_head, untied": ("untied", {"targets": ("lm_head",)}),
    "embed_tokens, untied": ("untied", {"targets": ("embed_tokens",)}),
    "both, untied": ("untied", {"targets": ("embed_tokens", "lm_head")}),
    "lm_head, tied": ("llama", {"targets": ("lm_head",)}),
    "embed_tokens, tied": ("llama", {"targets": ("embed_tokens",)}),
    "both, tied": ("llama", {"targets": ("embed_tokens", "lm_head")}),
    "both and every linear layer": ("untied", {"targets": (*LINEAR_TARGETS, "embed_tokens", "lm_head")}),
    "embed_tokens and q, rsLoRA": ("llama", {"targets": ("embed_tokens", "q_proj"), "use_rslora": True}),
    "lm_head rank 1 by pattern": ("untied", {"targets": ("lm_head", "v_proj"), "rank_pattern": {"lm_head": 1}}),
    "embed_tokens rank 9 by pattern": ("untied", {"targets": ("embed_tokens",), "rank_pattern": {"embed_tokens": 9}}),
    "bf16 file": ("untied", {"targets": ("embed_tokens", "lm_head"), "dtype": torch.bfloat16}),
}


@case(OWN, "adapters of the embedding and the head", EQUAL, EMBEDDINGS)
def embeddings(world: World, how: tuple[str, dict[str, Any]]) -> Got:
    family, settings = how
    return equals_peft(world, world.adapter(family, seed=15, **settings), family)


@case(OWN, "tied head: an adapter of lm_head, then base and embedding rows in one batch", "the shared weight is intact")
def tied_head_intact(world: World) -> Got:
    head, rows = world.adapter(seed=15, targets=("lm_head",)), world.adapter(seed=16, targets=("embed_tokens",))
    engine = world.engine()
    _, before = alone(engine, None, PROMPTS[20], 4)
    with loaded(world, engine, head, rows) as (one, two):
        folders = {one: head, two: rows, "None": None}
        for index, who in enumerate((one, None, two, one, None)):
            submit(engine, f"{index} {who}", who, PROMPTS[20])
        answers = finish(engine)
    _, after = alone(engine, None, PROMPTS[20], 4)
    parts = [
        same_tokens(world, "llama", folders[request_id.split(" ")[1]], PROMPTS[20], answer.tokens)
        for request_id, answer in answers.items()
    ]
    return all_of(Got("base bits unchanged", torch.equal(before, after)), *parts)


KEY_FORMS: dict[str, tuple[str, str]] = {
    "no base_model.model.": ("base_model.model.", ""),
    "no prefix at all": ("base_model.model.model.", ""),
    "an extra model.": ("base_model.model.", "base_model.model.model."),
    "language_model.": ("base_model.model.model.", "base_model.model.model.language_model."),
    "language_model.model.": ("base_model.model.", "base_model.model.language_model."),
    ".default.": (".weight", ".default.weight"),
    "an adapter's name": (".weight", ".my_task.weight"),
}


@case(OWN, "keys in the wild", EQUAL, KEY_FORMS)
def key_forms(world: World, change: tuple[str, str]) -> Got:
    plain = world.adapter(seed=17, r=5)
    folder = rename(world.copy(plain), lambda key: key.replace(*change))
    return equals_peft(world, folder, truth=plain, sizes=(7,))


@case(OWN, "keys in the wild, embedding and head with .default.", EQUAL)
def key_forms_of_embeddings(world: World) -> Got:
    plain = world.adapter("untied", seed=18, targets=("embed_tokens", "lm_head"))

    def renamed(key: str) -> str:
        if "lora_embedding" in key:
            return f"{key.removesuffix('.weight')}.default"
        return key.replace(".weight", ".default.weight")

    return equals_peft(world, rename(world.copy(plain), renamed), "untied", truth=plain, sizes=(7,))


@case(OWN, "weights in three shards with an index", EQUAL)
def sharded(world: World) -> Got:
    plain = world.adapter(seed=19)
    return equals_peft(world, shard(world.copy(plain), 3), truth=plain, sizes=(7,))


def real_copy(world: World) -> torch.Tensor:
    return load_file(world.base("untied") / "model.safetensors")["lm_head.weight"]


COPIES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a true copy, lm_head not adapted": (real_copy, ("q_proj",)),
    "a true copy, lm_head adapted": (real_copy, ("q_proj", "lm_head")),
    "other values, lm_head not adapted": (lambda world: torch.ones(128, 64), ("q_proj",)),
}


@case(OWN, "lm_head.base_layer.weight saved into the adapter", "ignored; equal to PEFT", COPIES)
def base_copy(world: World, what: tuple[Any, tuple[str, ...]]) -> Got:
    make, targets = what
    folder = world.copy(world.adapter("untied", seed=20, targets=targets, alpha=16))
    edit_weights(folder, lambda t: {**t, "base_model.model.lm_head.base_layer.weight": make(world)})
    return equals_peft(world, folder, "untied", sizes=(7,))


@case(OWN, "one adapter loaded through a symbolic link, a relative path and a trailing slash", EQUAL)
def path_forms(world: World) -> Got:
    plain = world.adapter(seed=21)
    link = world.new_folder() / "link"
    link.symlink_to(plain)
    relative = Path("/").joinpath(plain).relative_to("/")
    parts = [equals_peft(world, link, truth=plain, sizes=(7,))]
    engine = world.engine()
    for spec in (f"{plain}/", f"{Path.cwd().joinpath(*['..'] * (len(Path.cwd().parts) - 1)) / relative}"):
        name = world.new_name()
        load(engine, name, spec)
        tokens, _ = alone(engine, name, PROMPTS[7])
        unload(engine, name)
        parts.append(same_tokens(world, "llama", plain, PROMPTS[7], tokens))
    return all_of(*parts)


SIGNS: dict[str, dict[str, Any]] = {
    "negative lora_alpha": {"alpha": -8},
    "fractional lora_alpha": {"alpha": 2.5},
    "lora_alpha 1, r 16": {"alpha": 1, "r": 16, "std": 0.4},
    "exclude_modules": {"exclude_modules": ["k_proj"]},
    "init_lora_weights gaussian": {"init_lora_weights": "gaussian"},
    "lora_dropout 0.3": {"lora_dropout": 0.3},
}


@case(OWN, "other settings of PEFT", EQUAL, SIGNS)
def other_settings(world: World, settings: dict[str, Any]) -> Got:
    return equals_peft(world, world.adapter(seed=22, **settings), sizes=(7,))


@case(OWN, "the folder is deleted after the load", "goes on with what it holds")
def folder_deleted(world: World) -> Got:
    plain = world.adapter(seed=23)
    folder = world.copy(plain)
    engine = world.engine()
    with loaded(world, engine, folder) as (name,):
        shutil.rmtree(folder)
        tokens, _ = alone(engine, name, PROMPTS[20])
    return same_tokens(world, "llama", plain, PROMPTS[20], tokens)


OTHER_FAMILIES = [name for name in FAMILIES if name not in ("llama", "untied", "biased", "deep")]
FAMILY_ADAPTERS: dict[str, dict[str, Any]] = {
    "all-linear": {"targets": "all-linear"},
    "rsLoRA and rank_pattern": {"targets": "all-linear", "use_rslora": True, "r": 5},
    "DoRA": {"targets": "all-linear", "use_dora": True},
    "embedding and head": {"targets": ("embed_tokens", "lm_head")},
}


@case(OWN, "the families served", "llama, mistral, qwen2, qwen3, gemma 2 and 3, phi 3, granite, smollm3")
def families_declared(world: World) -> Got:
    words_ = " ".join(ARCHITECTURES).lower()
    missing = [f for f in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "smollm3")
               if f not in words_]  # fmt: skip
    return Got(f"missing: {missing}" if missing else ", ".join(ARCHITECTURES), not missing)


@case("vllm#10798", "another family", EQUAL, {
    f"{family}, {label}": (family, settings) for family in OTHER_FAMILIES for label, settings in FAMILY_ADAPTERS.items()
})  # fmt: skip
def other_families(world: World, how: tuple[str, dict[str, Any]]) -> Got:
    family, settings = how
    return equals_peft(world, world.adapter(family, seed=24, **settings), family, sizes=(33,))


@case(OWN, "the base alone", "tokens and logits equal transformers'", {family: family for family in FAMILIES})
def base_alone(world: World, family: str) -> Got:
    tokens, logits = alone(world.engine(family), None, PROMPTS[33], 24)
    found = world.truth.compare(world.base(family), None, PROMPTS[33], tokens, logits)
    right = found.token is None and found.logits is not None and found.logits < LOGITS_TOLERANCE
    return Got(f"first difference {found.token}, logits within {found.logits:.0e}, margin {found.margin:.0e}", right)


@case("sglang#1826", "an adapter on a base quantised at start", "applied to the unquantised activation", {
    f"{kind}, {label}": (kind, settings)
    for kind in ("int8", "int4")
    for label, settings in {"LoRA": {}, "DoRA": {"use_dora": True}}.items()
})  # fmt: skip
def quantised(world: World, how: tuple[Quantization, dict[str, Any]]) -> Got:
    kind, settings = how
    folder = world.adapter("untied", seed=25, **settings)
    engine = start_engine(world.base("untied"), quantization=kind)
    with loaded(world, engine, folder) as (name,):
        tokens, ours = alone(engine, name, PROMPTS[20], 8)
        _, base = alone(engine, None, PROMPTS[20], 1)
    dense = dequantised(world, kind)
    found = world.truth.compare(dense, folder, PROMPTS[20], tokens, ours)
    plain = world.truth.compare(dense, None, PROMPTS[20], [int(base[0].argmax())], base)
    rounding = float((world.truth.logits(dense, None, PROMPTS[20]) - world.truth.logits(
        world.base("untied"), None, PROMPTS[20])).abs().max())  # fmt: skip
    right = found.token is None and max(found.logits or 0, plain.logits or 0) < 0.02 and rounding > 1e-3
    return Got(f"first difference {found.token}, logits within {found.logits:.0e}, base {plain.logits:.0e}", right)


def dequantised(world: World, kind: Quantization) -> Path:
    """The base "untied" with the weights that a decoder quantised at start really multiplies by."""
    decoder, _ = load_decoder(world.base("untied"), device=torch.device("cpu"), pack=True, quantization=kind)
    modules = ModelBaseModules(manager_of(world.base("untied")).wrap(decoder))
    model: Any = AutoModelForCausalLM.from_pretrained(world.base("untied"), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                with modules.open_weight(name.removesuffix(".weight").removeprefix("model.")) as weight:
                    parameter.copy_(weight.stored)
    folder = world.new_folder()
    model.save_pretrained(folder)
    return folder


@case("sglang#1826", "a base checkpoint quantised by another tool", "refused at start, by name")
def quantised_checkpoint(world: World) -> Got:
    folder = world.copy(world.base("llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    try:
        start_engine(folder)
    except Exception as error:
        return Got(str(error), "gptq" in str(error) and type(error).__name__ == "UnsupportedModel")
    return Got("served", False)
