"""`Catalogue`: the names that a run asks for, the most popular first."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from openai import OpenAI

from lora_core.errors import ConfigError


class Catalogue(NamedTuple):
    """Adapters, and the base model where it is known.

    Attributes:
        adapters: Their names, the most popular first.
        base: None where nothing says which model it is.
    """

    adapters: tuple[str, ...]
    base: str | None

    def popularity(self, zipf: float) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """How large a share of the requests for adapters each one gets."""
        weights = np.arange(1, len(self.adapters) + 1, dtype=np.float64) ** -zipf
        shares: np.ndarray[Any, np.dtype[np.float64]] = weights / weights.sum()
        return shares


def served_catalogue(client: OpenAI) -> Catalogue:
    """What a server lists at /v1/models, in its order.

    Adapters are the models that have a `parent`, as vLLM and this project tell it. Where none has one, all models are
    asked alike.

    Raises:
        ConfigError: it lists none.
        openai.APIError: it refuses, or is not there.
    """
    models = list(client.models.list())
    adapters = [model.id for model in models if _parent(model) is not None]
    if adapters:
        others = [model.id for model in models if _parent(model) is None]
        return Catalogue(tuple(adapters), others[0] if others else None)
    if not models:
        raise ConfigError("the server lists no models at /v1/models; name them with --models")
    return Catalogue(tuple(model.id for model in models), None)


def read_catalogue(path: Path, base: str | None) -> Catalogue:
    """Names from a file, one a line, the most popular first; empty lines and those that begin with # are skipped.

    Raises:
        ConfigError: it cannot be read, holds no name, or one twice.
    """
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return Catalogue(_distinct(path, [line for line in lines if line and not line.startswith("#")]), base)


def _distinct(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        raise ConfigError(f"{path} holds no name; expected one a line")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path} holds {twice!r} twice; expected each name once")
    return tuple(names)


def _parent(model: Any) -> str | None:
    """The base of an adapter's card: a field that OpenAI's own type does not have."""
    return getattr(model, "parent", None)
