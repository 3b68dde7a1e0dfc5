"""`Finding`: one thing that was looked at."""

from enum import Enum

import msgspec


class Verdict(str, Enum):
    """How a thing stands."""

    OK = "ok"
    WARNING = "warning"
    """It works, and could be better, or fails under load."""
    FAULT = "fault"
    """The configuration cannot be served so."""


class Finding(msgspec.Struct, frozen=True):
    """What was looked at, what was found, and, where that is not well, what to do."""

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


def ok(subject: str, found: str) -> Finding:
    """All is well."""
    return Finding(subject, Verdict.OK, found)


def warning(subject: str, found: str, remedy: str) -> Finding:
    """It could be better."""
    return Finding(subject, Verdict.WARNING, found, remedy)


def fault(subject: str, found: str, remedy: str) -> Finding:
    """It cannot work."""
    return Finding(subject, Verdict.FAULT, found, remedy)
