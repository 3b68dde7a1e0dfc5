"""Reading and refusing `adapter_config.json`."""

import dataclasses
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from lora_core.errors import InvalidAdapter, InvalidAdapterPath
from lora_core.module_patterns import ModuleRule, PatternTable
from lora_core.peft_config import PeftConfig, read_peft_config

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def write_config(folder: Path, *, without: str | None = None, **fields: Any) -> Path:
    """A folder whose config is PLAIN with these fields changed."""
    config = {**PLAIN, **fields}
    config.pop(without or "", None)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path, **fields: Any) -> PeftConfig:
    return read_peft_config(write_config(folder, **fields))


def test_plain_config(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.r, config.lora_alpha, config.use_rslora) == (8, 16.0, False)
    assert config.target_modules == ("q_proj", "v_proj")
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 2.0
    assert config.transforms(0, "model.layers.0.self_attn.q_proj")
    assert config.raw == PLAIN
    assert config.content == (tmp_path / "adapter_config.json").read_bytes()


@pytest.mark.parametrize("key", ["r", "lora_alpha", "target_modules", "peft_type"])
def test_missing_field_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidAdapter, match=rf"adapter_config.json: {key} is missing"):
        read_peft_config(write_config(tmp_path, without=key))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 0),
        ("r", -5),
        ("r", "8"),
        ("r", 8.5),
        ("r", 8.0),
        ("r", None),
        ("r", True),
        ("r", [8]),
        ("lora_alpha", None),
        ("lora_alpha", "16"),
        ("lora_alpha", True),
        ("lora_alpha", math.nan),
        ("lora_alpha", math.inf),
        ("lora_alpha", 10**400),
        ("target_modules", None),
        ("target_modules", []),
        ("target_modules", ""),
        ("target_modules", 7),
        ("target_modules", ["q_proj", 3]),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", "model.(layers"),
        ("exclude_modules", 7),
        ("exclude_modules", ["q_proj", ""]),
        ("exclude_modules", "model.(layers"),
        ("peft_type", "lora"),
        ("peft_type", "ADALORA"),
        ("peft_type", None),
        ("peft_type", ["LORA"]),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("bias", None),
        ("use_rslora", "true"),
        ("use_rslora", 1),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": "4"}),
        ("rank_pattern", {"q_proj": 4.5}),
        ("rank_pattern", {"(q_proj": 4}),
        ("rank_pattern", {"q" * 5000: 4}),
        ("alpha_pattern", {"q_proj": None}),
        ("alpha_pattern", "q_proj"),
        ("lora_dropout", "0.1"),
        ("lora_dropout", 1.5),
        ("layers_to_transform", "0"),
        ("layers_to_transform", [-1]),
        ("layers_to_transform", [0.0]),
        ("layers_to_transform", [True]),
        ("layers_pattern", "layers"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "something new"),
        ("init_lora_weights", 3),
        ("use_dora", "true"),
        ("use_dora", 1),
        ("ensure_weight_tying", "no"),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("use_bdlora", {}),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1, 2]),
        ("trainable_token_indices", {"embed_tokens": [1]}),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [1, 2]),
        ("invocation_string", "<start>"),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {}),
        ("velora_config", {"num_groups": 64}),
        ("monteclora_config", {"num_samples": 8}),
        ("megatron_config", {"x": 1}),
        ("use_something_new", True),
        ("something_new_config", {"a": 1}),
    ],
)
def test_bad_value_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(InvalidAdapter, match=rf"^adapter_config.json: {key}"):
        read(tmp_path, **{key: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"bias": "none", "use_dora": False, "modules_to_save": None, "lora_bias": False, "target_parameters": []},
        {"init_lora_weights": True},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "orthogonal"},
        {"rank_pattern": None, "alpha_pattern": None, "use_rslora": None},
        {"exclude_modules": ["lm_head"], "lora_dropout": 0.05, "task_type": "CAUSAL_LM", "fan_in_fan_out": True},
        {"loftq_config": {"loftq_bits": 4}, "unsloth_fixed": True},
        # As training tools built on PEFT write it.
        {
            "alora_invocation_tokens": None,
            "arrow_config": None,
            "auto_mapping": {"base_model_class": "Gemma3", "parent_library": "transformers", "unsloth_fixed": True},
            "base_model_name_or_path": "unsloth/gemma-3-4b-it",
            "corda_config": None,
            "ensure_weight_tying": False,
            "eva_config": None,
            "inference_mode": True,
            "layer_replication": None,
            "megatron_config": {},
            "megatron_core": "megatron.core",
            "modules_to_save": [],
            "peft_version": "0.21.2@UNKNOWN",
            "qalora_group_size": 16,
            "revision": "main",
            "target_parameters": None,
            "trainable_token_indices": {},
            "use_bdlora": None,
            "use_qalora": False,
        },
        {"lora_dtype": "bf16", "lorap_lr_ratio": None, "model_key_mapping": None, "task_type": None, "some_config": {}},
        {"alora_invocation_string": "", "modules_to_save": "", "layers_pattern": "", "exclude_modules": ""},
        {"lora_alpha": 0},
        {"lora_alpha": -4.5},
    ],
)
def test_harmless_fields_load(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = read(tmp_path, **fields)
    assert config.raw == {**PLAIN, **fields}


def test_every_variant_of_peft_is_refused(tmp_path: Path) -> None:
    """PEFT marks the fields of its LoraConfig that turn on another computation; none of them may be overlooked."""
    variants = [field.name for field in dataclasses.fields(peft.LoraConfig) if field.metadata.get("is_lora_variant")]
    assert len(variants) > 5
    for name in set(variants) - {"use_dora"}:  # served
        with pytest.raises(InvalidAdapter, match=name):
            read(tmp_path, **{name: {"something": 1}})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b'{"r": 8,', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b'"LORA"', "expected a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        (b" " * (5 * 2**20), "larger than"),
    ],
)
def test_broken_file(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(InvalidAdapter, match=rf"adapter_config.json: .*{reason}"):
        read_peft_config(tmp_path)


def test_unreadable_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterPath, match="absent' is not a folder"):
        read_peft_config(tmp_path / "absent")
    with pytest.raises(InvalidAdapterPath, match=r"has no file adapter_config.json"):
        read_peft_config(tmp_path)
    (tmp_path / "adapter_config.json").mkdir()
    with pytest.raises(InvalidAdapterPath, match=r"has no file adapter_config.json"):
        read_peft_config(tmp_path)


