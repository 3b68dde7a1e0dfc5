"""API keys and whom they belong to. A key is remembered by its SHA-256 hash alone."""

import hashlib
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from cluster.callers import FLEET_OPERATOR, Caller
from lora_core.errors import ConfigError

OPERATOR = "operator"
"""Whose key opens everything; after a tenant's name and a colon, everything of that tenant."""

MIN_KEY_LENGTH = 16
"""Shorter keys could be found by trying."""

_KEY = re.compile(r"[!-+\--~]+")
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")


class KeyText(NamedTuple):
    """Where keys were found, and what stood there: `who=key` in each line, or with commas between."""

    place: str
    text: str


class KeyRing:
    """The keys that open the server."""

    def __init__(self, callers: dict[bytes, Caller]) -> None:
        self._callers = callers

    @property
    def is_empty(self) -> bool:
        """Whether there are none at all."""
        return not self._callers

    def caller(self, key: str) -> Caller | None:
        """Whose key this is; None where it is nobody's."""
        # What is looked up is a hash, of which the time it takes tells nothing about the keys.
        return self._callers.get(_digest(key))


def read_keys(texts: Iterable[KeyText], tenants: Collection[str]) -> KeyRing:
    """Read keys.

    Args:
        texts: What was found.
        tenants: Names of the configured tenants.

    Raises:
        ConfigError: all faults, each with its place and line, and none with a key.
    """
    callers: dict[bytes, Caller] = {}
    faults: list[str] = []
    for place, text in texts:
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip().startswith("#"):
                continue
            for item in filter(None, map(str.strip, line.split(","))):
                try:
                    digest, caller = _read(item, tenants)
                    if callers.setdefault(digest, caller) != caller:
                        raise ConfigError("this key is another one's, too; give each its own")
                except ConfigError as error:
                    faults.append(f"{place}, line {number}: {error}")
    if faults:
        raise ConfigError("; ".join(faults))
    return KeyRing(callers)


def _read(item: str, tenants: Collection[str]) -> tuple[bytes, Caller]:
    who, equals, key = (part.strip() for part in item.partition("="))
    if not equals:
        raise ConfigError("no '=' is there; expected who=key")
    caller = _caller(who, tenants)
    if (hashed := _HASHED.fullmatch(key)) is not None:
        return bytes.fromhex(hashed[1]), caller
    if _KEY.fullmatch(key) is None:
        raise ConfigError(f"the key of {who!r} is empty, or has other than visible ASCII characters without commas")
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(f"the key of {who!r} has {len(key)} characters; expected at least {MIN_KEY_LENGTH}")
    return _digest(key), caller


def _caller(who: str, tenants: Collection[str]) -> Caller:
    if who == OPERATOR:
        return FLEET_OPERATOR
    tenant, _, role = who.partition(":")
    if tenant not in tenants:
        known = ", ".join(sorted(tenants)) or "none"
        raise ConfigError(f"{who!r} is no tenant; access.tenants has: {known}")
    if role not in ("", OPERATOR) or (":" in who and not role):
        raise ConfigError(f"{who!r} is nobody; expected {OPERATOR!r}, a tenant, or a tenant and ':{OPERATOR}'")
    return Caller(tenant, is_operator=role == OPERATOR)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
