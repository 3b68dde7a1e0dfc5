"""The fields of a chat that are about tools: functions the model may call, and the calls it has made."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from deployments.body import Body, JsonObject, NonEmpty, is_too_deep

MAX_TOOLS = 128
"""OpenAI's bound."""

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    """JSON schema of its arguments; the model is told of it."""
    strict: bool | None = None
    """Whether the model is held to the schema, too. Where a call is asked for (`tool_choice`), it always is."""


class Tool(Body):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition

    def rendered(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


class CalledFunction(Body):
    """What a call names."""

    name: NonEmpty
    arguments: str
    """JSON, as the model wrote it."""


class MadeCall(Body):
    """One entry of an assistant message's `tool_calls`."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """As chat templates expect it: arguments as an object, where they are one that a template can write."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        if is_too_deep(arguments):
            arguments = self.function.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(Body):
    """Which function is meant."""

    name: FunctionName


class NamedTool(Body):
    """A `tool_choice` that asks for a call of one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool
