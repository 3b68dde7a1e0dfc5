"""Grammars of tool calls: what each model's template takes for calls fits, and nothing else does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from deployments.call_grammar import MOST_CALLS, call_grammar
from deployments.generation import CallRules
from deployments.tokenizer import ModelTokenizer
from deployments.tool_calls import tool_reader
from lora_core.errors import InvalidRequest
from tests.unit.test_tokenizer import save_tokenizer
from tests.unit.test_tool_calls import TAGGED, THINKING, WITH_TOOLS

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object", "properties": {key: {"enum": values}}, "required": [key],
                "additionalProperties": False,
            },
        },
    }
    for name, key, values in (("clock", "zone", ["utc", "cet"]), ("dice.roll", "sides", [6, 20]))
]  # fmt: skip
CLOCK, DICE = ("clock", {"zone": "utc"}), ("dice.roll", {"sides": 20})
Fits = Callable[[str], bool]


def model(folder: Path, tool_calls: dict[str, Any] | None = None) -> ModelTokenizer:
    """A tokenizer whose answers are tagged JSON, or as a response template's field says."""
    folder = save_tokenizer(folder, TAGGED if tool_calls is None else WITH_TOOLS)
    if tool_calls is not None:
        fields = {"content": {}, "tool_calls": {"repeats": True, "content": "json", **tool_calls}}
        file = folder / "tokenizer_config.json"
        template = {"start_anchor": "[assistant]", "fields": fields}
        file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": template}))
    return ModelTokenizer(folder)


def grammar(tokenizer: ModelTokenizer, **rules: Any) -> str:
    asked = CallRules(**{"functions": ["clock", "dice.roll"], "is_needed": True, **rules})
    return call_grammar(tokenizer, lambda: tool_reader(tokenizer, "[assistant]", TOOLS), TOOLS, asked)


def fits(source: str) -> Fits:
    """Whether whole texts are answers by a grammar."""
    compiled = LLMatcher.grammar_from_lark(source)
    tokens = LLTokenizer("byte")

    def check(text: str) -> bool:
        matcher = LLMatcher(tokens, compiled, log_level=0)
        assert not matcher.get_error(), matcher.get_error()
        data = text.encode()
        return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()

    return check


def tagged(call: tuple[str, dict[str, Any]]) -> str:
    name, arguments = call
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def test_calls_that_are_needed(tmp_path: Path) -> None:
    right = fits(grammar(model(tmp_path)))
    one, other = tagged(CLOCK), tagged(DICE)
    for text in (one, other, one + other, one + "\n" + other, one.replace("\n", ""), one * MOST_CALLS):
        assert right(text), text
    for text in (
        "", "Well.", "Well. " + one, one + " Well.", one[:-1], one.replace("utc", "xyz"), one.replace("clock", "cluck"),
        tagged(("clock", {})), tagged(("clock", {"zone": "utc", "more": 1})), one * (MOST_CALLS + 1),
    ):  # fmt: skip
        assert not right(text), text


def test_one_call_of_one_function(tmp_path: Path) -> None:
    right = fits(grammar(model(tmp_path), functions=["clock"], most_calls=1))
    assert right(tagged(CLOCK))
    assert not right(tagged(DICE))
    assert not right(tagged(CLOCK) * 2)


def test_calls_that_are_strict_among_any_text(tmp_path: Path) -> None:
    right = fits(grammar(model(tmp_path), is_needed=False, strict=["clock"]))
    for text in ("", "Well.", "a <tool", tagged(CLOCK), f"Well.\n{tagged(CLOCK)} So {tagged(DICE)}.", "<b>\n{"):
        assert right(text), text
    for text in ("<tool_call>hm</tool_call>", tagged(("clock", {})), f"{tagged(CLOCK)} {tagged(('clock', {}))}"):
        assert not right(text), text


FORMS: list[tuple[dict[str, Any], str]] = [
    (
        {"open": "[CALL]", "close": ["[END]", "[STOP]"], "transform": {"type": "function", "function": "{content}"}},
        '[CALL]{"name": "clock", "arguments": {"zone": "utc"}}[END]',
    ),
    (
        {
            "open_pattern": r"\[CALL (?P<name>[\w.]+)\]\s*", "close": "[END]",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        '[CALL clock]{"zone": "utc"}[END]',
    ),
    (
        {
            "open": "[CALL]", "close": "[END]",
            "transform": {
                "type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        },
        '[CALL]{"name": "clock", "parameters": {"zone": "utc"}}[END]',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("field", "call"), FORMS)
@pytest.mark.parametrize("is_needed", [True, False])
def test_the_forms_of_authors_own_templates(tmp_path: Path, field: dict[str, Any], call: str, is_needed: bool) -> None:
    tokenizer = model(tmp_path, field)
    right = fits(grammar(tokenizer, is_needed=is_needed))
    assert right(call)
    assert right(call + call)
    assert not right(call.replace("utc", "xyz"))
    assert right("Well. " + call) is not is_needed
    reader = tool_reader(tokenizer, "[assistant]", TOOLS)
    assert reader is not None
    (read,) = reader.read(call, final=True).calls
    assert (read.name, json.loads(read.arguments)) == CLOCK


def test_special_tokens_stand_for_themselves(tmp_path: Path) -> None:
    """No text matches a special token, however it is spelled."""
    field = {"open": "<begin>", "close": "</call>", "transform": {"type": "function", "function": "{content}"}}
    tokenizer = model(tmp_path, field)
    (begin,) = tokenizer.encode("<begin>", add_special_tokens=False)
    assert tokenizer.is_special(begin)
    for is_needed in (True, False):
        assert f"<[{begin}]>" in grammar(tokenizer, is_needed=is_needed)


def test_calls_that_are_no_json_cannot_be_held_to_a_form(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"calls of 'clock' are not written in a form"):
        grammar(model(tmp_path, THINKING["fields"]["tool_calls"]))
