"""Which names adapters and their aliases may have."""

from collections.abc import Iterable
from typing import NamedTuple

from lora_core.errors import AdapterError, AdapterNameTaken, ConfigError, InvalidAdapter

MAX_NAME_LENGTH = 256

SHOWN_NAMES = 20
"""Names that a message lists; the rest are counted."""

STAGED = "\x1freplacement"
"""Ends the name of what is to replace an adapter, while replicas load and check it. No adapter of a user's can have it:
only what can be printed is allowed."""


class VersionedName(NamedTuple):
    """A name, and the version it carries."""

    name: str
    version: str | None


def split_version(name: str) -> VersionedName:
    """Take `name@version` apart at its last "@"; the version is None where there is none.

    A version is part of the adapter's name, and chosen by whoever loads it: `tuned@1` and `tuned@2` are two adapters.
    """
    base, at, version = name.rpartition("@")
    return VersionedName(base, version) if at else VersionedName(name, None)


def staged_name(name: str) -> str:
    """What replicas call the content that is about to replace an adapter."""
    return name + STAGED


def served_name(name: str) -> str:
    """The adapter that a name is about: its own, or the one that what is staged is to replace."""
    return name.removesuffix(STAGED)


def check_name(name: str, base_name: str, what: str = "adapter") -> None:
    """Check that an adapter, or `what` else is meant, can have this name.

    Raises:
        InvalidAdapter: the name is empty, too long, ends in a "@" or begins with its only one, or has characters that
            cannot be printed or a `=`.
        AdapterNameTaken: it is the base model's.
    """
    if not name.strip():
        raise InvalidAdapter(f"the {what}'s name is empty; give it one")
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidAdapter(f"the {what}'s name has {len(name)} characters; at most {MAX_NAME_LENGTH} are allowed")
    if not name.isprintable():
        raise InvalidAdapter(f"the {what}'s name {name!r} has characters that cannot be printed; use another name")
    if "=" in name:
        raise InvalidAdapter(f"the {what}'s name {name!r} has a '=', which separates name and path; use another name")
    unversioned, version = split_version(name)
    if version is not None and not (version.strip() and unversioned.strip()):
        raise InvalidAdapter(f"the {what}'s name {name!r} lacks a part; expected `name@version`, or no '@'")
    if name == base_name:
        raise AdapterNameTaken(f"{name!r} is the base model's name; use another name for the {what}")


def is_name(name: str) -> bool:
    """Whether an adapter can have this name, where the base model has another."""
    try:
        check_name(name, base_name="")
    except AdapterError:
        return False
    return True


def listed(names: Iterable[str]) -> str:
    """Names in a message, in order; "none" where there are none, and the first ones where there are many."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:SHOWN_NAMES]) or "none"
    return shown if len(ordered) <= SHOWN_NAMES else f"{shown} and {len(ordered) - SHOWN_NAMES} more"


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say of an unknown adapter: the versions known of its name, or else the names that are known."""
    known = list(known)
    wanted = split_version(name).name
    versions = [version for base, version in map(split_version, known) if base == wanted and version is not None]
    return f"versions of {wanted!r}: {listed(versions)}" if versions else f"loaded: {listed(known)}"


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
