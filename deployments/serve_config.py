"""The configuration file of `serve run`, read as strictly as it should be.

Ray Serve ignores keys it does not know (`num_replica: 3` deploys one replica), and reports wrong `args` only after it
has started; here both are refused first.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from cluster.schema import AppSettings, check_settings, unknown_key
from cluster.yaml_lines import YamlLines
from deployments.key_store import KeyStore
from lora_core.errors import ConfigError

Where = tuple[int | str, ...]

ARGS: Where = ("applications", 0, "args")

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that other machines cannot reach."""


class ServeConfig(NamedTuple):
    """A checked configuration: the file's content, and its one application's settings."""

    content: dict[str, Any]
    settings: AppSettings

    @property
    def app_name(self) -> str:
        """Name of the application, by which Serve's status and handles know it."""
        return str(self.content["applications"][0].get("name", "default"))

    @property
    def num_cpus(self) -> float:
        """CPUs that the replicas it starts with ask Ray for."""
        deployments = self.content["applications"][0].get("deployments") or []
        # Ray's own default is one CPU for each replica.
        asked = [(_num_replicas(d), (d.get("ray_actor_options") or {}).get("num_cpus", 1)) for d in deployments]
        return float(sum(count * cpus for count, cpus in asked))

    @property
    def num_engines(self) -> int:
        """Replicas of the engine that it starts with."""
        return _num_replicas(self._engine)

    @property
    def gpus_of_engine(self) -> float:
        """GPUs that each of them asks Ray for."""
        return float((self._engine.get("ray_actor_options") or {}).get("num_gpus") or 0)

    @property
    def _engine(self) -> dict[str, Any]:
        """What it says of the engine's deployment."""
        deployments = self.content["applications"][0].get("deployments") or []
        return next((one for one in deployments if one.get("name") == "EngineReplica"), {})

    @property
    def address(self) -> str:
        """Where the HTTP server will listen."""
        http = self.content.get("http_options") or {}
        return f"http://{http.get('host', '127.0.0.1')}:{http.get('port', 8000)}"


def read_serve_config(path: Path, environment: Mapping[str, str] | None = None) -> ServeConfig:
    """Read and check a configuration that holds one application of this project.

    Args:
        path: As for `serve run`.
        environment: Variables of the machine that is to serve it, which is this one: the keys are checked, too. Unset:
            keys are elsewhere.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong: all faults, each with its line.
    """
    try:
        text = path.read_text("utf-8")
        lines, content = YamlLines(text), yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    applications = content.get("applications") if isinstance(content, dict) else None
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError(f"{path}: expected exactly one entry under `applications`")
    settings, faults = check_settings(applications[0].get("args") or {})
    found = [(lines.line(where), where, sentence) for where, sentence in _serve_faults(content)]
    found += [(lines.line((*ARGS, *where)), (*ARGS, *where), sentence) for where, sentence in faults]
    found += [
        (lines.line_of_repeated(where), where, "this key stands here twice; leave one out")
        for where in lines.repeated_keys()
    ]
    if environment is not None and settings is not None and not found:
        where, sentence = _access_fault(content, settings, environment)
        found += [(lines.line(where), where, sentence)] if sentence else []
    if settings is None or found:
        count = f"{len(found)} faults" if len(found) > 1 else "a fault"
        found.sort(key=lambda fault: (fault[0], fault[2]))
        shown = [f"  line {line}: {_spelled(where)}: {sentence}" for line, where, sentence in found]
        raise ConfigError("\n".join([f"{path} has {count}:", *shown]))
    return ServeConfig(content, settings)


def has_keys(settings: AppSettings, environment: Mapping[str, str]) -> bool:
    """Whether a server on this machine has keys. Raises ConfigError: they have faults."""
    return not KeyStore(settings.access, environment).is_empty


def _serve_faults(content: dict[str, Any]) -> Iterator[tuple[Where, str]]:
    """What is wrong outside of `args`."""
    application = content["applications"][0]
    deployments = application.get("deployments") or []
    yield from _unknown_keys((), content, ServeDeploySchema.model_fields)
    yield from _unknown_keys(("applications", 0), application, ServeApplicationSchema.model_fields)
    for index, deployment in enumerate(deployments if isinstance(deployments, list) else []):
        where = ("applications", 0, "deployments", index)
        yield from _unknown_keys(where, deployment, DeploymentSchema.model_fields)
        autoscaling = deployment.get("autoscaling_config") if isinstance(deployment, dict) else None
        yield from _unknown_keys((*where, "autoscaling_config"), autoscaling, AutoscalingConfig.model_fields)
    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        for item in error.errors():
            yield item["loc"], item["msg"].removeprefix("Value error, ")
    except ValueError as error:
        yield (), str(error)


def _access_fault(content: dict[str, Any], settings: AppSettings, environment: Mapping[str, str]) -> tuple[Where, str]:
    """What is wrong with the keys, or with listening without any; empty where nothing is."""
    try:
        if has_keys(settings, environment):
            return (), ""
    except ConfigError as error:
        return (*ARGS, "access"), str(error)
    host = str((content.get("http_options") or {}).get("host", "127.0.0.1"))
    if host in LOOPBACK:
        return (), ""
    return ("http_options", "host"), (
        f"found {host!r}, and there are no keys: without keys the server listens on this machine alone. "
        f"Write 127.0.0.1, or give it keys (args.access.keys_file, or the variable {settings.access.keys_variable})"
    )


def _unknown_keys(where: Where, found: Any, known: Iterable[str]) -> Iterator[tuple[Where, str]]:
    known = list(known)
    for key in found if isinstance(found, dict) else ():
        if key not in known:
            yield (*where, str(key)), unknown_key(str(key), known)


def _spelled(where: Where) -> str:
    """`applications[0].args.model`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)
    return text.removeprefix(".") or "the file"


def _num_replicas(deployment: dict[str, Any]) -> int:
    """How many replicas a deployment starts with."""
    autoscaling = deployment.get("autoscaling_config") or {}
    for asked in (deployment.get("num_replicas"), autoscaling.get("initial_replicas"), autoscaling.get("min_replicas")):
        if isinstance(asked, int):
            return asked
    return 1
