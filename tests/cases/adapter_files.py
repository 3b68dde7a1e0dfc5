"""Section A, what must be refused: each fault of a file or a config with its own reason, and no harm to anyone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_core.config import LoRAConfig
from lora_core.errors import ConfigError
from lora_core.types import LoRAStatus
from tests.cases.adapters import CONFIG, WEIGHTS, Q, edit_config, edit_weights
from tests.cases.adapters import rename as renamed
from tests.cases.registry import OWN, Got, all_of, case
from tests.cases.serving import (
    PROMPTS,
    OpenedFiles,
    alone,
    contains,
    equals_peft,
    load,
    loaded,
    read,
    refused,
    same_tokens,
    shorten,
    unload,
    words,
)
from tests.cases.world import World, start_engine

MODEL = "base_model.model.model."
PAIR = {"lora_A.weight": torch.ones(4, 64), "lora_B.weight": torch.ones(64, 4)}
Spoil = Callable[[World], Path]


def with_pairs(world: World, *modules: str, alone: bool = False) -> Path:
    """An adapter with further pairs of tensors, or with nothing else."""
    folder = world.copy(world.adapter(seed=30))
    pairs = {f"{module}.{part}": tensor.clone() for module in modules for part, tensor in PAIR.items()}
    edit_weights(folder, lambda tensors: pairs if alone else {**tensors, **pairs})
    return edit_config(folder, target_modules=[module.rpartition(".")[2] for module in modules] + ["q_proj"])


OUTSIDE = {
    "only a projector of images": (["base_model.model.multi_modal_projector.linear_1"], True),
    "only another tower": (["base_model.model.vision_tower.encoder.layers.0.self_attn.q_proj"], True),
    "only a score head": (["base_model.model.score"], True),
    "one of them, beside good ones": ([f"{MODEL}layers.1.mlp.router"], False),
    "layer 9 of two": ([f"{MODEL}layers.9.self_attn.q_proj"], False),
    "a norm": ([f"{MODEL}layers.0.input_layernorm"], False),
    "o_proj under mlp": ([f"{MODEL}layers.0.mlp.o_proj"], False),
    "GPT-2's names": (["base_model.model.transformer.h.0.attn.c_attn"], True),
    "the fused name of this server": ([f"{MODEL}layers.0.self_attn.qkv_proj"], True),
    "an audio tower's layers": (["base_model.model.audio.layers.0.mlp.up_proj"], False),
}


@case("vllm#55193", "modules outside what the server adapts", "refused, naming the modules", OUTSIDE)
def outside(world: World, what: tuple[list[str], bool]) -> Got:
    modules, alone_ = what
    tails = [module.removeprefix("base_model.model.").removeprefix("model.") for module in modules]
    return refused(world, with_pairs(world, *modules, alone=alone_), *tails)


EXPERTS = {
    "experts": [f"{MODEL}layers.0.mlp.experts"],
    "experts.base_layer": [f"{MODEL}layers.0.mlp.experts.base_layer"],
    "experts of every layer, beside good pairs": [f"{MODEL}layers.{n}.mlp.experts" for n in (0, 1)],
    "one expert's projections": [f"{MODEL}layers.0.mlp.experts.3.{p}" for p in ("gate_proj", "up_proj")],
    "Mixtral's experts": [f"{MODEL}layers.0.block_sparse_moe.experts.0.w1"],
    "a shared expert": [f"{MODEL}layers.1.mlp.shared_expert.down_proj"],
}


@case("vllm#41754", "keys of experts on a dense base", "refused, keys listed", EXPERTS)
def experts(world: World, modules: list[str]) -> Got:
    keys = [module.removeprefix(MODEL) for module in modules]
    return refused(world, with_pairs(world, *modules), *keys)


BARE_EXPERTS = {
    "lora_A without .weight": "experts.lora_A",
    "gate_up_proj.lora_A without .weight": "experts.gate_up_proj.lora_A",
}


@case("vllm#41754", "fused expert tensors", "refused, keys listed", BARE_EXPERTS)
def bare_experts(world: World, tail: str) -> Got:
    folder = world.copy(world.adapter(seed=30))
    keys = [f"{MODEL}layers.0.mlp.{tail}", f"{MODEL}layers.0.mlp.{tail.replace('lora_A', 'lora_B')}"]
    edit_weights(folder, lambda tensors: {**tensors, **{key: torch.ones(8, 4, 64) for key in keys}})
    return refused(world, folder, *keys)


def dora(world: World, **fields: Any) -> Path:
    return edit_config(world.copy(world.adapter(seed=13, use_dora=True)), **fields)


def dora_without_vectors(world: World) -> Path:
    return edit_weights(dora(world), lambda t: {k: v for k, v in t.items() if "magnitude" not in k})


def dora_with_one_less(world: World) -> Path:
    return edit_weights(dora(world), lambda t: {k: v for k, v in t.items() if k != f"{Q}.lora_magnitude_vector"})


def dora_of_wrong_length(world: World) -> Path:
    return edit_weights(dora(world), lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(63)}))


def dora_not_finite(world: World) -> Path:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.lora_magnitude_vector"][5] = torch.inf

    return edit_weights(dora(world), spoil)


DORA_FAULTS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "vectors, use_dora false": (lambda w: dora(w, use_dora=False), ("lora_magnitude_vector", "use_dora")),
    "vectors, use_dora absent": (lambda w: edit_config(dora(w), "use_dora"), ("lora_magnitude_vector", "use_dora")),
    "use_dora true, no vectors": (dora_without_vectors, ("lora_magnitude_vector",)),
    "use_dora true, one vector missing": (dora_with_one_less, ("layers.0.self_attn.q_proj",)),
    "a vector of another length": (dora_of_wrong_length, ("63", "64", "layers.0.self_attn.q_proj")),
    "an infinite vector": (dora_not_finite, ("lora_magnitude_vector", "infinite")),
    "use_dora 'yes'": (lambda w: dora(w, use_dora="yes"), ("use_dora", "'yes'")),
}


@case("vllm#6983", "DoRA that does not add up", "refused by name, never dropped", DORA_FAULTS)
def dora_faults(world: World, what: tuple[Spoil, tuple[str, ...]]) -> Got:
    make, needles = what
    return refused(world, make(world), *needles)


BAD_NUMBERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "r 0": ({"r": 0}, ("r is 0", "positive")),
    "r -5": ({"r": -5}, ("r is -5",)),
    'r "8"': ({"r": "8"}, ("r is '8'",)),
    "r 8.5": ({"r": 8.5}, ("r is 8.5",)),
    "r 8.0": ({"r": 8.0}, ("r is 8.0",)),
    "r true": ({"r": True}, ("r is True",)),
    "r null": ({"r": None}, ("r is None",)),
    "r [8]": ({"r": [8]}, ("r is [8]",)),
    "r 10**30": ({"r": 10**30}, ("1000000000000000000000000000000",)),
    "lora_alpha null": ({"lora_alpha": None}, ("lora_alpha is None",)),
    'lora_alpha "16"': ({"lora_alpha": "16"}, ("lora_alpha is '16'",)),
    "lora_alpha NaN": ({"lora_alpha": float("nan")}, ("lora_alpha is nan",)),
    "lora_alpha Infinity": ({"lora_alpha": float("inf")}, ("lora_alpha is inf",)),
    "lora_alpha true": ({"lora_alpha": True}, ("lora_alpha is True",)),
    "rank_pattern 0": ({"rank_pattern": {"q_proj": 0}}, ("rank_pattern", "q_proj", "0")),
    'rank_pattern "4"': ({"rank_pattern": {"q_proj": "4"}}, ("rank_pattern", "'4'")),
    "rank_pattern a list": ({"rank_pattern": [4]}, ("rank_pattern",)),
    "alpha_pattern null": ({"alpha_pattern": {"q_proj": None}}, ("alpha_pattern", "None")),
    'use_rslora "true"': ({"use_rslora": "true"}, ("use_rslora", "'true'")),
    "layers_to_transform [-1]": ({"layers_to_transform": [-1]}, ("layers_to_transform", "-1")),
    'layers_to_transform ["0"]': ({"layers_to_transform": ["0"]}, ("layers_to_transform", "'0'")),
    "lora_dropout 2": ({"lora_dropout": 2}, ("lora_dropout", "2")),
}


@case("vllm PR#48437", "config values", "400 before any weight is opened", BAD_NUMBERS)
def bad_numbers(world: World, what: tuple[dict[str, Any], tuple[str, ...]]) -> Got:
    fields, needles = what
    folder = edit_config(world.copy(world.adapter(seed=30)), **fields)
    with OpenedFiles(folder) as files:
        got = refused(world, folder, *needles)
    # A rank beyond the limit is known to be so by module only once the header says which modules there are.
    unread = files.count(".safetensors") == 0 or fields.get("r") == 10**30
    return all_of(got, Got("no weights opened" if unread else f"opened {files.opened}", unread))


RANKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "rank 64, maximum 16": ({"r": 64}, ("64", "16", "max_lora_rank")),
    "rank 17, maximum 16": ({"r": 17}, ("17", "16")),
    "64 by rank_pattern": ({"r": 8, "rank_pattern": {"v_proj": 64}}, ("64", "16", "v_proj")),
    "64 in one layer": ({"r": 8, "rank_pattern": {r"layers\.1\.mlp\.down_proj": 64}}, ("64", "16", "down_proj")),
    "rank 64, rsLoRA": ({"r": 64, "use_rslora": True}, ("64", "16")),
    "rank 64, DoRA": ({"r": 64, "use_dora": True}, ("64", "16")),
}


@case("gpustack#5438", "a rank over the limit", "400 with both numbers; other adapters untouched", RANKS)
def over_the_limit(world: World, what: tuple[dict[str, Any], tuple[str, ...]]) -> Got:
    settings, needles = what
    folder = world.adapter(seed=31, **settings)
    neighbour, engine = world.adapter(seed=32), world.engine()
    with loaded(world, engine, neighbour) as (name,):
        before, _ = alone(engine, name, PROMPTS[20])
        got = refused(world, folder, *needles)
        after, _ = alone(engine, name, PROMPTS[20])
    return all_of(got, same_tokens(world, "llama", neighbour, PROMPTS[20], after), Got("as before", before == after))


@case("gpustack#5438", "r 64 in the config, every true rank 4", "loads, equal to PEFT: true ranks count")
def true_ranks_count(world: World) -> Got:
    folder = world.adapter(seed=33, r=64, rank_pattern={".*_proj": 4})
    return equals_peft(world, folder, sizes=(7,))


@case("gpustack#5438", "rank exactly the maximum", "loads, equal to PEFT")
def rank_at_the_limit(world: World) -> Got:
    return equals_peft(world, world.adapter(seed=34, r=16), sizes=(7,))


STARTUP: dict[str, tuple[Callable[[World], str], tuple[str, ...]]] = {
    "a path that does not exist": (lambda w: "gone=/nowhere/at/all", ("gone", "/nowhere/at/all")),
    "a path alone that does not exist": (lambda w: "/nowhere/at/all", ("/nowhere/at/all",)),
    "a rank over the limit": (lambda w: f"wide={w.adapter(seed=31, r=64)}", ("wide", "64", "16")),
    "a broken config": (lambda w: f"odd={edit_config(w.copy(w.adapter(seed=30)), r=0)}", ("odd", "r is 0")),
    "a Hub id, remote sources off": (lambda w: "hub=org/name", ("hub", "org/name", "allow_remote")),
    "no name": (lambda w: f"={w.adapter(seed=30)}", ("lora_paths",)),
    "no path": (lambda w: "name=", ("lora_paths", "name=")),
}


@case("sglang#30168", "an adapter named at start-up is invalid", "a clear fatal message naming it", STARTUP)
def bad_at_start(world: World, what: tuple[Callable[[World], str], tuple[str, ...]]) -> Got:
    make, needles = what
    good = f"good={world.adapter(seed=32)}"
    try:
        start_engine(world.base(), paths=(good, make(world)))
    except ConfigError as error:
        return contains(str(error), "lora_paths", *needles)
    return Got("started", False)


@case("sglang#30168", "two adapters of one name in lora_paths", "fatal, naming it")
def twice_at_start(world: World) -> Got:
    paths = (f"x={world.adapter(seed=32)}", f"x={world.adapter(seed=30)}")
    try:
        start_engine(world.base(), paths=paths)
    except ConfigError as error:
        return contains(str(error), "lora_paths", "'x")
    return Got("started", False)


@case("sglang#30168", "good lora_paths, with a name and without", "loaded before the first request, equal to PEFT")
def good_at_start(world: World) -> Got:
    folder = world.adapter(seed=32)
    engine = start_engine(world.base(), paths=(f"x={folder}", str(folder)))
    parts = [Got(f"{sorted(engine.manager.loras)}", set(engine.manager.loras) == {"x", str(folder)})]
    answers = [alone(engine, name, PROMPTS[7])[0] for name in ("x", str(folder))]
    return all_of(*parts, *(same_tokens(world, "llama", folder, PROMPTS[7], tokens) for tokens in answers))


@case("sglang#30168", "lora_paths while enable_lora is false", "an error, not silence")
def paths_while_off(world: World) -> Got:
    try:
        LoRAConfig(enable_lora=False, lora_paths=("x=y",))
    except ValueError as error:
        return contains(str(error), "lora_paths", "enable_lora")
    return Got("accepted", False)


def with_bias(world: World, **fields: Any) -> Path:
    folder = world.copy(world.adapter(seed=30))
    edit_weights(folder, lambda t: {**t, f"{Q}.lora_B.bias": torch.ones(64)})
    return edit_config(folder, **fields)


BIASES: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "lora_only, with lora_B.bias": (lambda w: with_bias(w, bias="lora_only"), ("bias", "lora_only")),
    "all": (lambda w: with_bias(w, bias="all"), ("bias", "all")),
    "none in the config, a bias tensor in the file": (with_bias, (f"{Q}.lora_B.bias",)),
    "lora_bias true": (lambda w: with_bias(w, lora_bias=True), ("lora_bias",)),
    "a base layer's bias": (
        lambda w: edit_weights(w.copy(w.adapter(seed=30)), lambda t: {**t, f"{Q}.base_layer.bias": torch.ones(64)}),
        ("base_layer.bias",),
    ),
}


@case("vllm PR#5733", "bias", "refused by name; a normal adapter then loads", BIASES)
def biases(world: World, what: tuple[Spoil, tuple[str, ...]]) -> Got:
    make, needles = what
    return all_of(refused(world, make(world), *needles), equals_peft(world, world.adapter(seed=32), sizes=(7,)))


FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "aLoRA tokens": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    "trainable_token_indices": ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    "layer_replication": ({"layer_replication": [[0, 2], [0, 2]]}, "layer_replication"),
    "target_parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    "QALoRA": ({"use_qalora": True}, "use_qalora"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "pissa"),
    "OLoRA": ({"init_lora_weights": "olora"}, "olora"),
    "a switch nobody knows yet": ({"use_better_lora": True}, "use_better_lora"),
    "a config nobody knows yet": ({"hyper_config": {"rank": 3}}, "hyper_config"),
    "another kind of adapter": ({"peft_type": "IA3"}, "IA3"),
    "prompt tuning": ({"peft_type": "PROMPT_TUNING"}, "PROMPT_TUNING"),
}


@case(OWN, "a feature that changes the mathematics and is not served", "refused by its name", FEATURES)
def features(world: World, what: tuple[dict[str, Any], str]) -> Got:
    fields, needle = what
    return refused(world, edit_config(world.copy(world.adapter(seed=30)), **fields), needle)


def good(world: World) -> Path:
    return world.copy(world.adapter(seed=30))


NO_PATH: dict[str, tuple[Callable[[World], str], tuple[str, ...], LoRAStatus]] = {
    "does not exist": (lambda w: "/nowhere/x", ("/nowhere/x",), LoRAStatus.LOAD_INVALID_PATH),
    "relative, does not exist": (lambda w: "no/such/folder", ("no/such/folder",), LoRAStatus.LOAD_INVALID_PATH),
    "a file": (lambda w: f"{w.adapter(seed=30)}/{CONFIG}", (CONFIG, "is a file"), LoRAStatus.LOAD_INVALID_PATH),
    "a folder without a config": (lambda w: str(w.new_folder()), (CONFIG,), LoRAStatus.LOAD_INVALID_PATH),
    "spaces": (lambda w: "  ", ("empty",), LoRAStatus.LOAD_INVALID_PATH),
    "a NUL character": (lambda w: "/tmp/\0x", ("NUL",), LoRAStatus.LOAD_INVALID_PATH),
    "a dangling link": (lambda w: str(dangling(w)), ("link",), LoRAStatus.LOAD_INVALID_PATH),
    "a base model's folder": (lambda w: str(w.base()), (CONFIG,), LoRAStatus.LOAD_INVALID_PATH),
    "a Hub id, remote sources off": (lambda w: "org/name", ("allow_remote",), LoRAStatus.LOAD_INVALID_PATH),
    "a path of 5,000 characters": (lambda w: "/x" * 2500, ("/x/x",), LoRAStatus.LOAD_INVALID_PATH),
    "a path with =": (lambda w: "/nowhere/a=b", ("/nowhere/a=b",), LoRAStatus.LOAD_INVALID_PATH),
}


@case("vllm#30690", "a path at run time", "400 with the path", NO_PATH)
def no_path(world: World, what: tuple[Callable[[World], str], tuple[str, ...], LoRAStatus]) -> Got:
    make, needles, status = what
    return refused(world, make(world), *needles, status=status)


def dangling(world: World) -> Path:
    link = world.new_folder() / "link"
    link.symlink_to("/nowhere/at/all")
    return link


@case("vllm#30690", "a folder whose name holds = and spaces", "loads, equal to PEFT")
def odd_path(world: World) -> Got:
    plain = world.adapter(seed=30)
    folder = world.copy(plain).rename(world.new_folder() / "a = b, c")
    return equals_peft(world, folder, truth=plain, sizes=(7,))


@case(OWN, "adapters of lm_head or embed_tokens with adapt_embeddings: false", "refused, naming the setting", {
    name: name for name in ("lm_head", "embed_tokens")
})  # fmt: skip
def embeddings_off(world: World, target: str) -> Got:
    engine = start_engine(world.base("untied"), lora={"adapt_embeddings": False})
    folder = world.adapter("untied", seed=15, targets=(target,))
    return refused(world, folder, target, "adapt_embeddings", family="untied", engine=engine)


TWINS = {"equal ones": 1.0, "different ones": 2.0}


@case(
    OWN, "a module's tensors twice, under two prefixes", "equal: served; different: refused, naming the module", TWINS
)
def twice_by_prefix(world: World, factor: float) -> Got:
    folder = good(world)
    twin = world.copy(folder)
    renamed(twin, lambda key: key.removeprefix("base_model.model."))
    twins = {key: factor * tensor for key, tensor in load_file(twin / WEIGHTS).items()}
    save_file({**load_file(folder / WEIGHTS), **twins}, folder / WEIGHTS)
    if factor == 1:
        return equals_peft(world, folder, sizes=(7,))
    return refused(world, folder, "layers.0")


@case(OWN, "a refused adapter is corrected and loaded under its name at once", "loads, equal to PEFT")
def corrected(world: World) -> Got:
    plain, folder = world.adapter(seed=30), good(world)
    engine, name = world.engine(), world.new_name()
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(weights[:1000])
    first = engine.manager.load_adapter(f"{name}={folder}")
    (folder / WEIGHTS).write_bytes(weights)
    load(engine, name, folder)
    tokens, _ = alone(engine, name, PROMPTS[20])
    unload(engine, name)
    return all_of(Got(shorten(words(first)), first.status is LoRAStatus.LOAD_INVALID_ADAPTER),
                  same_tokens(world, "llama", plain, PROMPTS[20], tokens))  # fmt: skip


@case(OWN, "the report of a load", "modules, true ranks, bytes, hash and time by phase")
def report(world: World) -> Got:
    folder = world.adapter(seed=35, r=8, rank_pattern={"q_proj": 1, "up_proj": 3})
    engine, name = world.engine(), world.new_name()
    found = load(engine, name, folder).report
    unload(engine, name)
    if found is None:
        return Got("no report", False)
    right = (
        found.num_modules == 14
        and found.ranks == {1: 2, 3: 2, 8: 10}
        and found.num_bytes > 2 * 8 * (2 * 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 96))
        and found.content_hash == read(world, folder).content_hash
        and not found.noop_modules
        and {"find", "read", "check", "convert", "canary"} <= found.phases_s.keys()
        and all(seconds >= 0 for seconds in found.phases_s.values())
    )
    return Got(shorten(str(found), 300), right)
