"""A PEFT adapter's `adapter_config.json`: read, checked, and its per-module patterns resolved.

Rules are those of PEFT 0.21 (`LoraConfig`, `get_pattern_key`, `check_target_module_exists`). A feature that changes
what an adapter computes, and that this project does not compute, is refused by name.
"""

import json
import math
import re
import reprlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import regex  # type: ignore[import-untyped]

from lora_core.errors import InvalidAdapter, InvalidAdapterPath
from lora_core.types import ADAPTER_CONFIG_FILE

V = TypeVar("V")

_MAX_CONFIG_BYTES = 4 * 2**20
_MAX_PATTERNS = 1000
_MAX_PATTERN_CHARS = 1000
_MAX_REPEATS = 1000
_MAX_UNROLLED_CHARS = 1_000_000
_COUNTED_REPEAT = re.compile(r"\{(?P<least>[0-9]*)(?:,(?P<most>[0-9]*))?\}")

_REFUSED_FEATURES = {
    "use_dora": "DoRA",
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

_KNOWN_SWITCHES = {"use_rslora", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"}
"""Fields named like switches of a variant that leave the adapter at `scale * B @ A` on the original base."""

_PLAIN_INITIALISATIONS = {"gaussian", "eva", "orthogonal", "mica"}
"""Ways to start training that leave the base weights alone; so do true and false."""

_BASE_CHANGING_INITIALISATIONS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to start training that subtract the start from the base weights, so that A and B fit another base."""


class PatternTable(Generic[V]):
    """Values by PEFT's suffix-regex rule: the first pattern p, in order, for which `(.*\\.)?(p)$` matches the name.

    Patterns come from users. Their size is bounded before they are compiled. They are matched by an engine that can be
    stopped, with the interpreter lock released, and all matching through one table shares a budget of a few seconds.
    """

    def __init__(self, setting: str, values: Mapping[str, V], *, whole: bool = False, budget_s: float = 2.0) -> None:
        """Compile the patterns.

        Args:
            setting: Names them in errors.
            values: Value by pattern.
            whole: A pattern must match the whole name instead of its last parts.
            budget_s: Seconds that all matching may take.

        Raises:
            InvalidAdapter: a pattern is not a regular expression, or they are too many, too long, or repeat too much.
        """
        _check_size(setting, values)
        self._setting = setting
        self._whole = whole
        self._entries = [(pattern, self._compile(pattern), value) for pattern, value in values.items()]
        self._budget_s = budget_s

    def find(self, names: Iterable[str], default: V) -> V:
        """Value of the first pattern that matches, trying all patterns on each name in turn.

        Raises:
            InvalidAdapter: the matching budget is spent.
        """
        for name in names:
            for pattern, compiled, value in self._entries:
                if self._matches(pattern, compiled, name):
                    return value
        return default

    def _compile(self, pattern: str) -> Any:
        expression = pattern if self._whole else rf"(.*\.)?({pattern})$"
        try:
            # PEFT matches with `re`: what `re` refuses, PEFT cannot load either.
            re.compile(expression)
            # Cached, hundreds of large patterns would outlive their adapters.
            return regex.compile(expression, cache_pattern=False)
        except (re.error, regex.error, OverflowError, RecursionError) as error:
            raise _invalid(
                f"{self._setting} has {_show(pattern)}, which is not a regular expression: {error}"
            ) from error

    def _matches(self, pattern: str, compiled: Any, name: str) -> bool:
        match = compiled.fullmatch if self._whole else compiled.match
        started = time.monotonic()
        try:
            # A budget of exactly zero would mean no limit.
            return match(name, timeout=max(self._budget_s, 1e-6), concurrent=True) is not None
        except TimeoutError:
            raise _invalid(
                f"{self._setting} takes seconds to match, at {_show(pattern)}; expected plain names or simple patterns"
            ) from None
        finally:
            self._budget_s -= time.monotonic() - started


def _check_size(setting: str, patterns: Iterable[str]) -> None:
    """Refuse what the engine would need too much memory for: it writes counted repeats out when it compiles."""
    unrolled = 0
    for count, pattern in enumerate(patterns, start=1):
        if count > _MAX_PATTERNS:
            raise _invalid(f"{setting} has more than {_MAX_PATTERNS} patterns, expected at most that many")
        if len(pattern) > _MAX_PATTERN_CHARS:
            raise _invalid(
                f"{setting} has {_show(pattern)}, a pattern of {len(pattern)} characters; "
                f"expected at most {_MAX_PATTERN_CHARS}"
            )
        unrolled += len(pattern) * _repeats(setting, pattern)
    if unrolled > _MAX_UNROLLED_CHARS:
        raise _invalid(
            f"{setting} has patterns of {unrolled} characters with their counted repeats written out; "
            f"expected at most {_MAX_UNROLLED_CHARS}"
        )


def _repeats(setting: str, pattern: str) -> int:
    """Product of all counted repeats of a pattern, nested or not: the most that any part of it is repeated."""
    product = 1
    start = pattern.find("{")
    while start >= 0:
        counted = _COUNTED_REPEAT.match(pattern, start)
        if counted is None:
            # Engines disagree on such a brace (a character, a fuzzy match), and no module's name has one.
            raise _invalid(f"{setting} has {_show(pattern)}, with a brace that is no counted repeat such as {{1,3}}")
        # At most `_MAX_PATTERN_CHARS` digits, which `int` takes.
        product *= max(1, int(counted["least"] or 0), int(counted["most"] or 0))
        if product > _MAX_REPEATS:
            raise _invalid(
                f"{setting} has {_show(pattern)}, whose counted repeats multiply to more than {_MAX_REPEATS}; "
                f"expected at most that, or * and +"
            )
        start = pattern.find("{", start + 1)
    return product


class ModuleRule:
    """A value of `target_modules` or `exclude_modules`, by PEFT's rule for which modules it means.

    A list means modules with one of its names, whole or after a dot; a string is a regex of whole names; and
    "all-linear" means every linear layer but the output head, so all that a decoder layer has.
    """

    def __init__(self, setting: str, value: Sequence[str] | str) -> None:
        """Compile the rule; `setting` names it in errors.

        Raises:
            InvalidAdapter: the value is a string that is not a regular expression, or too large a one.
        """
        self.setting = setting
        self.value = value
        self._means_all = setting == "target_modules" and isinstance(value, str) and value.lower() == "all-linear"
        self._names = frozenset(() if isinstance(value, str) else value)
        patterns = {value: True} if isinstance(value, str) and not self._means_all else {}
        self._pattern = PatternTable(setting, patterns, whole=True)

    def matches(self, names: Iterable[str]) -> bool:
        """Whether the rule means the linear layer that goes by any of these names.

        Raises:
            InvalidAdapter: matching takes seconds.
        """
        names = tuple(names)
        if self._means_all or any(part in self._names for name in names for part in _endings(name)):
            return True
        return self._pattern.find(names, False)

    def __str__(self) -> str:
        shown = self.value if isinstance(self.value, str) else list(self.value)
        return f"{self.setting} is {_show(shown)}"


def _endings(name: str) -> Iterable[str]:
    """The name, and what follows each of its dots."""
    while name:
        yield name
        name = name.partition(".")[2]


@dataclass(frozen=True)
class PeftConfig:
    """What an adapter's config says about its mathematics.

    `rank_of`, `scale_of` and `transforms` take the names one module goes by, most authoritative first: the name it had
    when PEFT trained it (`model.layers.0.self_attn.q_proj`), then others.

    Attributes:
        r: Default rank.
        lora_alpha: Default numerator of the scale.
        use_rslora: The scale is `alpha / sqrt(rank)` instead of `alpha / rank`.
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

    def transforms(self, layer: int, *names: str) -> bool:
        """Whether the config adapts modules of this decoder layer."""
        if self.layers_to_transform is None:
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


def _invalid(what: str) -> InvalidAdapter:
    return InvalidAdapter(f"{ADAPTER_CONFIG_FILE}: {what}")


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
        raise _invalid(f"larger than {_MAX_CONFIG_BYTES} bytes, which no PEFT config is")
    return content


def _parse(content: bytes) -> dict[str, Any]:
    if not content.strip():
        raise _invalid("the file is empty, expected a JSON object")
    try:
        raw = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise _invalid(f"not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise _invalid(f"holds {_show(raw)}, expected a JSON object")
    return raw


def _check_kind(raw: Mapping[str, Any]) -> None:
    peft_type = _required(raw, "peft_type")
    if peft_type != "LORA":
        raise _invalid(f"peft_type is {_show(peft_type)}, expected 'LORA', the only kind served")
    bias = raw.get("bias", "none")
    if bias != "none":
        raise _invalid(f"bias is {_show(bias)}, expected 'none': trained biases are not served")
    dropout = raw.get("lora_dropout")
    if dropout is not None and not 0 <= _number(dropout, "lora_dropout") <= 1:
        raise _invalid(f"lora_dropout is {_show(dropout)}, expected a number from 0 to 1")


def _refuse_features(raw: Mapping[str, Any]) -> None:
    for key, feature in _REFUSED_FEATURES.items():
        # An empty object still turns a `*_config` on; an empty list names nothing.
        if key in raw and raw[key] is not None and raw[key] is not False and raw[key] != []:
            raise _invalid(f"{key} is {_show(raw[key])}, which means {feature}: not served; train without it")
    for key, value in raw.items():
        is_switch = key.startswith("use_") or key.endswith("_config")
        if is_switch and value and key not in _KNOWN_SWITCHES and key not in _REFUSED_FEATURES:
            raise _invalid(
                f"{key} is {_show(value)}, a feature this server does not know; "
                "remove the field if it does not change what the adapter computes"
            )
    _refuse_initialisation(raw.get("init_lora_weights", True))


def _refuse_initialisation(init: Any) -> None:
    if init is None or isinstance(init, bool):
        return
    if isinstance(init, str) and init.lower() in _PLAIN_INITIALISATIONS:
        return
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITIALISATIONS):
        raise _invalid(
            f"init_lora_weights is {_show(init)}, whose training changed the base weights; convert the adapter to "
            "plain LoRA by PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    plain = ", ".join(sorted(_PLAIN_INITIALISATIONS))
    raise _invalid(f"init_lora_weights is {_show(init)}, expected true, false or one of {plain}")


def _required(raw: Mapping[str, Any], key: str) -> Any:
    if key not in raw:
        raise _invalid(f"{key} is missing; PEFT's save_pretrained writes it")
    return raw[key]


def _positive_int(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _invalid(f"{key} is {_show(value)}, expected a positive integer")
    return value


def _number(value: Any, key: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise _invalid(f"{key} is {_show(value)}, expected a finite number")


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise _invalid(f"{key} is {_show(value)}, expected true or false")
    return bool(value)


def _by_pattern(raw: Mapping[str, Any], key: str, check: Any) -> dict[str, Any]:
    values = raw.get(key)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise _invalid(f"{key} is {_show(values)}, expected an object of module patterns")
    return {pattern: check(value, f"{key}[{_show(pattern)}]") for pattern, value in values.items()}


def _strings(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise _invalid(f"{key} is {_show(value)}, expected a list of names or a string")
    return tuple(value)


def _target_modules(raw: Mapping[str, Any]) -> tuple[str, ...] | str:
    value = _required(raw, "target_modules")
    if not value:
        raise _invalid(f"target_modules is {_show(value)}, expected names, a regex or 'all-linear'")
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
        raise _invalid(f"layers_to_transform is {_show(value)}, expected layer numbers from 0")
    if isinstance(target_modules, str):
        raise _invalid("layers_to_transform is set while target_modules is a string; PEFT allows it with a list only")
    return frozenset(layers)


def _layers_pattern(raw: Mapping[str, Any], layers_to_transform: frozenset[int] | None) -> PatternTable[bool] | None:
    value = raw.get("layers_pattern")
    if not value:
        return None
    patterns = (value,) if isinstance(value, str) else _strings(value, "layers_pattern")
    if layers_to_transform is None:
        raise _invalid(f"layers_pattern is {_show(value)} while layers_to_transform is unset; PEFT needs both")
    return PatternTable("layers_pattern", dict.fromkeys(patterns, True))


def _show(value: Any) -> str:
    return reprlib.repr(value)
