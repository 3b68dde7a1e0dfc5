"""Tool calls in answers, read as the model's own template writes them."""

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from transformers.utils.chat_parsing import ResponseParser

from deployments.generation import ToolCall
from deployments.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

CONTENT, TOOL_CALLS, THINKING = "content", "tool_calls", "thinking"
"""Names that response templates have for the parts of an answer."""

TAGGED_JSON = '{"name": <function-name>, "arguments": <args-json-object>}'
"""What the chat templates of Hermes, Qwen and their likes tell the model to write between `<tool_call>` tags."""

TAGGED_JSON_RESPONSES: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant",
    "fields": {
        CONTENT: {},
        TOOL_CALLS: {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
"""A response template for models whose author gives none, where the chat template shows that they answer like this."""

UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)
"""What the reading of a model's answer may fail with: it may write anything, as a thousand brackets, one in another."""


class Spoken(NamedTuple):
    """What a piece of an answer's text comes to."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolReader:
    """Reads one answer of a model that was given tools.

    Its text is let through up to where something other than text begins; what comes from there on is read when the
    answer is complete. A call that cannot be read, as one cut short, is text.

    Args:
        new_parser: Makes a parser at the answer's beginning.
    """

    def __init__(self, new_parser: Callable[[], ResponseParser]) -> None:
        self._new_parser = new_parser
        self._parser: ResponseParser | None = new_parser()
        self._raw = ""
        self._num_shown = 0
        self._watch(self._parser.initial_events)

    def read(self, text: str, *, final: bool) -> Spoken:
        """Take more of the answer's text; `final` ends it."""
        self._raw += text
        shown = self._stream(text)
        if not final:
            return Spoken(shown)
        rest = self._finish()
        return rest._replace(text=shown + rest.text)

    def _stream(self, text: str) -> str:
        """What may be shown of more text now."""
        if self._parser is None:
            return ""
        try:
            shown = self._watch(self._parser.feed(text))
        except UNREADABLE:
            # The end says what to do about it.
            self._parser = None
            return ""
        self._num_shown += len(shown)
        return shown

    def _watch(self, events: Iterable[dict[str, Any]]) -> str:
        """The text of events; the first other part ends the showing."""
        shown = ""
        for event in events:
            if event["field"] != CONTENT:
                self._parser = None
                break
            shown += event.get("text", "")
        return shown

    def _finish(self) -> Spoken:
        """What has not been shown of the whole answer."""
        try:
            parser = self._new_parser()
            events = [*parser.feed(self._raw), *parser.finalize()[1]]
            calls = [call for event in events if _closes(event, TOOL_CALLS) for call in _calls(event["value"])]
        except UNREADABLE as error:
            logger.info("an answer's tool calls cannot be read, and are text: %s", str(error).partition("\n")[0])
            return Spoken(self._raw[self._num_shown :])
        text, reasoning = _text(events, CONTENT), _text(events, THINKING)
        return Spoken(text[self._num_shown :], reasoning, tuple(calls))


def tool_reader(tokenizer: ModelTokenizer, rendered: str, tools: Sequence[dict[str, Any]]) -> ToolReader | None:
    """A reader of one answer; None where nothing says how the model writes its calls, which then are text.

    Args:
        tokenizer: The base model's.
        rendered: The chat as the model was given it: some templates begin the answer themselves.
        tools: What the model was told it may call.
    """
    template = answer_template(tokenizer)
    if template is None:
        return None
    prefix = "" if template is TAGGED_JSON_RESPONSES else rendered
    return ToolReader(lambda: ResponseParser(template, prefix=prefix, tools=list(tools)))


def answer_template(tokenizer: ModelTokenizer) -> dict[str, Any] | None:
    """How answers to chats with tools are to be read; None where nothing says so."""
    if tokenizer.response_template is not None:
        return tokenizer.response_template
    is_tagged = TAGGED_JSON in tokenizer.chat_template and "<tool_call>" in tokenizer.chat_template
    return TAGGED_JSON_RESPONSES if is_tagged else None


def _closes(event: dict[str, Any], field: str) -> bool:
    return bool(event["type"] == "region_close" and event["field"] == field)


def _text(events: Iterable[dict[str, Any]], field: str) -> str:
    return "".join(event.get("text", "") for event in events if event["field"] == field)


def _calls(value: Any) -> list[ToolCall]:
    """The calls of one part of an answer. Raises one of `UNREADABLE` for what is none."""
    calls = []
    for item in value if isinstance(value, list) else [value]:
        function = item["function"]
        name, arguments = function["name"], function.get("arguments") or {}
        if not isinstance(name, str):
            raise TypeError(f"a call's name is {name!r}")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # Escaped in JSON, half of a surrogate pair can be written; in an answer it cannot.
        f"{name}{text}".encode()
        calls.append(ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, text))
    return calls
