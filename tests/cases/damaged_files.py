"""Section A, files that are damaged, incomplete, or of another base: refused at load with both sides named."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.cases.adapter_files import Spoil, good
from tests.cases.adapters import ATTENTION_TARGETS, CONFIG, WEIGHTS, Q, edit_config, edit_weights, save_adapter, shard
from tests.cases.families import save_base
from tests.cases.registry import Got, all_of, case
from tests.cases.serving import (
    PROMPTS,
    alone,
    equals_peft,
    load,
    refused,
    same_tokens,
    unload,
)
from tests.cases.world import World, start_engine


def truncated(keep: float) -> Spoil:
    def make(world: World) -> Path:
        folder = good(world)
        os.truncate(folder / WEIGHTS, int((folder / WEIGHTS).stat().st_size * keep))
        return folder

    return make


def value_at(part: str, value: float, dtype: torch.dtype = torch.float32) -> Spoil:
    def make(world: World) -> Path:
        def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            tensors[f"{Q}.{part}.weight"][1, 2] = value
            return {key: tensor.to(dtype) for key, tensor in tensors.items()}

        return edit_weights(good(world), spoil)

    return make


def without(part: str) -> Spoil:
    return lambda world: edit_weights(
        good(world), lambda t: {key: tensor for key, tensor in t.items() if key != f"{Q}.{part}.weight"}
    )


def with_content(file: str, content: bytes) -> Spoil:
    def make(world: World) -> Path:
        folder = good(world)
        (folder / file).write_bytes(content)
        return folder

    return make


def without_file(file: str, *beside: str) -> Spoil:
    def make(world: World) -> Path:
        folder = good(world)
        (folder / file).unlink()
        for name in beside:
            torch.save({"a": torch.ones(1)}, folder / name)
        return folder

    return make


def config_without(*keys: str) -> Spoil:
    return lambda world: edit_config(good(world), *keys)


def shard_missing(world: World) -> Path:
    folder = shard(good(world))
    (folder / "adapter_model-00002-of-00002.safetensors").unlink()
    return folder


def shard_elsewhere(world: World) -> Path:
    folder = shard(good(world))
    path = folder / f"{WEIGHTS}.index.json"
    outside = folder.parent / "outside.safetensors"
    (folder / "adapter_model-00002-of-00002.safetensors").rename(outside)
    path.write_text(path.read_text().replace("adapter_model-00002-of-00002", "../outside"))
    return folder


def index_disagrees(world: World) -> Path:
    folder = shard(good(world))
    path = folder / f"{WEIGHTS}.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["base_model.model.ghost.lora_A.weight"] = "adapter_model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    return folder


def weights_are_a_folder(world: World) -> Path:
    folder = good(world)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    return folder


def other_dtype(dtype: torch.dtype) -> Spoil:
    return lambda world: edit_weights(good(world), lambda t: {key: tensor.to(dtype) for key, tensor in t.items()})


def two_adapters(world: World) -> Path:
    return edit_weights(good(world), lambda t: {**t, f"{Q}.lora_A.other.weight": torch.ones(4, 64)})


DAMAGED: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "truncated in the data": (truncated(0.7), (WEIGHTS, "truncated")),
    "truncated in the header": (truncated(0.01), (WEIGHTS, "truncated")),
    "an empty file": (truncated(0), (WEIGHTS, "empty")),
    "zero tensors": (lambda w: edit_weights(good(w), lambda _: {}), ("no tensor",)),
    "NaN in A": (value_at("lora_A", float("nan")), (f"{Q}.lora_A.weight", "NaN")),
    "NaN in B": (value_at("lora_B", float("nan")), (f"{Q}.lora_B.weight", "NaN")),
    "Inf in A": (value_at("lora_A", float("inf")), (f"{Q}.lora_A.weight", "infinite")),
    "-Inf in B, bf16": (value_at("lora_B", float("-inf"), torch.bfloat16), (f"{Q}.lora_B.weight", "infinite")),
    "config without r": (config_without("r"), (CONFIG, "r is missing")),
    "config without lora_alpha": (config_without("lora_alpha"), ("lora_alpha is missing",)),
    "config without target_modules": (config_without("target_modules"), ("target_modules is missing",)),
    "config without peft_type": (config_without("peft_type"), ("peft_type is missing",)),
    "target_modules null": (lambda w: edit_config(good(w), target_modules=None), ("target_modules is None",)),
    "target_modules []": (lambda w: edit_config(good(w), target_modules=[]), ("target_modules",)),
    "target_modules [3]": (lambda w: edit_config(good(w), target_modules=[3]), ("target_modules", "3")),
    "target_modules a broken regex": (lambda w: edit_config(good(w), target_modules="(q_proj"), ("target_modules",)),
    "A without B": (without("lora_B"), (f"{Q}.lora_A.weight",)),
    "B without A": (without("lora_A"), (f"{Q}.lora_B.weight",)),
    "no weights file": (without_file(WEIGHTS), (WEIGHTS, "missing")),
    ".bin only": (without_file(WEIGHTS, "adapter_model.bin"), (".bin", "never read")),
    ".pt only": (without_file(WEIGHTS, "adapter_model.pt"), (".pt", "never read")),
    "a folder in the weights' place": (weights_are_a_folder, (WEIGHTS,)),
    "a Git LFS pointer": (
        with_content(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        (WEIGHTS,),
    ),
    "a zip under the weights' name": (with_content(WEIGHTS, b"PK\x03\x04" + bytes(200)), (WEIGHTS,)),
    "config is not JSON": (with_content(CONFIG, b"{"), (CONFIG, "JSON")),
    "config is a list": (with_content(CONFIG, b"[]"), (CONFIG, "object")),
    "config is empty": (with_content(CONFIG, b""), (CONFIG, "empty")),
    "config is bytes of no text": (with_content(CONFIG, b"\xff\xfe\x00"), (CONFIG,)),
    "a shard is missing": (shard_missing, ("adapter_model-00002-of-00002.safetensors",)),
    "a shard outside the folder": (shard_elsewhere, ("outside",)),
    "the index names a tensor no shard has": (index_disagrees, ("ghost",)),
    "float64 tensors": (other_dtype(torch.float64), ("F64",)),
    "int8 tensors": (other_dtype(torch.int8), ("I8",)),
    "two adapters in one file": (two_adapters, ("layers.0.self_attn.q_proj",)),
    "tensors of modules the config does not target": (
        lambda w: edit_config(good(w), target_modules=["v_proj"]),
        ("layers.0.mlp.down_proj", "target_modules"),
    ),
    "r of the config is not the file's": (lambda w: edit_config(good(w), r=6), ("[4,", "[6,")),
}  # fmt: skip


@case("vllm#11702", "damaged or incomplete", "refused at load with its own reason", DAMAGED)
def damaged(world: World, what: tuple[Spoil, tuple[str, ...]]) -> Got:
    make, needles = what
    return refused(world, make(world), *needles)


@case("vllm#11702", "values that overflow fp16 once scaled, on an fp16 base", "refused, naming the key and the type")
def overflow(world: World) -> Got:
    folder = edit_weights(good(world), lambda t: t.update({f"{Q}.lora_B.weight": torch.full((64, 4), 60_000.0)}))
    return refused(world, folder, "lora_B", "float16", engine=start_engine(world.base(), dtype="float16"))


@case("vllm#11702", "A and B all zero", "loads, reported as a no-op, and answers as the base")
def no_op(world: World) -> Got:
    folder = edit_weights(good(world), lambda t: {key: torch.zeros_like(tensor) for key, tensor in t.items()})
    engine, name = world.engine(), world.new_name()
    report = load(engine, name, folder).report
    tokens, _ = alone(engine, name, PROMPTS[20])
    unload(engine, name)
    noop = report is not None and report.is_noop and report.num_modules == 14
    return all_of(Got("reported as a no-op" if noop else f"report {report}", noop),
                  same_tokens(world, "llama", None, PROMPTS[20], tokens))  # fmt: skip


@case("vllm#11702", "one module all zero, the others not", "loads, that module reported, equal to PEFT")
def one_no_op(world: World) -> Got:
    folder = edit_weights(good(world), lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(64, 4)}))
    engine, name = world.engine(), world.new_name()
    report = load(engine, name, folder).report
    unload(engine, name)
    modules = None if report is None else list(report.noop_modules)
    return all_of(Got(f"no-op: {modules}", modules == ["layers.0.self_attn.q_proj"]), equals_peft(world, folder))


OTHER_BASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "half the width": ({"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}, {}, ("32", "64")),
    "twice the width": ({"hidden_size": 128, "num_attention_heads": 8}, {}, ("128", "64")),
    "as many KV heads as heads": ({"num_key_value_heads": 4}, {"targets": ("k_proj",)}, ("[64, 4]", "[32, 4]")),
    "one KV head": ({"num_key_value_heads": 1}, {"targets": ("v_proj",)}, ("[16, 4]", "[32, 4]")),
    "another MLP width": ({"intermediate_size": 48}, {"targets": ("down_proj",)}, ("[4, 48]", "[4, 96]")),
    "more layers": ({"num_hidden_layers": 3}, {"targets": ATTENTION_TARGETS}, ("layers.2",)),
    "another vocabulary, lm_head": ({"vocab_size": 160}, {"targets": ("lm_head",)}, ("160", "128")),
    "another vocabulary, embed_tokens": ({"vocab_size": 96}, {"targets": ("embed_tokens",)}, ("96", "128")),
    "a smaller model's, all-linear": (
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 64},
        {"targets": "all-linear"}, ("[4, 64]", "[4, 96]"),
    ),
    "DoRA of half the width": (
        {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}, {"use_dora": True}, ("32", "64"),
    ),
}  # fmt: skip


@case("MAX 26.7", "an adapter of another base", "refused with both shapes", OTHER_BASES)
def other_base(world: World, what: tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]) -> Got:
    fields, settings, needles = what
    base = save_base(world.new_folder(), "llama", **fields)
    return refused(world, save_adapter(base, world.new_folder(), **settings), *needles)


SHAPES: dict[str, tuple[str, tuple[int, ...], str]] = {
    "B transposed": ("lora_B", (4, 64), "[64, 4]"),
    "B of one column": ("lora_B", (64, 1), "[64, 4]"),
    "B of one row": ("lora_B", (1, 4), "[64, 4]"),
    "A of three dimensions": ("lora_A", (4, 64, 1), "[4, 64]"),
    "A flat": ("lora_A", (256,), "[4, 64]"),
    "A without rows": ("lora_A", (0, 64), "[4, 64]"),
    "A one column short": ("lora_A", (4, 63), "[4, 64]"),
}


@case("MAX 26.7", "one tensor of another shape", "refused with both shapes and the key", SHAPES)
def shapes(world: World, what: tuple[str, tuple[int, ...], str]) -> Got:
    part, shape, expected = what
    folder = edit_weights(good(world), lambda t: t.update({f"{Q}.{part}.weight": torch.ones(shape)}))
    return refused(world, folder, f"{Q}.{part}.weight", str(list(shape)), expected)