def test_rslora_scale_uses_each_modules_own_rank(tmp_path: Path) -> None:
    config = read(tmp_path, use_rslora=True, rank_pattern={"v_proj": 2}, alpha_pattern={"k_proj": 4})
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 16 / math.sqrt(8)
    assert config.scale_of("model.layers.0.self_attn.v_proj") == 16 / math.sqrt(2)
    assert config.scale_of("model.layers.0.self_attn.k_proj") == 4 / math.sqrt(8)


MODULES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.self_attn.q_proj",
    "model.layers.1.mlp.up_proj",
    "q_proj",
)
PATTERNS = (
    "q_proj",
    "proj",
    "self_attn.q_proj",
    "layers.0.self_attn.q_proj",
    "layers.1.self_attn.q_proj",
    "^model.layers.0.self_attn.q_proj",
    "^layers.0.self_attn.q_proj",
    r"layers\.(0|10)\..*",
    r".*\.up_proj",
    r"model\.layers\.\d+\.mlp\.\w+",
    "q_proj$",
    "",
)


@given(st.lists(st.sampled_from(PATTERNS), unique=True), st.sampled_from(MODULES))
def test_patterns_are_matched_as_peft_matches_them(patterns: list[str], module: str) -> None:
    ranks = {pattern: index for index, pattern in enumerate(patterns, start=1)}
    expected = ranks.get(get_pattern_key(list(ranks), module), 0)
    assert PatternTable("rank_pattern", ranks).find([module], 0) == expected


def never_compile(*_: Any, **__: Any) -> None:
    raise AssertionError("compiled before its size was checked")


# The products here are small enough to do no harm should a check be missing.
@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("((x{11}){10}){10}", "counted repeats multiply to more than 1000"),
        ("x{1001}", "counted repeats multiply to more than 1000"),
        ("x{1001,}", "counted repeats multiply to more than 1000"),
        ("(x{,40}){2,30}", "counted repeats multiply to more than 1000"),
        ("x{" + "9" * 900 + "}", "counted repeats multiply to more than 1000"),
        ("(?x)(x{5 0})", "a brace that is no counted repeat"),
        ("(?:q_proj){e<=1}", "a brace that is no counted repeat"),
        ("q" * 1001, "a pattern of 1001 characters; expected at most 1000"),
    ],
)
@pytest.mark.parametrize(
    "key", ["rank_pattern", "alpha_pattern", "layers_pattern", "target_modules", "exclude_modules"]
)
def test_a_pattern_that_compiles_large_is_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, pattern: str, reason: str
) -> None:
    monkeypatch.setattr(regex, "compile", never_compile)
    value: Any = {pattern: 4} if key in ("rank_pattern", "alpha_pattern") else pattern
    layers = {"layers_to_transform": [0]} if key == "layers_pattern" else {}
    with pytest.raises(InvalidAdapter, match=rf"^adapter_config.json: {key} has '.*{reason}") as refusal:
        read(tmp_path, **{key: value}, **layers)
    assert len(str(refusal.value)) < 250


