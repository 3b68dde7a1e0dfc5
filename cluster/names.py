"""Which names adapters may have."""

from collections.abc import Iterable

from lora_core.errors import AdapterError, AdapterNameTaken, ConfigError, InvalidAdapter

MAX_NAME_LENGTH = 256

STAGED = "\x1freplacement"
"""Ends the name of what is to replace an adapter, while replicas load and check it. No adapter of a user's can have it:
only what can be printed is allowed."""


def staged_name(name: str) -> str:
    """What replicas call the content that is about to replace an adapter."""
    return name + STAGED


def served_name(name: str) -> str:
    """The adapter that a name is about: its own, or the one that what is staged is to replace."""
    return name.removesuffix(STAGED)


def check_name(name: str, base_name: str) -> None:
    """Check that an adapter can have this name.

    Raises:
        InvalidAdapter: the name is empty, too long, or has characters that cannot be printed or a `=`.
        AdapterNameTaken: it is the base model's.
    """
    if not name.strip():
        raise InvalidAdapter("the adapter's name is empty; give it one")
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidAdapter(f"the adapter's name has {len(name)} characters; at most {MAX_NAME_LENGTH} are allowed")
    if not name.isprintable():
        raise InvalidAdapter(f"the adapter's name {name!r} has characters that cannot be printed; use another name")
    if "=" in name:
        raise InvalidAdapter(f"the adapter's name {name!r} has a '=', which separates name and path; use another name")
    if name == base_name:
        raise AdapterNameTaken(f"{name!r} is the base model's name; use another name for the adapter")


def static_adapters(lora_paths: Iterable[str], base_name: str) -> dict[str, str]:
    """Read `lora_paths`, each item `name=path` or a path that is also the name, into name -> path.

    Raises:
        ConfigError: a name cannot be used, or is given to two paths.
    """
    adapters: dict[str, str] = {}
    for item in lora_paths:
        name, equals, path = item.partition("=")
        path = path if equals else name
        try:
            check_name(name, base_name)
        except AdapterError as error:
            raise ConfigError(f"lora_paths: {item!r}: {error}") from None
        if not path.strip():
            raise ConfigError(f"lora_paths: {item!r} has no path; write `name=path`")
        if adapters.setdefault(name, path) != path:
            raise ConfigError(f"lora_paths: the name {name!r} is given to both {adapters[name]!r} and {path!r}")
    return adapters
