"""Which modules an adapter's configuration means: patterns and lists from users, by PEFT's rules, at a bounded cost."""

import re
import reprlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import regex  # type: ignore[import-untyped]

from lora_core.errors import InvalidAdapter
from lora_core.types import ADAPTER_CONFIG_FILE

V = TypeVar("V")

_MAX_PATTERNS = 1000
_MAX_PATTERN_CHARS = 1000
_MAX_REPEATS = 1000
_MAX_UNROLLED_CHARS = 200_000
_COUNTED_REPEAT = re.compile(r"\{(?P<least>[0-9]*)(?:,(?P<most>[0-9]*))?\}")


class PatternTable(Generic[V]):
    """Values by PEFT's suffix-regex rule: the first pattern p, in order, for which `(.*\\.)?(p)$` matches the name.

    Patterns come from users. Their size is bounded before they are compiled. They are matched by an engine that can be
    stopped, with the interpreter lock released, and all matching through one table shares a budget of a few seconds.
    """

    def __init__(self, setting: str, values: Mapping[str, V], *, whole: bool = False, budget_s: float = 2.0) -> None:
        """Compile the patterns.

        Args:
            setting: Names them in errors.
            values: Value by pattern.
            whole: A pattern must match the whole name instead of its last parts.
            budget_s: Seconds that all matching may take.

        Raises:
            InvalidAdapter: a pattern is not a regular expression, or they are too many, too long, or repeat too much.
        """
        _check_size(setting, values)
        self._setting = setting
        self._whole = whole
        self._entries = [(pattern, self._compile(pattern), value) for pattern, value in values.items()]
        self._budget_s = budget_s

    def find(self, names: Iterable[str], default: V) -> V:
        """Value of the first pattern that matches, trying all patterns on each name in turn.

        Raises:
            InvalidAdapter: the matching budget is spent.
        """
        for name in names:
            for pattern, compiled, value in self._entries:
                if self._matches(pattern, compiled, name):
                    return value
        return default

    def _compile(self, pattern: str) -> Any:
        expression = pattern if self._whole else rf"(.*\.)?({pattern})$"
        try:
            # PEFT matches with `re`: what `re` refuses, PEFT cannot load either.
            re.compile(expression)
            # Cached, hundreds of large patterns would outlive their adapters.
            return regex.compile(expression, cache_pattern=False)
        except (re.error, regex.error, OverflowError, RecursionError) as error:
            raise invalid_config(
                f"{self._setting} has {shown(pattern)}, which is not a regular expression: {error}"
            ) from error

    def _matches(self, pattern: str, compiled: Any, name: str) -> bool:
        match = compiled.fullmatch if self._whole else compiled.match
        started = time.monotonic()
        try:
            # A budget of exactly zero would mean no limit.
            return match(name, timeout=max(self._budget_s, 1e-6), concurrent=True) is not None
        except TimeoutError:
            raise invalid_config(
                f"{self._setting} takes seconds to match, at {shown(pattern)}; expected plain names or simple patterns"
            ) from None
        finally:
            self._budget_s -= time.monotonic() - started


def _check_size(setting: str, patterns: Iterable[str]) -> None:
    """Refuse what the engine would need too much memory for: it writes counted repeats out when it compiles."""
    unrolled = 0
    for count, pattern in enumerate(patterns, start=1):
        if count > _MAX_PATTERNS:
            raise invalid_config(f"{setting} has more than {_MAX_PATTERNS} patterns, expected at most that many")
        if len(pattern) > _MAX_PATTERN_CHARS:
            raise invalid_config(
                f"{setting} has {shown(pattern)}, a pattern of {len(pattern)} characters; "
                f"expected at most {_MAX_PATTERN_CHARS}"
            )
        unrolled += len(pattern) * _repeats(setting, pattern)
    if unrolled > _MAX_UNROLLED_CHARS:
        raise invalid_config(
            f"{setting} has patterns of {unrolled} characters with their counted repeats written out; "
            f"expected at most {_MAX_UNROLLED_CHARS}"
        )


def _repeats(setting: str, pattern: str) -> int:
    """Product of all counted repeats of a pattern, nested or not: the most that any part of it is repeated."""
    product = 1
    start = pattern.find("{")
    while start >= 0:
        counted = _COUNTED_REPEAT.match(pattern, start)
        if counted is None:
            # Engines disagree on such a brace (a character, a fuzzy match), and no module's name has one.
            raise invalid_config(
                f"{setting} has {shown(pattern)}, with a brace that is no counted repeat such as {{1,3}}"
            )
        # At most `_MAX_PATTERN_CHARS` digits, which `int` takes.
        product *= max(1, int(counted["least"] or 0), int(counted["most"] or 0))
        if product > _MAX_REPEATS:
            raise invalid_config(
                f"{setting} has {shown(pattern)}, whose counted repeats multiply to more than {_MAX_REPEATS}; "
                f"expected at most that, or * and +"
            )
        start = pattern.find("{", start + 1)
    return product


class ModuleRule:
    """A value of `target_modules` or `exclude_modules`, by PEFT's rule for which modules it means.

    A list means modules with one of its names, whole or after a dot; a string is a regex of whole names; and
    "all-linear" means every linear layer but the output head: all that a decoder layer has, and no embedding.
    """

    def __init__(self, setting: str, value: Sequence[str] | str) -> None:
        """Compile the rule; `setting` names it in errors.

        Raises:
            InvalidAdapter: the value is a string that is not a regular expression, or too large a one.
        """
        self.setting = setting
        self.value = value
        self._means_all = setting == "target_modules" and isinstance(value, str) and value.lower() == "all-linear"
        self._names = frozenset(() if isinstance(value, str) else value)
        patterns = {value: True} if isinstance(value, str) and not self._means_all else {}
        self._pattern = PatternTable(setting, patterns, whole=True)

    def matches(self, names: Iterable[str], *, in_decoder_layer: bool = True) -> bool:
        """Whether the rule means the module that goes by any of these names.

        Args:
            names: What the module may be called.
            in_decoder_layer: It is a linear layer of a decoder layer, not the embedding or the output head.

        Raises:
            InvalidAdapter: matching takes seconds.
        """
        names = tuple(names)
        if self._means_all:
            return in_decoder_layer
        if any(part in self._names for name in names for part in _endings(name)):
            return True
        return self._pattern.find(names, False)

    def lists(self, names: Iterable[str]) -> bool:
        """Whether the rule is a list that has one of these names in full."""
        return not self._names.isdisjoint(names)

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else list(self.value)
        return f"{self.setting} is {shown(value)}"


def _endings(name: str) -> Iterable[str]:
    """The name, and what follows each of its dots."""
    while name:
        yield name
        name = name.partition(".")[2]


def invalid_config(what: str) -> InvalidAdapter:
    """The refusal of an adapter for what its configuration says."""
    return InvalidAdapter(f"{ADAPTER_CONFIG_FILE}: {what}")


def shown(value: Any) -> str:
    """A configuration's value, shortened for a message."""
    return reprlib.repr(value)
