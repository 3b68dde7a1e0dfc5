"""A PEFT adapter's `adapter_config.json`: read, checked, and its per-module patterns resolved.

Rules are those of PEFT 0.21 (`LoraConfig`, `get_pattern_key`, `check_target_module_exists`). A feature that changes
what an adapter computes, and that this project does not compute, is refused by name.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_core.errors import InvalidAdapterPath
from lora_core.module_patterns import ModuleRule, PatternTable, invalid_config, shown
from lora_core.types import ADAPTER_CONFIG_FILE

_MAX_CONFIG_BYTES = 4 * 2**20
_REFUSED_FEATURES = {
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "a bias beside lora_B",
    "modules_to_save": "fully trained modules saved beside the adapter",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "adapted parameters outside linear layers",
    "layer_replication": "a base model with repeated layers",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "alora_invocation_string": "activated LoRA (aLoRA)",
    "invocation_string": "activated LoRA (aLoRA)",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "Megatron's parallel layers",
}
"""Fields of PEFT's LoraConfig that must be unset, and what they turn on."""

_KNOWN_SWITCHES = {
    "use_rslora",
    "use_dora",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
}
"""Fields named like switches of a variant that are served, or leave the adapter as it is without them."""

_PLAIN_INITIALISATIONS = {"gaussian", "eva", "orthogonal", "mica"}
"""Ways to start training that leave the base weights alone; so do true and false."""

_UNTYING_INITIALISATIONS = {"orthogonal", "mica"}
"""Those of them that give each module a pair of its own, whatever `ensure_weight_tying` says, when PEFT loads too."""

_BASE_CHANGING_INITIALISATIONS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to start training that subtract the start from the base weights, so that A and B fit another base."""


@dataclass(frozen=True)
class PeftConfig:
    """What an adapter's config says about its mathematics.

    `rank_of`, `scale_of` and `transforms` take the names one module goes by, most authoritative first: the name it had
    when PEFT trained it (`model.layers.0.self_attn.q_proj`, `lm_head`), then others.

    Attributes:
        r: Default rank.
        lora_alpha: Default numerator of the scale.
        use_rslora: The scale is `alpha / sqrt(rank)` instead of `alpha / rank`.
        use_dora: Every module has a magnitude vector beside its pair.
        ensure_weight_tying: Where the base's head is tied to its embedding, so is the head's pair to the embedding's.
        ties_pairs: And the values of the two are one, so that the files must agree on them.
        rank_pattern: Ranks of modules that differ from `r`.
        alpha_pattern: Alphas of modules that differ from `lora_alpha`.
        target_modules: What was adapted: names, a regex, or "all-linear".
        targets: Modules that `target_modules` means.
        excludes: Modules that `exclude_modules` takes back out of them.
        layers_to_transform: Decoder layers adapted; None is all of them.
        layers_pattern: Regexes of the list that `layers_to_transform` counts in; empty is any.
        raw: The whole config as parsed.
        content: The file's bytes.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    ensure_weight_tying: bool
    ties_pairs: bool
    rank_pattern: PatternTable[int]
    alpha_pattern: PatternTable[float]
    target_modules: tuple[str, ...] | str
    targets: ModuleRule
    excludes: ModuleRule
    layers_to_transform: frozenset[int] | None
    layers_pattern: PatternTable[bool] | None
    raw: dict[str, Any] = field(repr=False)
    content: bytes = field(repr=False)

    def rank_of(self, *names: str) -> int:
        """Rank of a module."""
        return self.rank_pattern.find(names, self.r)

    def scale_of(self, *names: str) -> float:
        """Factor of `B @ A` of a module."""
        alpha = self.alpha_pattern.find(names, self.lora_alpha)
        rank = self.rank_of(*names)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def transforms(self, layer: int | None, *names: str) -> bool:
        """Whether `layers_to_transform` leaves in a module of this decoder layer; None is a module outside of them.

        As in PEFT, a module that `target_modules` lists by its full name is in, and no other outside decoder layers.
        """
        if self.layers_to_transform is None or self.targets.lists(names):
            return True
        if layer not in self.layers_to_transform:
            return False
        if self.layers_pattern is None:
            return True
        # PEFT wants `<pattern>.<index>.` somewhere in the name: what stands before the index is matched here.
        lists = [name.partition(f".{layer}.")[0] for name in names]
        return self.layers_pattern.find(lists, False)


