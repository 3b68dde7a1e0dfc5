"""`portable`: structs that processes of different versions of this project may tell one another."""

from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


def portable(kind: type[S]) -> type[S]:
    """Have a struct pickled by the names of its fields: while newer code replaces a deployment's, both are there.

    A field that the reader's class does not have is left out, and one that the writer's did not have has its default.
    So a field that is added needs a default, which stands for what was so before.
    """
    kind.__reduce__ = _reduced  # type: ignore[method-assign,assignment]
    return kind


def _reduced(struct: msgspec.Struct) -> tuple[Any, ...]:
    return _restored, (type(struct), {name: getattr(struct, name) for name in struct.__struct_fields__})


def _restored(kind: type[S], fields: dict[str, Any]) -> S:
    if not fields.keys() <= set(kind.__struct_fields__):
        fields = {name: fields[name] for name in kind.__struct_fields__ if name in fields}
    return kind(**fields)
