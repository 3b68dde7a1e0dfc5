"""The names adapters' tensors have in files, taken apart: PEFT's, and those other training tools leave behind."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lora_core.types import LoRAType

EMBEDDING_MODULE = "embed_tokens"
HEAD_MODULE = "lm_head"

# What torch.compile, DistributedDataParallel and DeepSpeed, FSDP, activation checkpointing and Lightning call the model
# inside them. They wrap any module, so these names may stand anywhere in a key, and never name a module themselves.
_WRAPPERS = frozenset(("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"))

# Only wrappers of the language model may stand before a module: another word there is another tower.
_PREFIXES = frozenset(("base_model", "model", "language_model"))
_SAVED_PREFIX = "base_model.model."

TensorForm = Literal["linear", "embedding", "any"]

_PARTS: dict[str, tuple[LoRAType, TensorForm]] = {
    "lora_A": (LoRAType.A, "linear"),
    "lora_B": (LoRAType.B, "linear"),
    "lora_embedding_A": (LoRAType.A, "embedding"),
    "lora_embedding_B": (LoRAType.B, "embedding"),
    "lora_magnitude_vector": (LoRAType.GAIN, "any"),
}


class ModuleName(NamedTuple):
    """A module of the base model, by its normalised name.

    Attributes:
        name: `layers.<n>.<path>`, `embed_tokens` or `lm_head`.
        layer: Index of its decoder layer; None outside of them.
        path: Its path inside the decoder layer; outside of them its name.
    """

    name: str
    layer: int | None
    path: str

    @property
    def in_llama(self) -> str:
        """The name that a Llama, as transformers has it, gives the module."""
        return self.name if self.name == HEAD_MODULE else f"model.{self.name}"


class TensorKey(NamedTuple):
    """One tensor key of an adapted module, taken apart.

    Attributes:
        key: As in the file.
        module: The module it belongs to.
        part: Which of the module's tensors; `GAIN` is DoRA's magnitude vector, which the gain is computed from.
        form: Whether PEFT uses the key for linear layers, embeddings or both.
        trained_as: The name PEFT knew the module by, as far as the key tells.
        adapter: The adapter-name segment after the part, or "".
        is_saved_form: The key has the prefix PEFT saves with, so that `trained_as` is certain.
    """

    key: str
    module: ModuleName
    part: LoRAType
    form: TensorForm
    trained_as: str
    adapter: str
    is_saved_form: bool

    def pattern_names(self) -> tuple[str, str]:
        """Names for the config's patterns: the module's own, then the one a Llama would give it."""
        return self.trained_as, self.module.in_llama

    def target_names(self) -> tuple[str, ...]:
        """Names by which `target_modules` may mean the module.

        A key in PEFT's own form for a Llama tells the name for certain; any other may come from a base model that
        wraps its decoder differently, or have been renamed.
        """
        llama = self.module.in_llama
        if self.is_saved_form and self.trained_as == llama:
            return (llama,)
        return (self.trained_as, llama, *self._wrapped_names(), self.module.name)

    def exclusion_names(self) -> tuple[str, ...]:
        """Names by which `exclude_modules` may mean the module: one, if the key has PEFT's form for a known wrapper.

        Fewer than those of `target_modules`: a pattern that excludes all but the language model must not match a name
        that the module never had.
        """
        is_wrapped = self.is_saved_form and self.trained_as in self._wrapped_names()
        return (self.trained_as,) if is_wrapped else self.target_names()

    def _wrapped_names(self) -> tuple[str, str]:
        inside = self.module.name if self.module.name == HEAD_MODULE else f"model.{self.module.name}"
        return f"model.language_model.{self.module.name}", f"language_model.{inside}"


def parse_tensor_key(key: str) -> TensorKey | None:
    """Take a tensor key apart, or return None if it is no `lora_A`, `lora_B` or magnitude vector of a known module.

    Linear layers have `<module>.lora_A.weight`; embeddings `<module>.lora_embedding_A` and every module
    `<module>.lora_magnitude_vector`, both with or without `.weight`. A segment with the adapter's name may stand after
    the part in all of them.
    """
    names = _without_wrappers(key)
    place = next((index for index in reversed(range(len(names))) if names[index] in _PARTS), 0)
    module = _module(names[:place])
    if module is None:
        return None
    part, form = _PARTS[names[place]]
    rest = names[place + 1 :]
    if rest and rest[-1] == "weight":
        rest = rest[:-1]
    elif form == "linear":
        return None
    if len(rest) > 1:
        return None
    full_name = ".".join(names[:place])
    trained_as = full_name.removeprefix(_SAVED_PREFIX)
    return TensorKey(key, module, part, form, trained_as, rest[0] if rest else "", trained_as != full_name)


def parse_copy_key(key: str) -> ModuleName | None:
    """The module whose base weight a key such as `lm_head.base_layer.weight` is a copy of; None if it is no such key.

    The module's own name is a guess where it is none that a decoder has.
    """
    names = _without_wrappers(key)
    if names[-2:] != ["base_layer", "weight"]:
        return None
    return _module(names[:-2]) or ModuleName(".".join(names[:-2]), None, names[-3] if len(names) > 2 else "")


def parse_whole_weight_key(key: str) -> ModuleName | None:
    """The module whose whole weight a key such as `model.embed_tokens.weight` is; None if it is no embedding's."""
    names = _without_wrappers(key)
    module = _module(names[:-1]) if names[-1] == "weight" else None
    return module if module is not None and module.layer is None else None


def _without_wrappers(key: str) -> list[str]:
    return [name for name in key.split(".") if name not in _WRAPPERS] or [key]


def _module(names: Sequence[str]) -> ModuleName | None:
    start = 0
    while start < len(names) and names[start] in _PREFIXES:
        start += 1
    match names[start:]:
        case [("embed_tokens" | "lm_head") as name]:
            return ModuleName(name, None, name)
        case ["layers", number, *path] if path and _is_layer_number(number):
            return ModuleName(".".join(names[start:]), int(number), ".".join(path))
    return None


def _is_layer_number(number: str) -> bool:
    is_plain = number.isascii() and number.isdigit() and len(number) <= 6
    return is_plain and (number == "0" or not number.startswith("0"))