def test_tables_of_patterns_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PatternTable("rank_pattern", {f"q{n}": n for n in range(1000)}).find(["model.q999"], 0) == 999
    assert PatternTable("rank_pattern", {r"(?:layers\.\d{1,3}\.){1,2}.*": 3}).find(["model.layers.10.q_proj"], 0) == 3
    monkeypatch.setattr(regex, "compile", never_compile)
    with pytest.raises(InvalidAdapter, match="rank_pattern has more than 1000 patterns"):
        PatternTable("rank_pattern", {f"q{n}": n for n in range(1001)})
    with pytest.raises(InvalidAdapter, match=r"alpha_pattern has patterns of 1100000 characters .* at most 200000"):
        PatternTable("alpha_pattern", {f"{n:04}{'x' * 100}{{100}}q": n for n in range(100)})


TARGETS = (
    ["q_proj"],
    ["proj"],
    ["self_attn.q_proj", "up_proj"],
    ["model.layers.0.self_attn.q_proj"],
    ["layers.0.self_attn.q_proj", "1.mlp.up_proj"],
    "q_proj",
    r".*\.q_proj",
    r"(?i)MODEL\..*\.up_proj",
    r"model\.layers\.\d\.",
    r"model\.layers\.\d{1,2}\.self_attn\.q_proj|q_proj",
    r"^(?!.*mlp).*$",
)


@given(st.sampled_from(TARGETS), st.sampled_from(((), *TARGETS)), st.sampled_from(MODULES))
def test_modules_are_targeted_as_peft_targets_them(targets: Any, excluded: Any, module: str) -> None:
    config = peft.LoraConfig(target_modules=targets, exclude_modules=excluded or None)
    theirs = check_target_module_exists(config, module)
    ours = ModuleRule("target_modules", targets).matches([module])
    if ModuleRule("exclude_modules", excluded).matches([module]):
        ours = False
    assert ours == bool(theirs)


def test_all_linear_means_every_linear_layer() -> None:
    assert ModuleRule("target_modules", "All-Linear").matches(["model.layers.0.mlp.up_proj"])
    assert not ModuleRule("exclude_modules", "all-linear").matches(["model.layers.0.mlp.up_proj"])


def test_a_pattern_cannot_hold_the_loader_or_the_interpreter() -> None:
    """Matching this pattern takes longer than the age of the world, and other threads must go on meanwhile."""
    table = PatternTable("rank_pattern", {r"(?:a|a)*(?<=y)": 4}, budget_s=0.2)
    stop = threading.Event()
    ticks: list[float] = []

    def tick() -> None:
        while not stop.wait(0.01):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    started = time.monotonic()
    try:
        for _ in range(2):
            with pytest.raises(InvalidAdapter, match="rank_pattern takes seconds to match"):
                table.find([f"model.{'a' * 60}.q_proj"], 8)
    finally:
        stop.set()
        ticker.join()
    assert time.monotonic() - started < 15
    assert len(ticks) > 5


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, {0, 1, 2}),
        ({"layers_to_transform": []}, {0, 1, 2}),
        ({"layers_to_transform": 1}, {1}),
        ({"layers_to_transform": [0, 2]}, {0, 2}),
        ({"layers_to_transform": [0, 2], "layers_pattern": "layers"}, {0, 2}),
        ({"layers_to_transform": [0, 2], "layers_pattern": ["h", "layers"]}, {0, 2}),
        ({"layers_to_transform": [0, 2], "layers_pattern": ["h"]}, set()),
    ],
)
def test_layers_to_transform(tmp_path: Path, fields: dict[str, Any], layers: set[int]) -> None:
    config = read(tmp_path, **fields)
    names = {layer: f"model.layers.{layer}.self_attn.q_proj" for layer in range(3)}
    assert {layer for layer, name in names.items() if config.transforms(layer, name)} == layers


def test_layers_to_transform_needs_a_list_of_targets(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter, match="layers_to_transform is set while target_modules is a string"):
        read(tmp_path, target_modules="all-linear", layers_to_transform=[0])