def read_peft_config(folder: Path) -> PeftConfig:
    """Read and check `folder/adapter_config.json`.

    Raises:
        InvalidAdapterPath: the folder or its config cannot be read.
        InvalidAdapter: the config is malformed, incomplete, or asks for something not served; the field is named.
    """
    content = _read(folder)
    raw = _parse(content)
    _check_kind(raw)
    _refuse_features(raw)
    target_modules = _target_modules(raw)
    layers_to_transform = _layers_to_transform(raw, target_modules)
    return PeftConfig(
        r=_positive_int(_required(raw, "r"), "r"),
        lora_alpha=_number(_required(raw, "lora_alpha"), "lora_alpha"),
        use_rslora=_flag(raw, "use_rslora"),
        use_dora=_flag(raw, "use_dora"),
        ensure_weight_tying=_flag(raw, "ensure_weight_tying"),
        ties_pairs=_flag(raw, "ensure_weight_tying") and raw.get("init_lora_weights") not in _UNTYING_INITIALISATIONS,
        rank_pattern=PatternTable("rank_pattern", _by_pattern(raw, "rank_pattern", _positive_int)),
        alpha_pattern=PatternTable("alpha_pattern", _by_pattern(raw, "alpha_pattern", _number)),
        target_modules=target_modules,
        targets=ModuleRule("target_modules", target_modules),
        excludes=ModuleRule("exclude_modules", _exclude_modules(raw)),
        layers_to_transform=layers_to_transform,
        layers_pattern=_layers_pattern(raw, layers_to_transform),
        raw=raw,
        content=content,
    )


def _read(folder: Path) -> bytes:
    path = folder / ADAPTER_CONFIG_FILE
    try:
        if not folder.is_dir():
            raise InvalidAdapterPath(f"{str(folder)!r} is not a folder; expected one with {ADAPTER_CONFIG_FILE}")
        if not path.is_file():
            raise InvalidAdapterPath(f"{str(folder)!r} has no file {ADAPTER_CONFIG_FILE}; expected a PEFT adapter")
        with path.open("rb") as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidAdapterPath):
            raise
        raise InvalidAdapterPath(f"{str(folder)!r} cannot be read: {error}") from error
    if len(content) > _MAX_CONFIG_BYTES:
        raise invalid_config(f"larger than {_MAX_CONFIG_BYTES} bytes, which no PEFT config is")
    return content


