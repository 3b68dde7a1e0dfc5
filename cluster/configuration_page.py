"""`docs/configuration.md`, written from the schema: `python -m cluster.configuration_page` prints it."""

import types
import typing
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.schema import AppSettings

HEAD = """# Configuration

What `args` of an application may hold (`cluster/config.yaml` is an example). Unknown keys are refused with the nearest
known one. The rest of the file is Ray Serve's: `http_options`, `deployments`, `autoscaling_config` and so on.

This page is written from the schema: `make configuration-page`.
"""

BOUNDS = {"Ge": "at least", "Gt": "more than", "Le": "at most", "Lt": "less than", "MinLen": "length at least"}


def page() -> str:
    """The page, in Markdown."""
    return "\n".join([HEAD, *_section("", AppSettings)]).rstrip() + "\n"


def _section(path: str, section: type[BaseModel]) -> Iterator[str]:
    """A table of a section's plain fields, then its inner sections."""
    plain = {name: field for name, field in section.model_fields.items() if _inner(field) is None}
    yield f"## `{path or 'args'}`\n"
    words = (section.__doc__ or "").strip().partition("\n\n")[0]
    yield f"{' '.join(words.split())}\n"
    if plain:
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for name, field in plain.items():
            cells = (f"`{name}`", _type(field), _default(field), _cell(field.description or ""))
            yield f"| {' | '.join(cells)} |"
        yield ""
    for name, field in section.model_fields.items():
        inner = _inner(field)
        if inner is not None:
            yield from _section(f"{path}.{name}".lstrip("."), inner)


def _inner(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field is, if it is one."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{words} {getattr(bound, name.lower() if name != 'MinLen' else 'min_length')}"
        for bound in field.metadata
        if (words := BOUNDS.get(name := type(bound).__name__)) is not None
    ]
    return _cell(", ".join([_name(field.annotation), *bounds]))


def _name(annotation: object) -> str:
    """A type in words a YAML file's author knows."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("nothing" if one is type(None) else _name(one) for one in arguments)
    if origin in (tuple, list, frozenset, set):
        return f"list of {_name(arguments[0])}"
    if origin is dict:
        return f"map of {_name(arguments[0])} to {_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        keys = ", ".join(f"`{name}`" for name in annotation.model_fields)
        return f"map with {keys}"
    plain = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return plain.get(annotation, getattr(annotation, "__name__", str(annotation))) if annotation else "anything"  # type: ignore[call-overload]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), [], {}):
        return "unset" if value is None else "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
