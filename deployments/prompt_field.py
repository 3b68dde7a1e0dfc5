"""The field `prompt` of a completion: one text or its token ids, or a list of either, answered side by side."""

import json
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from deployments.body import NonEmpty
from deployments.sampling_fields import TokenId

MAX_ANSWERS = 1024
"""Most answers to one request: its prompts, times `n`."""

LONGEST_SHOWN = 40
"""Characters of a wrong value that its refusal repeats."""

OnePrompt = str | list[int]

_Ids = Annotated[list[TokenId], Field(min_length=1)]
_Described = (
    NonEmpty
    | _Ids
    | Annotated[list[NonEmpty], Field(min_length=1, max_length=MAX_ANSWERS)]
    | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_ANSWERS)]
)


def read_prompts(value: Any) -> list[OnePrompt]:
    """All prompts that a body's `prompt` holds, in their order.

    Not left to a union of types, whose refusal would be one sentence for each of them.

    Raises:
        ValueError: it is of another form, or one of the prompts is empty.
    """
    if not isinstance(value, list) or not value or not isinstance(value[0], (str, list)):
        return [_read(value, "")]
    kind = type(value[0])
    for index, prompt in enumerate(value):
        if type(prompt) is not kind:
            raise ValueError(f"entry {index} is {_shown(prompt)}, and entry 0 is {_shown(value[0])}; send one kind")
    return [_read(prompt, f"entry {index} ") for index, prompt in enumerate(value)]


def _read(prompt: Any, where: str) -> OnePrompt:
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{where}is an empty text; it needs at least one character")
        return prompt
    if not isinstance(prompt, list):
        raise ValueError(
            f"{where}is {_shown(prompt)}; expected a text, a list of token ids, or a list of texts or of such lists"
        )
    if not prompt:
        raise ValueError(f"{where}is an empty list; it needs at least one token id")
    # A bool is an int to Python. There may be a million of them, nearly always right ones.
    if set(map(type, prompt)) == {int} and min(prompt) >= 0:
        return prompt
    place, found = next((place, one) for place, one in enumerate(prompt) if type(one) is not int or one < 0)
    raise ValueError(f"{where}has {_shown(found)} in place {place}; expected a token id, from 0 on")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value, default=str)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "..."


Prompts = Annotated[list[OnePrompt], PlainValidator(read_prompts, json_schema_input_type=_Described)]