def _parse(content: bytes) -> dict[str, Any]:
    if not content.strip():
        raise invalid_config("the file is empty, expected a JSON object")
    try:
        raw = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise invalid_config(f"not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise invalid_config(f"holds {shown(raw)}, expected a JSON object")
    return raw


def _check_kind(raw: Mapping[str, Any]) -> None:
    peft_type = _required(raw, "peft_type")
    if peft_type != "LORA":
        raise invalid_config(f"peft_type is {shown(peft_type)}, expected 'LORA', the only kind served")
    bias = raw.get("bias", "none")
    if bias != "none":
        raise invalid_config(f"bias is {shown(bias)}, expected 'none': trained biases are not served")
    dropout = raw.get("lora_dropout")
    if dropout is not None and not 0 <= _number(dropout, "lora_dropout") <= 1:
        raise invalid_config(f"lora_dropout is {shown(dropout)}, expected a number from 0 to 1")


def _refuse_features(raw: Mapping[str, Any]) -> None:
    for key, feature in _REFUSED_FEATURES.items():
        value = raw.get(key)
        # An empty object still turns on what is configured by one; any other empty value names nothing.
        takes_object = (key.endswith("_config") and key != "megatron_config") or key == "use_bdlora"
        is_empty = value in ("", []) or (value == {} and not takes_object)
        if value is not None and value is not False and not is_empty:
            raise invalid_config(f"{key} is {shown(value)}, which means {feature}: not served; train without it")
    for key, value in raw.items():
        is_switch = key.startswith("use_") or key.endswith("_config")
        if is_switch and value and key not in _KNOWN_SWITCHES and key not in _REFUSED_FEATURES:
            raise invalid_config(
                f"{key} is {shown(value)}, a feature this server does not know; "
                "remove the field if it does not change what the adapter computes"
            )
    _refuse_initialisation(raw.get("init_lora_weights", True))


def _refuse_initialisation(init: Any) -> None:
    if init is None or isinstance(init, bool):
        return
    if isinstance(init, str) and init.lower() in _PLAIN_INITIALISATIONS:
        return
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITIALISATIONS):
        raise invalid_config(
            f"init_lora_weights is {shown(init)}, whose training changed the base weights; convert the adapter to "
            "plain LoRA by PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    plain = ", ".join(sorted(_PLAIN_INITIALISATIONS))
    raise invalid_config(f"init_lora_weights is {shown(init)}, expected true, false or one of {plain}")


def _required(raw: Mapping[str, Any], key: str) -> Any:
    if key not in raw:
        raise invalid_config(f"{key} is missing; PEFT's save_pretrained writes it")
    return raw[key]


def _positive_int(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise invalid_config(f"{key} is {shown(value)}, expected a positive integer")
    return value


def _number(value: Any, key: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise invalid_config(f"{key} is {shown(value)}, expected a finite number")


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise invalid_config(f"{key} is {shown(value)}, expected true or false")
    return bool(value)


def _by_pattern(raw: Mapping[str, Any], key: str, check: Any) -> dict[str, Any]:
    values = raw.get(key)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise invalid_config(f"{key} is {shown(values)}, expected an object of module patterns")
    return {pattern: check(value, f"{key}[{shown(pattern)}]") for pattern, value in values.items()}


def _strings(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise invalid_config(f"{key} is {shown(value)}, expected a list of names or a string")
    return tuple(value)


def _target_modules(raw: Mapping[str, Any]) -> tuple[str, ...] | str:
    value = _required(raw, "target_modules")
    if not value:
        raise invalid_config(f"target_modules is {shown(value)}, expected names, a regex or 'all-linear'")
    if not isinstance(value, str):
        return _strings(value, "target_modules")
    return value


def _exclude_modules(raw: Mapping[str, Any]) -> tuple[str, ...] | str:
    value = raw.get("exclude_modules")
    if not value:
        return ()
    return value if isinstance(value, str) else _strings(value, "exclude_modules")


def _layers_to_transform(raw: Mapping[str, Any], target_modules: tuple[str, ...] | str) -> frozenset[int] | None:
    value = raw.get("layers_to_transform")
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in layers):
        raise invalid_config(f"layers_to_transform is {shown(value)}, expected layer numbers from 0")
    if isinstance(target_modules, str):
        raise invalid_config(
            "layers_to_transform is set while target_modules is a string; PEFT allows it with a list only"
        )
    return frozenset(layers)


def _layers_pattern(raw: Mapping[str, Any], layers_to_transform: frozenset[int] | None) -> PatternTable[bool] | None:
    value = raw.get("layers_pattern")
    if not value:
        return None
    patterns = (value,) if isinstance(value, str) else _strings(value, "layers_pattern")
    if layers_to_transform is None:
        raise invalid_config(f"layers_pattern is {shown(value)} while layers_to_transform is unset; PEFT needs both")
    return PatternTable("layers_pattern", dict.fromkeys(patterns, True))
