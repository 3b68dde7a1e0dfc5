"""Which tensor of an adapter belongs to which module of the base model, decided from keys and shapes alone."""

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lora_core.adapter_weights import SERVED_DTYPES, TensorInfo, list_keys
from lora_core.base_shapes import EMBEDDINGS, BaseShapes
from lora_core.config import MAX_LORA_RANK
from lora_core.errors import InvalidAdapter
from lora_core.module_patterns import ModuleRule, invalid_config
from lora_core.peft_config import PeftConfig
from lora_core.tensor_keys import (
    EMBEDDING_MODULE,
    HEAD_MODULE,
    TensorKey,
    parse_copy_key,
    parse_tensor_key,
    parse_whole_weight_key,
)
from lora_core.types import LoRAType


class ModulePlan(NamedTuple):
    """One adapted module: what it is, its true rank, the factor of B, and the keys of its tensors in the files.

    `projection` is the last part of its name, `shape` `(out_features, in_features)`; `magnitude_key` is None without
    DoRA.
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
    """Why a tensor cannot be served, as it reads in the refusal; braces stand for what the base model has."""

    BIAS = "biases, not served: train with bias='none' and lora_bias=False"
    EMBEDDING = (
        "adapted embed_tokens or lm_head, which this server does not adapt: set lora_config.adapt_embeddings to true"
    )
    FORM = (
        "tensors of a linear layer on an embedding, or of an embedding on a linear layer (expected lora_embedding_A "
        "and lora_embedding_B of embed_tokens, lora_A and lora_B of all else)"
    )
    FULL_WEIGHT = (
        "whole weights (modules_to_save or saved embeddings), not served: train without modules_to_save, and save with "
        "save_embedding_layers=False"
    )
    COPY_SHAPE = "copies of base weights of another shape than this base model's"
    LAYER = "decoder layers this base model does not have (it has {num_layers}, counted from 0)"
    MODULE = "modules this server does not adapt (it adapts {modules})"


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
    # A head that is tied is adapted with the embedding, whichever layers are transformed.
    transformed = [
        parts
        for name, parts in modules.items()
        if (config.ensure_weight_tying and name == HEAD_MODULE) or _transforms(config, parts[LoRAType.A])
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
        copy, whole = (None, None) if key is not None else (parse_copy_key(name), parse_whole_weight_key(name))
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
        raise _no_place(foreign, tensors, base)
    return keys, copies, wholes


def _no_place(
    foreign: Mapping[_Foreign, Iterable[str]], tensors: Mapping[str, TensorInfo], base: BaseShapes
) -> InvalidAdapter:
    """The refusal of tensors without a place, keys by reason."""
    reasons = []
    for reason in _Foreign:
        keys = foreign.get(reason, ())
        if reason is _Foreign.COPY_SHAPE:
            keys = [f"{key} {_shapes_of_copy(key, tensors[key], base)}" for key in keys]
        if keys:
            why = reason.value.format(num_layers=base.num_layers, modules=base.describe())
            reasons.append(f"{why}: {list_keys(keys)}")
    return InvalidAdapter(f"the adapter has tensors that have no place here: {'; '.join(reasons)}")


def _shapes_of_copy(key: str, info: TensorInfo, base: BaseShapes) -> str:
    module = parse_copy_key(key)
    expected = base.weight_shape(module) if module is not None else None
    return f"(shape {list(info.shape)}, expected {'no such copy' if expected is None else list(expected)})"


def _place(key: TensorKey, base: BaseShapes) -> _Foreign | None:
    name, layer = key.module.name, key.module.layer
    if layer is not None and name not in base.modules:
        return _Foreign.MODULE if layer < base.num_layers else _Foreign.LAYER
    if key.form == ("linear" if name == EMBEDDING_MODULE else "embedding"):
        return _Foreign.FORM
    if name in base.modules:
        return None
    # The setting leaves out both embedding and head: where one is adapted, it is not what leaves out the other.
    return _Foreign.MODULE if any(name in base.modules for name in EMBEDDINGS) else _Foreign.EMBEDDING


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
    if not config.ensure_weight_tying or HEAD_MODULE not in ranks:
        return False
    key = modules[HEAD_MODULE][LoRAType.A]
    own_rank = ranks[HEAD_MODULE]
    if tensors[key.key].shape[:1] == (ranks.get(EMBEDDING_MODULE),):
        ranks[HEAD_MODULE] = ranks[EMBEDDING_MODULE]
    is_meant = _transforms(config, key) and _dropped_by(config, key) is None
    return ranks[HEAD_MODULE] != own_rank or not is_meant


def _transforms(config: PeftConfig, key: TensorKey) -> bool:
    return config.transforms(key.module.layer, *key.target_names())


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
    dropped: dict[ModuleRule, dict[str, None]] = {}
    for key in keys:
        # A tied head is adapted with the embedding, whatever the config means.
        is_tied = config.ensure_weight_tying and key.module.name == HEAD_MODULE
        if not is_tied and (rule := _dropped_by(config, key)) is not None:
            dropped.setdefault(rule, {})[key.module.name] = None
    if dropped:
        rule, modules = next(iter(dropped.items()))
        raise invalid_config(
            f"{rule}, and the file holds tensors of {list_keys(modules, limit=3)}; "
            f"PEFT would not apply them: correct {rule.setting}, or leave the tensors out"
        )


def _dropped_by(config: PeftConfig, key: TensorKey) -> ModuleRule | None:
    """The rule by which the config does not mean a module; None if it does."""
    if config.excludes.matches(key.exclusion_names()):
        return config.excludes
    is_targeted = config.targets.matches(key.target_names(), in_decoder_layer=key.module.layer is not None)
    return None if is_targeted else config.targets


def _plan(
    parts: Mapping[LoRAType, TensorKey],
    tensors: Mapping[str, TensorInfo],
    rank: int,
    config: PeftConfig,
    base: BaseShapes,
    max_lora_rank: int,
) -> ModulePlan:
    a, b, magnitude = parts[LoRAType.A], parts[LoRAType.B], parts.get(LoRAType.GAIN)
    out_features, in_features = base.modules[a.module.name]
    info = tensors[a.key]
    if len(info.shape) == 2 and info.shape[0] == rank > max_lora_rank:
        advice = f"train a smaller rank, at most {MAX_LORA_RANK} can be served"
        if rank <= MAX_LORA_RANK:
            advice = "raise lora_config.max_lora_rank, or train a smaller rank"
        raise InvalidAdapter(f"{a.key}: rank {rank} is larger than max_lora_rank {max_lora_rank}; {advice}")
    expected: dict[str, tuple[int, ...]] = {a.key: (rank, in_features), b.key: (out_features, rank)}
    if magnitude is not None:
        expected[magnitude.key] = (out_features,)
    for key, shape in expected.items():
        _check_tensor(key, tensors[key], shape, rank)
    return ModulePlan(
        module=a.module.name,
        projection=a.module.path.rpartition(".")[2],
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
