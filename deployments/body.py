"""`Body`: how JSON bodies are read. What this server cannot honour is refused by name."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, model_validator

from cluster.schema import unknown_key

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1, None),
    "top_logprobs": (0, None),
    "echo": (False, None),
    "suffix": ("", None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "modalities": (["text"], None),
    "refusal": (None,),
    "tool_calls": ([], None),
    "function_call": ("none", "auto", None),
    "functions": ([], None),
    "audio": (None,),
    "annotations": ([], None),
    "reasoning_effort": ("none", None),
    "verbosity": ("medium", None),
    "web_search_options": (None,),
    "moderation": (None,),
    # Some clients keep it in each message of a chat.
    "type": ("text", "message", None),
    # vLLM's, of an adapter for a mixture of experts.
    "is_3d_lora_weight": (False, None),
}
"""Fields not served, or not by every body, each with the values that ask nothing of it."""

NO_INFLUENCE = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prediction",
    "parallel_tool_calls",
    # vLLM reads it in no body either.
    "lora_int_id",
)
"""Fields accepted and ignored by bodies that do not read them: there they never change an answer."""

RENAMED = {
    "guided_json": 'structured_outputs: {"json": ...}',
    "guided_regex": 'structured_outputs: {"regex": ...}',
    "guided_choice": 'structured_outputs: {"choice": ...}',
}
"""Names that earlier versions of vLLM had for what is here."""

SHOWN_UNKNOWN = 8
"""Unknown keys that a refusal names; the rest are counted. To look for the nearest known one takes a while."""

LONGEST_KEY = 64
"""Characters of an unknown key that a refusal repeats. No known one is as long."""

MAX_DEPTH = 128
"""Levels of a JSON object whose content this server does not read itself. What does read it, a chat template or a
compiler of schemas, may go down by recursion."""

NonEmpty = Annotated[str, StringConstraints(min_length=1)]


def is_too_deep(value: Any) -> bool:
    """Whether JSON has more than `MAX_DEPTH` levels of objects and lists."""
    level, depth = list(_containers([value])), 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            return True
        level = [inner for one in level for inner in _containers(one.values() if isinstance(one, dict) else one)]
    return False


def _containers(values: Iterable[Any]) -> Iterator[dict[str, Any] | list[Any]]:
    return (value for value in values if isinstance(value, (dict, list)))


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    if is_too_deep(value):
        raise ValueError(f"it is nested too deeply; it may have up to {MAX_DEPTH} levels")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_shallow)]
"""An object of JSON with any content."""


class _Names(NamedTuple):
    """The keys of one kind of body."""

    known: Mapping[str, None]
    """In the order in which they are declared."""
    unserved: Mapping[str, tuple[Any, ...]]
    """Those of `NEUTRAL_VALUES` that it does not know."""
    aside: frozenset[str]
    """Those that may be there, and are left out."""


class Body(BaseModel):
    """A JSON body: wrong types, unknown fields and unserved features are refused by name."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _set_aside(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        names = _names(cls)
        if data.keys() <= names.known.keys():
            return data
        for name, neutral in names.unserved.items():
            if name in data and not _asks_nothing(data[name], neutral):
                raise ValueError(f"{name} is not supported by this server; leave it out")
        kept = {key: value for key, value in data.items() if key not in names.aside}
        unknown = [str(key) for key in kept if key not in names.known]
        if unknown:
            raise ValueError(_unknown(unknown, names.known))
        return kept


@functools.cache
def _names(model: type[BaseModel]) -> _Names:
    known = dict.fromkeys(field.alias or name for name, field in model.model_fields.items())
    unserved = {name: neutral for name, neutral in NEUTRAL_VALUES.items() if name not in known}
    return _Names(known, unserved, frozenset((*unserved, *NO_INFLUENCE)).difference(known))


def _unknown(keys: list[str], known: Iterable[str]) -> str:
    shown = "; ".join(_unknown_key(key, known) for key in keys[:SHOWN_UNKNOWN])
    more = len(keys) - SHOWN_UNKNOWN
    return f"{shown}; and {more} more unknown keys" if more > 0 else shown


def _unknown_key(key: str, known: Iterable[str]) -> str:
    if key in RENAMED:
        return f"unknown key {key!r}; write {RENAMED[key]}"
    if len(key) > LONGEST_KEY:
        return f"unknown key {key[:LONGEST_KEY]!r}..."
    return unknown_key(key, known)


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # To Python, True is 1 and False is 0; to a reader of the API they are not.
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)
