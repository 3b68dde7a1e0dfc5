"""What `args` of `cluster/config.yaml` may say, checked before anything is started."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from lora_core.config import EngineSettings, LoRAConfig, Settings
from lora_core.errors import ConfigError

DEMO_MODEL = "demo"
"""`model: demo` is SmolLM2-135M-Instruct from a Python package (`cluster.demo.base_model`)."""


class ReplicaSettings(Settings):
    """The `replica` section: how long a replica waits for its engine process."""

    start_timeout_s: float = Field(default=300, gt=0, description="Longest start of an engine process.")
    stall_timeout_s: float = Field(
        default=60, gt=0, description="An engine process silent for longer than this is replaced."
    )


class RouterSettings(Settings):
    """The `router` section: the router actor's patience and memory."""

    journal: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "SQLite file that remembers the adapters loaded at run time. Unset: a file in Ray's session folder, which "
            "lasts as long as the Ray cluster. `:memory:`: no file, they are forgotten when the router actor dies. "
            "A path: kept across clusters; put it on storage that every node sees if the actor may move."
        ),
    )
    lease_s: float = Field(default=5, gt=0, description="A replica silent for longer than this no longer counts.")
    change_timeout_s: float = Field(
        default=300, gt=0, description="Longest load or unload, a download included, until all replicas have done it."
    )


class AppSettings(Settings):
    """Everything under `args` of the application."""

    model: str = Field(
        default=DEMO_MODEL, description="Base model: `demo`, a local folder, or a Hugging Face id (`org/name[@rev]`)."
    )
    model_name: str | None = Field(
        default=None, min_length=1, description="Name clients use for the base model; unset: the last part of `model`."
    )
    engine: EngineSettings = EngineSettings()
    lora_config: LoRAConfig = LoRAConfig()
    replica: ReplicaSettings = ReplicaSettings()
    router: RouterSettings = RouterSettings()

    @property
    def base_name(self) -> str:
        """The base model's public name."""
        if self.model_name is not None:
            return self.model_name
        if self.model == DEMO_MODEL:
            return "SmolLM2-135M-Instruct"
        return self.model.rstrip("/").rsplit("/", 1)[-1].partition("@")[0]


def parse_settings(args: dict[str, Any]) -> AppSettings:
    """Check `args`, reporting every fault at once.

    Raises:
        ConfigError: one line per fault, each with the path of its key.
    """
    try:
        return AppSettings.model_validate(args)
    except ValidationError as error:
        raise ConfigError("args: " + "; ".join(_fault(item) for item in error.errors())) from None


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Say that a key is unknown, with the nearest known one, or all of them where none is near."""
    known = list(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def _fault(item: ErrorDetails) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{where}: {unknown_key(str(item['loc'][-1]), _keys_beside(item['loc']))}"
    found = item["input"]
    shown = f" (found {found!r})" if isinstance(found, str | int | float | bool) else ""
    return f"{where}: {item['msg'].removeprefix('Value error, ')}{shown}"


def _keys_beside(loc: tuple[int | str, ...]) -> Iterable[str]:
    section: type[BaseModel] = AppSettings
    for part in loc[:-1]:
        inner = section.model_fields[str(part)].annotation
        assert isinstance(inner, type), "sections are plain classes"
        assert issubclass(inner, BaseModel), "only a section can hold an unknown key"
        section = inner
    return section.model_fields
