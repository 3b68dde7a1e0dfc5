"""Which tensor of an adapter belongs to which module of the base model, decided from keys and shapes alone."""

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lora_core.adapter_weights import SERVED_DTYPES, TensorInfo, list_keys
from lora_core.errors import InvalidAdapter
from lora_core.module_patterns import ModuleRule
from lora_core.peft_config import PeftConfig
from lora_core.types import ADAPTER_CONFIG_FILE, LoRAType

_PARENTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
"""Where a decoder layer keeps the projections that Llama named."""

_EMBEDDINGS = ("embed_tokens", "lm_head")

# Only wrappers of the language model may stand before `layers`: another word there is another tower.
_PAIR = re.compile(
    r"(?:base_model\.|model\.|language_model\.)*"
    r"(?P<module>layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<path>.+))"
    r"\.(?P<part>lora_A|lora_B)(?:\.(?P<adapter>[^.]+))?\.weight"
)
_SAVED_PREFIX = "base_model.model."
_BASE_COPY = re.compile(r"(?:base_model\.|model\.|language_model\.)*(?P<module>.+)\.base_layer\.weight")


@dataclass(frozen=True)
class BaseShapes:
    """Shapes of the base model's weights.

    Attributes:
        projections: `(out_features, in_features)` of each projection of a decoder layer, by PEFT projection name
            (`q_proj`) or by path inside the layer (`self_attn.q_proj`).
        num_layers: Decoder layers.
        embeddings: `(vocabulary, hidden)` of `embed_tokens` and `lm_head`, as far as known.
    """

    projections: Mapping[str, tuple[int, int]]
    num_layers: int
    embeddings: Mapping[str, tuple[int, int]]

    def projection_at(self, path: str) -> str | None:
        """Name of the projection at `path` inside a decoder layer, or None if none is there."""
        for name in self.projections:
            parent = _PARENTS.get(name)
            if parent is not None and path == f"{parent}.{name}":
                return name
            if parent is None and (path == name or path.endswith(f".{name}")):
                return name
        return None

    def accepts_copy(self, module: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape can be a copy of the base weight of `module`."""
        if module in _EMBEDDINGS:
            # The hidden size is known from any projection that reads the residual stream.
            known = self.embeddings.get(module)
            return shape == known if known else len(shape) == 2 and any(shape[1] == k for _, k in self._shapes())
        _, _, path = module.removeprefix("layers.").partition(".")
        name = self.projection_at(path) if module.startswith("layers.") else None
        return name is not None and shape == self.projections[name]

    def _shapes(self) -> Iterable[tuple[int, int]]:
        return self.projections.values()


class PairKey(NamedTuple):
    """One `lora_A` or `lora_B` tensor key, taken apart.

    `module` is the normalised name `layers.<n>.<path>`; `trained_as` the name PEFT knew the module by; `adapter` the
    adapter-name segment after `lora_A`, or "".
    """

    key: str
    module: str
    layer: int
    path: str
    part: LoRAType
    trained_as: str
    adapter: str

    def target_names(self) -> tuple[str, ...]:
        """Names by which `target_modules` may mean the module.

        A key in PEFT's own form for a Llama tells the name for certain; any other may come from a base model that
        wraps its decoder differently, or have been renamed.
        """
        llama = f"model.{self.module}"
        if self.key.startswith(f"{_SAVED_PREFIX}{llama}."):
            return (llama,)
        return (self.trained_as, llama, *self._wrapped_names(), self.module)

    def exclusion_names(self) -> tuple[str, ...]:
        """Names by which `exclude_modules` may mean the module: one, if the key has PEFT's form for a known wrapper.

        Fewer than those of `target_modules`: a pattern that excludes all but the language model must not match a name
        that the module never had.
        """
        is_wrapped = any(self.key.startswith(f"{_SAVED_PREFIX}{name}.") for name in self._wrapped_names())
        return (self.trained_as,) if is_wrapped else self.target_names()

    def _wrapped_names(self) -> tuple[str, str]:
        return f"model.language_model.{self.module}", f"language_model.model.{self.module}"


def parse_pair_key(key: str) -> PairKey | None:
    """Take a tensor key apart, or return None if it is not one of a decoder layer's `lora_A` or `lora_B` weights."""
    match = _PAIR.fullmatch(key)
    if match is None:
        return None
    trained_as = key[: match.start("part") - 1].removeprefix(_SAVED_PREFIX)
    return PairKey(
        key=key,
        module=match["module"],
        layer=int(match["layer"]),
        path=match["path"],
        part=LoRAType(match["part"]),
        trained_as=trained_as,
        adapter=match["adapter"] or "",
    )


class ModulePlan(NamedTuple):
    """One adapted module: its true rank, the factor of B, and the keys of its tensors in the files."""

    module: str
    projection: str
    rank: int
    scale: float
    a_key: str
    b_key: str


class _Foreign(enum.Enum):
    """Why a tensor cannot be served, as it reads in the refusal."""

    DORA = "DoRA magnitude vectors, not served"
    BIAS = "biases, not served: train with bias='none' and lora_bias=False"
    EMBEDDING = "adapted embed_tokens or lm_head, not served yet"
    FULL_WEIGHT = "whole weights (modules_to_save or saved embeddings), not served"
    COPY_SHAPE = "copies of base weights of another shape than this base model's"
    LAYER = "decoder layers this base model does not have"
    MODULE = "modules this server does not adapt"


def plan_modules(
    tensors: Mapping[str, TensorInfo], config: PeftConfig, base: BaseShapes, max_lora_rank: int, *, strict: bool = True
) -> list[ModulePlan]:
    """Account for every tensor of an adapter, and say what each adapted module is made of.

    Args:
        tensors: Headers of all tensors in the adapter's files.
        config: Its config: ranks, alphas, modules targeted and excluded, layers to transform.
        base: What the tensors must fit.
        max_lora_rank: Largest rank accepted.
        strict: Refuse tensors of modules this server does not adapt; False leaves those, and only those, out.

    Returns:
        Adapted modules in the order of their names in the files, at least one.

    Raises:
        InvalidAdapter: a tensor has no place, the wrong shape or dtype, or no partner; a rank is too large; PEFT
            would drop a tensor that the config does not target; nothing is left to apply. Keys, what was found and
            what was expected are named.
    """
    pairs = _account(tensors, base, strict)
    modules = _pair_up(pairs)
    transformed = {module for module, (a, _) in modules.items() if config.transforms(a.layer, *_names(a))}
    _check_targets([pair for pair in pairs if pair.module in transformed], config)
    planned = [_plan(a, b, tensors, config, base, max_lora_rank) for a, b in modules.values()]
    plans = [plan for plan in planned if plan.module in transformed]
    if not plans:
        found = f"{len(tensors)} tensors" if tensors else "no tensor at all"
        raise InvalidAdapter(
            f"no tensor of the adapter applies to this base model: its files hold {found}, layers_to_transform is "
            f"{sorted(config.layers_to_transform) if config.layers_to_transform else None}"
        )
    return plans


def _account(tensors: Mapping[str, TensorInfo], base: BaseShapes, strict: bool) -> list[PairKey]:
    """Keys of the pairs to apply; refuses the adapter if any other tensor has no place."""
    pairs: list[PairKey] = []
    foreign: dict[_Foreign, list[str]] = {}
    for key, info in tensors.items():
        pair = parse_pair_key(key)
        reason = _place(pair, base) if pair else _explain(key, info, base)
        if reason is not None:
            foreign.setdefault(reason, []).append(key)
        elif pair is not None:
            pairs.append(pair)
    if not strict:
        foreign.pop(_Foreign.MODULE, None)
    if foreign:
        reasons = (f"{reason.value}: {list_keys(foreign[reason])}" for reason in _Foreign if reason in foreign)
        raise InvalidAdapter(f"the adapter has tensors that have no place here: {'; '.join(reasons)}")
    return pairs


def _place(pair: PairKey, base: BaseShapes) -> _Foreign | None:
    if base.projection_at(pair.path) is None:
        return _Foreign.MODULE
    return None if pair.layer < base.num_layers else _Foreign.LAYER


def _explain(key: str, info: TensorInfo, base: BaseShapes) -> _Foreign | None:
    """Why a tensor that is no pair is refused; None for a base weight's copy, which changes nothing."""
    names = key.split(".")
    if "lora_magnitude_vector" in names:
        return _Foreign.DORA
    if names[-1] == "bias" or "lora_bias" in names or "lora.bias" in key:
        return _Foreign.BIAS
    if copy := _BASE_COPY.fullmatch(key):
        return None if base.accepts_copy(copy["module"], info.shape) else _Foreign.COPY_SHAPE
    is_lora = any(name.startswith("lora_") for name in names)
    if is_lora and any(name in _EMBEDDINGS for name in names):
        return _Foreign.EMBEDDING
    return _Foreign.MODULE if is_lora or names[-1] != "weight" else _Foreign.FULL_WEIGHT


def _pair_up(pairs: Iterable[PairKey]) -> dict[str, tuple[PairKey, PairKey]]:
    """A and B of each module."""
    parts: dict[str, dict[LoRAType, PairKey]] = {}
    adapters: set[str] = set()
    for pair in pairs:
        if pair.adapter:
            adapters.add(pair.adapter)
        twin = parts.setdefault(pair.module, {}).setdefault(pair.part, pair)
        if twin is not pair:
            raise InvalidAdapter(f"{twin.key} and {pair.key} are both {pair.part.value} of {pair.module}; expected one")
    if len(adapters) > 1:
        raise InvalidAdapter(f"the files hold several adapters: {', '.join(sorted(adapters))}; save each one apart")
    alone = [pair.key for found in parts.values() if len(found) == 1 for pair in found.values()]
    if alone:
        raise InvalidAdapter(f"tensors without their partner (lora_A needs lora_B and vice versa): {list_keys(alone)}")
    return {module: (found[LoRAType.A], found[LoRAType.B]) for module, found in parts.items()}


def _check_targets(pairs: Iterable[PairKey], config: PeftConfig) -> None:
    """Refuse tensors that PEFT would drop, with a warning, because the config does not mean their modules."""
    dropped: dict[ModuleRule, dict[str, None]] = {}
    for pair in pairs:
        if config.excludes.matches(pair.exclusion_names()):
            dropped.setdefault(config.excludes, {})[pair.module] = None
        elif not config.targets.matches(pair.target_names()):
            dropped.setdefault(config.targets, {})[pair.module] = None
    if dropped:
        rule, modules = next(iter(dropped.items()))
        raise InvalidAdapter(
            f"{ADAPTER_CONFIG_FILE}: {rule}, and the file holds tensors of {list_keys(modules, limit=3)}; "
            f"PEFT would not apply them: correct {rule.setting}, or leave the tensors out"
        )


def _names(pair: PairKey) -> tuple[str, str]:
    """Names of the pair's module for the config's patterns: its own, then the one a Llama would give it."""
    return pair.trained_as, f"model.{pair.module}"


def _plan(
    a: PairKey,
    b: PairKey,
    tensors: Mapping[str, TensorInfo],
    config: PeftConfig,
    base: BaseShapes,
    max_lora_rank: int,
) -> ModulePlan:
    projection = base.projection_at(a.path)
    assert projection is not None, a.path
    out_features, in_features = base.projections[projection]
    info = tensors[a.key]
    if len(info.shape) == 2 and info.shape[0] > max_lora_rank:
        raise InvalidAdapter(
            f"{a.key}: rank {info.shape[0]} is larger than max_lora_rank {max_lora_rank}; "
            "raise lora_config.max_lora_rank, or train a smaller rank"
        )
    rank = config.rank_of(*_names(a))
    for key, shape in ((a.key, (rank, in_features)), (b.key, (out_features, rank))):
        _check_tensor(key, tensors[key], shape, rank)
    return ModulePlan(a.module, projection, rank, config.scale_of(*_names(a)), a.key, b.key)


def _check_tensor(key: str, info: TensorInfo, expected: tuple[int, int], rank: int) -> None:
    if info.dtype not in SERVED_DTYPES:
        raise InvalidAdapter(f"{key}: dtype {info.dtype}, expected one of {', '.join(SERVED_DTYPES)}")
    if info.shape != expected:
        raise InvalidAdapter(
            f"{key}: shape {list(info.shape)}, expected {list(expected)} "
            f"(rank {rank} by adapter_config.json, the rest by the base model)"
        )
