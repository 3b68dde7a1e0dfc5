"""The field `messages` of a chat: its turns."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from deployments.body import Body
from deployments.tool_fields import MadeCall

MAX_ENTRIES = 8192
"""Messages of one chat, together with the parts and tool calls in them: each takes a moment to check and to render,
however little it says."""


class TextPart(Body):
    """One piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[MadeCall], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    """What an assistant thought, as this server and others tell it; some chat templates show it to the model."""

    @model_validator(mode="after")
    def _only_assistants_may_be_silent(self) -> "ChatMessage":
        if not self.content and self.content != "" and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are an assistant's, and the message is of role {self.role!r}")
        return self

    def rendered(self) -> dict[str, Any]:
        """The message as chat templates expect it: text joined, `developer` under its older name, `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.rendered() for call in self.tool_calls]
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id} if self.tool_call_id else {}
            message |= {"name": self.name} if self.name else {}
        return message


def _few(messages: Any) -> Any:
    """Refuse too many before any of them is looked at."""
    if isinstance(messages, list):
        count = sum(1 + _length(message, "content") + _length(message, "tool_calls") for message in messages)
        if count > MAX_ENTRIES:
            raise ValueError(
                f"it has {count} entries, parts and tool calls of messages included; one request may have up to "
                f"{MAX_ENTRIES}"
            )
    return messages


def _length(message: Any, key: str) -> int:
    value = message.get(key) if isinstance(message, dict) else None
    return len(value) if isinstance(value, list) else 0


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True), BeforeValidator(_few)]
