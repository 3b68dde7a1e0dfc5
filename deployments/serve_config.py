"""The configuration file of `serve run`, read as strictly as it should be.

Ray Serve ignores keys it does not know (`num_replica: 3` deploys one replica), and reports wrong `args` only after it
has started; here both are refused first.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from cluster.schema import AppSettings, parse_settings, unknown_key
from lora_core.errors import ConfigError


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
    def address(self) -> str:
        """Where the HTTP server will listen."""
        http = self.content.get("http_options") or {}
        return f"http://{http.get('host', '127.0.0.1')}:{http.get('port', 8000)}"


def read_serve_config(path: Path) -> ServeConfig:
    """Read and check a configuration that holds one application of this project.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value is wrong; the message names the place.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    applications = content.get("applications") if isinstance(content, dict) else None
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError(f"{path}: expected exactly one entry under `applications`")
    application = applications[0]
    faults = [*_unknown_keys("", content, ServeDeploySchema.model_fields)]
    faults += _unknown_keys("applications[0].", application, ServeApplicationSchema.model_fields)
    for index, deployment in enumerate(application.get("deployments") or []):
        where = f"applications[0].deployments[{index}]."
        faults += _unknown_keys(where, deployment, DeploymentSchema.model_fields)
        autoscaling = deployment.get("autoscaling_config") or {}
        faults += _unknown_keys(f"{where}autoscaling_config.", autoscaling, AutoscalingConfig.model_fields)
    try:
        settings = parse_settings(application.get("args") or {})
    except ConfigError as error:
        faults.append(str(error))
    if faults:
        raise ConfigError(f"{path}: " + "; ".join(faults))
    try:
        ServeDeploySchema.model_validate(content)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return ServeConfig(content, settings)


def _unknown_keys(where: str, found: dict[str, Any], known: Iterable[str]) -> list[str]:
    known = list(known)
    return [f"{where}{key}: {unknown_key(str(key), known)}" for key in found if key not in known]


def _num_replicas(deployment: dict[str, Any]) -> int:
    """How many replicas a deployment starts with."""
    autoscaling = deployment.get("autoscaling_config") or {}
    for asked in (deployment.get("num_replicas"), autoscaling.get("initial_replicas"), autoscaling.get("min_replicas")):
        if isinstance(asked, int):
            return asked
    return 1
