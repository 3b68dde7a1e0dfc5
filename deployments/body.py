"""`Body`: how JSON bodies are read. What this server cannot honour is refused by name."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator

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

NonEmpty = Annotated[str, StringConstraints(min_length=1)]


class Body(BaseModel):
    """A JSON body: wrong types, unknown fields and unserved features are refused by name."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _set_aside(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = [field.alias or name for name, field in cls.model_fields.items()]
        for name, neutral in NEUTRAL_VALUES.items():
            if name in data and name not in known and not _asks_nothing(data[name], neutral):
                raise ValueError(f"{name} is not supported by this server; leave it out")
        aside = {*NEUTRAL_VALUES, *NO_INFLUENCE}.difference(known)
        kept = {key: value for key, value in data.items() if key not in aside}
        unknown = [str(key) for key in kept if key not in known]
        if unknown:
            raise ValueError("; ".join(_unknown(key, known) for key in unknown))
        return kept


def _unknown(key: str, known: list[str]) -> str:
    if key in RENAMED:
        return f"unknown key {key!r}; write {RENAMED[key]}"
    return unknown_key(key, known)


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # To Python, True is 1 and False is 0; to a reader of the API they are not.
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)
