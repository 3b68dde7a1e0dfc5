"""Which tensor of an adapter belongs to which module of the base model, decided from keys and shapes alone."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lora_core.adapter_weights import SERVED_DTYPES, TensorInfo, list_keys
from lora_core.errors import InvalidAdapter
from lora_core.module_patterns import ModuleRule, invalid_config
from lora_core.peft_config import PeftConfig
from lora_core.tensor_keys import (
    EMBEDDING_MODULE,
    HEAD_MODULE,
    ModuleName,
    TensorKey,
    parse_copy_key,
    parse_tensor_key,
    parse_whole_weight_key,
)
from lora_core.types import LoRAType

_PARENTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "gate_up_proj"), "mlp"),
}
"""Where a decoder layer keeps the projections whose names stand without a path."""

_EMBEDDINGS = (EMBEDDING_MODULE, HEAD_MODULE)


@dataclass(frozen=True)
class BaseShapes:
    """Shapes of the base model's weights.

    Attributes:
        projections: `(out_features, in_features)` of each module adapters may change: those of a decoder layer by PEFT
            projection name (`q_proj`) or by path inside the layer (`self_attn.q_proj`); `embed_tokens` is
            `(hidden, vocabulary)`, `lm_head` `(vocabulary, hidden)`.
        num_layers: Decoder layers.
        knows_weights: Copies of base weights will be compared with the base's values, not only with its shapes.
    """

    projections: Mapping[str, tuple[int, int]]
    num_layers: int
    knows_weights: bool = False

    def projection_of(self, module: ModuleName) -> str | None:
        """Name of the projection that a module is, or None if adapters may not change it."""
        if module.layer is None:
            return module.name if module.name in _EMBEDDINGS and module.name in self.projections else None
        for name in self.projections:
            if name in _EMBEDDINGS:
                continue
            path = f"{_PARENTS[name]}.{name}" if name in _PARENTS else name
            if module.path == path or (name not in _PARENTS and module.path.endswith(f".{name}")):
                return name
        return None

    def weight_shape(self, module: ModuleName) -> tuple[int, int] | None:
        """Shape of a module's weight in the checkpoint, if adapters may change the module."""
        projection = self.projection_of(module)
        if projection is None or (module.layer is not None and module.layer >= self.num_layers):
            return None
        out_features, in_features = self.projections[projection]
        return (in_features, out_features) if module.name == EMBEDDING_MODULE else (out_features, in_features)

    def accepts_copy(self, module: ModuleName, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape can be a copy of the base weight of `module`."""
        expected = self.weight_shape(module)
        if expected is None and module.path in _EMBEDDINGS:
            # The hidden size is known from any projection that reads the residual stream.
            return len(shape) == 2 and any(shape[1] == width for _, width in self.projections.values())
        return shape == expected


class ModulePlan(NamedTuple):
    """One adapted module: what it is, its true rank, the factor of B, and the keys of its tensors in the files.

    `shape` is `(out_features, in_features)`; `magnitude_key` is None without DoRA.
    """

    module: str
    projection: str
    shape: tuple[int, int]
    rank: int
    scale: float
    a_key: str
    b_key: str
    magnitude_key: str | None

    @property
    def is_embedding(self) -> bool:
        """Whether the module looks rows up instead of multiplying."""
        return self.module == EMBEDDING_MODULE


class AdapterPlan(NamedTuple):
    """What becomes of an adapter's tensors.

    Attributes:
        modules: Adapted modules, in the order of their names in the files; at least one.
        copies: Keys of tensors that PEFT would put in the place of a base weight, and so must be the base's own
            values; with the names of their modules.
        twins: Pairs of keys that both mean one tensor, of one shape and data type, and so must hold the same values.
        needs_tied_base: The pair of the head is there only as that of the embedding, which PEFT makes it where the
            base's weights are tied.
    """

    modules: list[ModulePlan]
    copies: dict[str, str]
    twins: list[tuple[str, str]]
    needs_tied_base: bool


class _Foreign(enum.Enum):
    """Why a tensor cannot be served, as it reads in the refusal."""

    BIAS = "biases, not served: train with bias='none' and lora_bias=False"
    EMBEDDING = (
        "adapted embed_tokens or lm_head, which this server does not adapt: set lora_config.adapt_embeddings to true"
    )
    FORM = "tensors of a linear layer on an embedding, or of an embedding on a linear layer"
    FULL_WEIGHT = "whole weights (modules_to_save or saved embeddings), not served"
    COPY_SHAPE = "copies of base weights of another shape than this base model's"
    LAYER = "decoder layers this base model does not have"
    MODULE = "modules this server does not adapt"


def plan_modules(
    tensors: Mapping[str, TensorInfo], config: PeftConfig, base: BaseShapes, max_lora_rank: int, *, strict: bool = True
) -> AdapterPlan:
    """Account for every tensor of an adapter, and say what each adapted module is made of.

    Args:
        tensors: Headers of all tensors in the adapter's files.
        config: Its config: ranks, alphas, modules targeted and excluded, layers to transform.
        base: What the tensors must fit.
        max_lora_rank: Largest rank accepted.
        strict: Refuse tensors of modules this server does not adapt; False leaves those, and only those, out.

    Raises:
        InvalidAdapter: a tensor has no place, the wrong shape or dtype, or no partner; a rank is too large; magnitude
            vectors disagree with `use_dora`; PEFT would drop a tensor that the config does not target; nothing is left
            to apply. Keys, what was found and what was expected are named.
    """
    keys, copies, wholes = _account(tensors, base, strict)
    modules, twins = _group(keys, tensors)
    _check_magnitudes(modules, config.use_dora)
    transformed = [
        parts
        for parts in modules.values()
        if config.transforms(parts[LoRAType.A].module.layer, *parts[LoRAType.A].target_names())
    ]
    _check_targets([parts[LoRAType.A] for parts in transformed], config)
    ranks = {name: config.rank_of(*parts[LoRAType.A].pattern_names()) for name, parts in modules.items()}
    needs_tied_base = _tie_head(ranks, modules, tensors, config)
    plans = {name: _plan(parts, tensors, ranks[name], config, base, max_lora_rank) for name, parts in modules.items()}
    applied = [plans[parts[LoRAType.A].module.name] for parts in transformed]
    if not applied:
        found = f"{len(tensors)} tensors" if tensors else "no tensor at all"
        raise InvalidAdapter(
            f"no tensor of the adapter applies to this base model: its files hold {found}, layers_to_transform is "
            f"{sorted(config.layers_to_transform) if config.layers_to_transform else None}"
        )
    # PEFT drops a copy of a layer that it does not adapt: there is no `base_layer` in such a one.
    names = {plan.module for plan in applied}
    loaded = {key: module for key, module in copies.items() if module in names} | wholes
    for key in loaded:
        _check_dtype(key, tensors[key])
    return AdapterPlan(applied, loaded, twins, needs_tied_base)


def _account(
    tensors: Mapping[str, TensorInfo], base: BaseShapes, strict: bool
) -> tuple[list[TensorKey], dict[str, str], dict[str, str]]:
    """Keys to apply, copies of base weights, and whole weights; refuses the adapter if any other tensor has no place.

    The latter two are the modules' names by key.
    """
    keys: list[TensorKey] = []
    copies: dict[str, str] = {}
    wholes: dict[str, str] = {}
    foreign: dict[_Foreign, list[str]] = {}
    for name, info in tensors.items():
        key = parse_tensor_key(name)
        copy, whole = parse_copy_key(name), parse_whole_weight_key(name)
        if key is not None:
            reason = _place(key, base)
        elif copy is not None:
            reason = None if base.accepts_copy(copy, info.shape) else _Foreign.COPY_SHAPE
        elif whole is not None and base.knows_weights and base.weight_shape(whole) == info.shape:
            reason = None
        else:
            reason = _explain(name)
        if reason is not None:
            foreign.setdefault(reason, []).append(name)
        elif key is not None:
            keys.append(key)
        elif copy is not None:
            copies[name] = copy.name
        elif whole is not None:
            wholes[name] = whole.name
    if not strict:
        foreign.pop(_Foreign.MODULE, None)
    if foreign:
        reasons = (f"{reason.value}: {list_keys(foreign[reason])}" for reason in _Foreign if reason in foreign)
        raise InvalidAdapter(f"the adapter has tensors that have no place here: {'; '.join(reasons)}")
    return keys, copies, wholes


def _place(key: TensorKey, base: BaseShapes) -> _Foreign | None:
    if base.projection_of(key.module) is None:
        return _Foreign.EMBEDDING if key.module.layer is None else _Foreign.MODULE
    if key.module.layer is not None and key.module.layer >= base.num_layers:
        return _Foreign.LAYER
    is_embedding = key.module.name == EMBEDDING_MODULE
    return _Foreign.FORM if key.form == ("linear" if is_embedding else "embedding") else None


def _explain(key: str) -> _Foreign:
    """Why a tensor that is neither part of a pair nor a copy of a base weight is refused."""
    names = key.split(".")
    if names[-1] == "bias" or "lora_bias" in names or "lora.bias" in key:
        return _Foreign.BIAS
    is_lora = any(name.startswith("lora_") for name in names)
    return _Foreign.MODULE if is_lora or names[-1] != "weight" else _Foreign.FULL_WEIGHT


def _group(
    keys: Iterable[TensorKey], tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, dict[LoRAType, TensorKey]], list[tuple[str, str]]]:
    """The tensors of each module (A, B and, if there is one, its magnitude vector), and pairs of keys that are one."""
    modules: dict[str, dict[LoRAType, TensorKey]] = {}
    twins: list[tuple[str, str]] = []
    adapters: set[str] = set()
    for key in keys:
        if key.adapter:
            adapters.add(key.adapter)
        twin = modules.setdefault(key.module.name, {}).setdefault(key.part, key)
        if twin is key:
            continue
        # PEFT itself saves the magnitude vector of an embedding twice, under two names.
        if tensors[twin.key][1:] != tensors[key.key][1:]:
            raise twin_conflict(twin.key, key.key)
        twins.append((twin.key, key.key))
    if len(adapters) > 1:
        raise InvalidAdapter(f"the files hold several adapters: {', '.join(sorted(adapters))}; save each one apart")
    alone = [key.key for parts in modules.values() if not _is_pair(parts) for key in parts.values()]
    if alone:
        raise InvalidAdapter(
            f"tensors without their partner (a module has lora_A and lora_B, or neither): {list_keys(alone)}"
        )
    return modules, twins


def twin_conflict(first: str, second: str) -> InvalidAdapter:
    """The refusal of two tensors for one place."""
    return InvalidAdapter(f"{first} and {second} are the same part of one module; expected one, or equal tensors")


def _tie_head(
    ranks: dict[str, int],
    modules: Mapping[str, Mapping[LoRAType, TensorKey]],
    tensors: Mapping[str, TensorInfo],
    config: PeftConfig,
) -> bool:
    """Give the head the embedding's rank where its pair has that one; returns whether only a tied base allows it.

    With `ensure_weight_tying` PEFT makes the head's pair the embedding's on a tied base, whatever the head's own rank
    by the config, and whether or not the config targets it. The scale stays that of the head's own rank.
    """
    if not config.ensure_weight_tying or not {EMBEDDING_MODULE, HEAD_MODULE} <= ranks.keys():
        return False
    key = modules[HEAD_MODULE][LoRAType.A]
    own_rank = ranks[HEAD_MODULE]
    if tensors[key.key].shape[:1] == (ranks[EMBEDDING_MODULE],):
        ranks[HEAD_MODULE] = ranks[EMBEDDING_MODULE]
    is_targeted = config.targets.matches(key.target_names(), in_decoder_layer=False)
    return ranks[HEAD_MODULE] != own_rank or not is_targeted


def _is_pair(parts: Mapping[LoRAType, TensorKey]) -> bool:
    return LoRAType.A in parts and LoRAType.B in parts


def _check_magnitudes(modules: Mapping[str, Mapping[LoRAType, TensorKey]], use_dora: bool) -> None:
    vectors = [parts[LoRAType.GAIN].key for parts in modules.values() if LoRAType.GAIN in parts]
    if vectors and not use_dora:
        raise invalid_config(
            f"use_dora is false, and the files hold DoRA magnitude vectors: {list_keys(vectors, limit=3)}; PEFT would "
            "not apply them: set use_dora to true, or leave the vectors out"
        )
    lacking = [name for name, parts in modules.items() if LoRAType.GAIN not in parts]
    if lacking and use_dora:
        raise invalid_config(
            f"use_dora is true, and the files hold no lora_magnitude_vector of {list_keys(lacking, limit=3)}; "
            "expected one beside each pair: save the adapter again, or set use_dora to false if it is plain LoRA"
        )


def _check_targets(keys: Iterable[TensorKey], config: PeftConfig) -> None:
    """Refuse tensors that PEFT would drop, with a warning, because the config does not mean their modules."""
    keys = list(keys)
    # Of tied weights PEFT lists only the embedding, and adapts the head with it.
    tied = config.ensure_weight_tying and any(key.module.name == EMBEDDING_MODULE for key in keys)
    dropped: dict[ModuleRule, dict[str, None]] = {}
    for key in keys:
        if config.excludes.matches(key.exclusion_names()):
            dropped.setdefault(config.excludes, {})[key.module.name] = None
        elif not (tied and key.module.name == HEAD_MODULE) and not config.targets.matches(
            key.target_names(), in_decoder_layer=key.module.layer is not None
        ):
            dropped.setdefault(config.targets, {})[key.module.name] = None
    if dropped:
        rule, modules = next(iter(dropped.items()))
        raise invalid_config(
            f"{rule}, and the file holds tensors of {list_keys(modules, limit=3)}; "
            f"PEFT would not apply them: correct {rule.setting}, or leave the tensors out"
        )


def _plan(
    parts: Mapping[LoRAType, TensorKey],
    tensors: Mapping[str, TensorInfo],
    rank: int,
    config: PeftConfig,
    base: BaseShapes,
    max_lora_rank: int,
) -> ModulePlan:
    a, b, magnitude = parts[LoRAType.A], parts[LoRAType.B], parts.get(LoRAType.GAIN)
    projection = base.projection_of(a.module)
    assert projection is not None, a.module.name
    out_features, in_features = base.projections[projection]
    info = tensors[a.key]
    if len(info.shape) == 2 and info.shape[0] > max_lora_rank:
        raise InvalidAdapter(
            f"{a.key}: rank {info.shape[0]} is larger than max_lora_rank {max_lora_rank}; "
            "raise lora_config.max_lora_rank, or train a smaller rank"
        )
    expected: dict[str, tuple[int, ...]] = {a.key: (rank, in_features), b.key: (out_features, rank)}
    if magnitude is not None:
        expected[magnitude.key] = (out_features,)
    for key, shape in expected.items():
        _check_tensor(key, tensors[key], shape, rank)
    return ModulePlan(
        module=a.module.name,
        projection=projection,
        shape=(out_features, in_features),
        rank=rank,
        scale=config.scale_of(*a.pattern_names()),
        a_key=a.key,
        b_key=b.key,
        magnitude_key=magnitude.key if magnitude is not None else None,
    )


def _check_dtype(key: str, info: TensorInfo) -> None:
    if info.dtype not in SERVED_DTYPES:
        raise InvalidAdapter(f"{key}: dtype {info.dtype}, expected one of {', '.join(SERVED_DTYPES)}")


def _check_tensor(key: str, info: TensorInfo, expected: tuple[int, ...], rank: int) -> None:
    _check_dtype(key, info)
    if info.shape != expected:
        raise InvalidAdapter(
            f"{key}: shape {list(info.shape)}, expected {list(expected)} "
            f"(rank {rank} by adapter_config.json, the rest by the base model)"
        )
