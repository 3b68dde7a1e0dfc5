"""Grammars for answers that hold tool calls: the model writes them as its template reads them, and nothing else."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from deployments.generation import CallRules
from deployments.tokenizer import ModelTokenizer
from deployments.tool_calls import TOOL_CALLS, ToolReader, answer_template
from lora_core.errors import InvalidRequest

MOST_CALLS = 16
"""Calls in one answer, where nothing else is said: a model that repeats itself comes to an end."""

WHITESPACE = r"[ \t\n\r]{1,16}"
"""Between the parts of a call's arguments."""

PROBE: dict[str, Any] = {"probe": 1}
"""Arguments that forms are tried out with."""


class CallForm(NamedTuple):
    """How one function's call is written: what stands before and behind its arguments, which are JSON."""

    opening: str
    """From here on, text is a call."""
    head: str
    tail: str
    closing: str

    def written(self, arguments: dict[str, Any]) -> str:
        """A call with these arguments."""
        return self.opening + self.head + json.dumps(arguments) + self.tail + self.closing


def call_grammar(
    tokenizer: ModelTokenizer,
    new_reader: Callable[[], ToolReader | None],
    tools: Sequence[dict[str, Any]],
    rules: CallRules,
) -> str:
    """The grammar of an answer that keeps the rules, in llguidance's dialect of Lark.

    How the model writes calls is found by trying out what its template may mean with the reader of its answers: what
    the reader takes for exactly that call is right.

    Args:
        tokenizer: The base model's.
        new_reader: Makes a reader of an answer to this chat.
        tools: All that the model was told of.
        rules: What its answer is held to.

    Raises:
        InvalidRequest: the model's calls are not written so that a grammar can tell them; the function is named.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    by_opening: dict[str, list[tuple[str, CallForm]]] = {}
    for name in rules.functions:
        form = _form(tokenizer, new_reader, name)
        by_opening.setdefault(form.opening, []).append((name, form))
    most = rules.most_calls or MOST_CALLS
    lines = ["%llguidance {}", _start(rules.is_needed, most)]
    openings = [f"opened_{index}" for index in range(len(by_opening))]
    lines.append("call: " + " | ".join(openings))
    for index, (opening, forms) in enumerate(by_opening.items()):
        bodies = [
            f"{_terminals(tokenizer, form.head)} {_arguments(schemas[name], is_strict=name in rules.strict)} "
            f'{_terminals(tokenizer, form.tail)} "\\n"? {_terminals(tokenizer, form.closing)}'
            for name, form in forms
        ]
        body = " | ".join(f"({body})" for body in bodies)
        lines += _opened(tokenizer, index, opening, body, is_needed=rules.is_needed)
    return "\n".join(lines) + "\n"


def _start(is_needed: bool, most: int) -> str:
    if is_needed:
        return "start: call" + (f' ("\\n"? call){{0,{most - 1}}}' if most > 1 else "")
    return f"start: call{{0,{most}}} rest\nrest: TEXT\nTEXT: /(.|\\n)*/"


def _opened(tokenizer: ModelTokenizer, index: int, opening: str, body: str, *, is_needed: bool) -> Iterator[str]:
    """The rules of calls that begin alike, with any text before them where they need not come at once."""
    begin = _terminals(tokenizer, opening)
    if is_needed:
        yield f'opened_{index}: {begin} "\\n"? ({body})'
    elif begin.startswith('"'):
        # Lazy: the text ends where the opening stands first.
        first, _, rest = begin.partition('" ')
        yield f"lead_{index}[lazy]: TEXT {first}" + ('"' if rest else "")
        yield f'opened_{index}: lead_{index} {rest} "\\n"? ({body})'
    else:
        yield f'opened_{index}: TEXT {begin} "\\n"? ({body})'


def _arguments(schema: dict[str, Any], *, is_strict: bool) -> str:
    """JSON of a schema; of one that is not strict, what llguidance does not know is left out of account."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": not is_strict}
    return "%json " + json.dumps({"type": "object", **schema, "x-guidance": options})


def _terminals(tokenizer: ModelTokenizer, text: str) -> str:
    """A text as a grammar writes it: special tokens, which no text matches, by their ids."""
    if not text:
        return ""
    special = {
        name: token_id
        for token_id in set(tokenizer.encode(text, add_special_tokens=False))
        if tokenizer.is_special(token_id) and (name := tokenizer.token_name(token_id))
    }
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    return " ".join(f"<[{special[piece]}]>" if piece in special else json.dumps(piece) for piece in pieces if piece)


def _form(tokenizer: ModelTokenizer, new_reader: Callable[[], ToolReader | None], name: str) -> CallForm:
    template = answer_template(tokenizer) or {}
    field = template.get("fields", {}).get(TOOL_CALLS, {})
    for form in _candidates(field, name, tokenizer.end_of_text):
        reader = new_reader()
        if reader is not None and _is_read(reader, form, name):
            return form
    raise InvalidRequest(
        f"tool_choice, or a tool that is strict: the base model's calls of {name!r} are not written in a form that an "
        "answer can be held to; leave out tool_choice and strict"
    )


def _is_read(reader: ToolReader, form: CallForm, name: str) -> bool:
    spoken = reader.read(form.written(PROBE), final=True)
    calls = [(call.name, call.arguments) for call in spoken.calls]
    return not spoken.text and calls == [(name, json.dumps(PROBE))]


def _candidates(field: dict[str, Any], name: str, end_of_text: str | None) -> Iterator[CallForm]:
    """What a field of a response template may mean, the likeliest first."""
    quoted = json.dumps(name)
    bodies = (
        (f'{{"name": {quoted}, "arguments": ', "}"),
        (f'{{"name": {quoted}, "parameters": ', "}"),
        ("", ""),
        (f'[{{"name": {quoted}, "arguments": ', "}]"),
    )
    closings = [text for text in _texts(field, "close", name) if text != end_of_text]
    for opening in _texts(field, "open", name):
        for closing in (*closings, ""):
            for head, tail in bodies:
                yield CallForm(opening, head, tail, closing)


def _texts(field: dict[str, Any], key: str, name: str) -> Iterable[str]:
    """Texts that an end of a field's region may be; of a pattern, the one that it is with the function's name in it."""
    given = field.get(key)
    if given is not None:
        return [given] if isinstance(given, str) else list(given)
    pattern = str(field.get(f"{key}_pattern", ""))
    named = re.sub(r"\(\?P<\w+>[^()]*\)", lambda _: re.escape(name), pattern).replace(r"\s*", "")
    return [re.sub(r"\\(.)", r"\1", named)] if named else []
