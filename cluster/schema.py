"""What `args` of `cluster/config.yaml` may say, checked before anything is started."""

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from cluster.access import AccessSettings
from cluster.progress import Deadlines
from lora_core.config import EngineSettings, LoRAConfig, Settings
from lora_core.errors import ConfigError
from lora_core.sources import AdapterSources

DEMO_MODEL = "demo"
"""`model: demo` is SmolLM2-135M-Instruct from a Python package (`cluster.demo.base_model`)."""


class ReplicaSettings(Settings):
    """The `replica` section: a replica's patience, and how it streams."""

    start_timeout_s: float = Field(default=300, gt=0, description="Longest start of an engine process.")
    stall_timeout_s: float = Field(
        default=60, gt=0, description="An engine process silent for longer than this is replaced."
    )
    drain_timeout_s: float = Field(
        default=120, gt=0, description="How long a replica that is to go may take to end the requests it has."
    )
    warm_timeout_s: float = Field(
        default=10,
        ge=0,
        description=(
            "Most time that a starting replica spends on bringing the adapters that requests will come for into slots "
            "before it takes any; 0: none."
        ),
    )
    stream_window_s: float = Field(
        default=0.075,
        ge=0,
        le=1,
        description=(
            "Most time that tokens of a stream after the first one wait to be sent together; 0 sends each by itself. "
            "A replica with few streams waits less, and no token waits that ends an answer."
        ),
    )


class QueueSettings(Settings):
    """The `queue` section: how many requests wait for their first token, and how long, in each process of the ingress.

    Beyond it they are refused with 429 or 503 and a `Retry-After`.
    """

    max_waiting: int = Field(default=2048, ge=1, description="Most requests that wait, of all models together.")
    max_waiting_per_adapter: int = Field(default=256, ge=1, description="Most of them that wait for one adapter.")
    cold_wait_s: float = Field(
        default=120, gt=0, description="Longest wait for an adapter that is in a slot of no replica."
    )
    replica_wait_s: float = Field(default=60, gt=0, description="Longest wait for a replica while there is none.")


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
    plan_period_s: float = Field(
        default=2, gt=0, description="How often it is planned anew which adapters should have slots on which replicas."
    )


class WatchdogSettings(Settings):
    """The `watchdog` section: how long the oldest request may make no progress before something is done about it."""

    adapter_deadline_s: float = Field(
        default=60,
        gt=0,
        description=(
            "Of an adapter that runs on a replica; then its requests there are ended, and it is loaded there anew."
        ),
    )
    waiting_deadline_s: float = Field(
        default=300, gt=0, description="The same where its oldest request waits for a seat, a slot or files."
    )
    replica_deadline_s: float = Field(
        default=120, gt=0, description="Of all adapters of a replica, and of the base model; then it is replaced."
    )

    @property
    def deadlines(self) -> Deadlines:
        """The same for the judge of progress."""
        return Deadlines(
            adapter_s=self.adapter_deadline_s, waiting_s=self.waiting_deadline_s, replica_s=self.replica_deadline_s
        )


class TracingSettings(Settings):
    """The `tracing` section: traces of requests, from the ingress to the engine's steps, by OpenTelemetry."""

    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^/?#]+",
        description=(
            "Base address of a collector that takes OTLP over HTTP, such as `http://127.0.0.1:4318`; `/v1/traces` is "
            "put behind it. Unset: nothing is traced, and nothing is spent on it."
        ),
    )
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced; one that comes with a `traceparent` is as its sender says.",
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
    queue: QueueSettings = QueueSettings()
    router: RouterSettings = RouterSettings()
    watchdog: WatchdogSettings = WatchdogSettings()
    access: AccessSettings = AccessSettings()
    tracing: TracingSettings = TracingSettings()

    @model_validator(mode="after")
    def _files_come_before_deadlines(self) -> "AppSettings":
        read_s = self.lora_config.read_timeout_s
        for name in ("waiting_deadline_s", "replica_deadline_s"):
            if (deadline_s := getattr(self.watchdog, name)) <= read_s:
                raise ValueError(
                    f"watchdog.{name} is {deadline_s:g} and lora_config.read_timeout_s {read_s:g}: requests that wait "
                    "for an adapter's files would be taken for stalled; the deadline must be the longer one"
                )
        return self

    @model_validator(mode="after")
    def _tenants_stay_within_sources(self) -> "AppSettings":
        allowed = self.lora_config.sources
        for name, tenant in self.access.tenants.items():
            if tenant.sources and allowed is None:
                raise ValueError(
                    f"access.tenants.{name}.sources needs lora_config.sources, within which replicas open folders; "
                    "list there all places that adapters may come from"
                )
            within = AdapterSources(allowed or (), "lora_config.sources")
            outside = [source for source in tenant.sources if not within.includes(source)]
            if outside:
                raise ValueError(
                    f"access.tenants.{name}.sources has {outside[0]!r}, which is not within lora_config.sources; "
                    "add it there, or remove it here"
                )
        return self

    @property
    def base_name(self) -> str:
        """The base model's public name."""
        if self.model_name is not None:
            return self.model_name
        if self.model == DEMO_MODEL:
            return "SmolLM2-135M-Instruct"
        return self.model.rstrip("/").rsplit("/", 1)[-1].partition("@")[0]


class SettingsFault(NamedTuple):
    """One fault of `args`."""

    where: tuple[int | str, ...]
    """Keys and indices that lead to it; empty where it concerns several sections."""
    sentence: str


def parse_settings(args: dict[str, Any]) -> AppSettings:
    """Check `args`, reporting every fault at once.

    Raises:
        ConfigError: one sentence per fault, each with the path of its key.
    """
    settings, faults = check_settings(args)
    if settings is None:
        shown = [".".join(map(str, where)) + ": " + sentence if where else sentence for where, sentence in faults]
        raise ConfigError("args: " + "; ".join(shown))
    return settings


def check_settings(args: Any) -> tuple[AppSettings | None, list[SettingsFault]]:
    """The settings, or all that is wrong with them."""
    try:
        return AppSettings.model_validate(args), []
    except ValidationError as error:
        return None, [SettingsFault(item["loc"], _sentence(item)) for item in error.errors()]


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Say that a key is unknown, with the nearest known one, or all of them where none is near."""
    known = list(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def _sentence(item: ErrorDetails) -> str:
    if item["type"] == "extra_forbidden":
        return unknown_key(str(item["loc"][-1]), _keys_beside(item["loc"]))
    found = item["input"]
    shown = f" (found {found!r})" if isinstance(found, str | int | float | bool) else ""
    return item["msg"].removeprefix("Value error, ") + shown


def _keys_beside(loc: tuple[int | str, ...]) -> Iterable[str]:
    section: Any = AppSettings
    for part in loc[:-1]:
        if get_origin(section) is dict:
            section = get_args(section)[1]
            continue
        section = section.model_fields[str(part)].annotation
    assert issubclass(section, BaseModel), "only a section can hold an unknown key"
    return list(section.model_fields)
