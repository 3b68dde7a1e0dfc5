"""Deploy a configuration on a Ray cluster of its own, and follow it until it is healthy or has failed."""

import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import ray
import yaml
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from cluster.base_model import locate_base_model
from deployments.local_cluster import LocalCluster, port_is_free, ray_command, stop_session
from deployments.ray_internals import forget_cluster
from deployments.serve_config import ServeConfig, has_keys, read_serve_config
from lora_core.errors import ConfigError, LoRAFleetError

Report = Callable[[str], None]
"""Told, in a line each, what is being done."""

POLL_S = 0.3
REPORT_EVERY_S = 5.0

STALL_MARGIN_S = 60.0
"""A start without visible progress is given up this long after a replica would have given up its own."""


class DeploymentFailed(LoRAFleetError):
    """The application did not become healthy; the message holds Serve's reason."""


class Served:
    """A deployed application: its configuration, its cluster, and the `serve run` process that owns it."""

    def __init__(
        self, config: ServeConfig, cluster: LocalCluster, process: "subprocess.Popen[bytes]", log: Path
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.log = log
        """What `serve run` printed, replicas' logs included."""
        self._process = process

    @property
    def url(self) -> str:
        """Address of the HTTP server, without a slash at the end."""
        return self.config.address

    def check_alive(self) -> None:
        """Raise DeploymentFailed if a process the application needs has ended."""
        if self._process.poll() is not None:
            raise DeploymentFailed(f"serve run ended with status {self._process.returncode}: {_tail(self.log)}")
        if not self.cluster.alive():
            raise DeploymentFailed(f"Ray ended: {_tail(self.cluster.log)}")

    def wait(self) -> None:
        """Block for as long as the application runs; raise DeploymentFailed when it ends by itself."""
        while True:
            self.check_alive()
            time.sleep(1)


@contextmanager
def deployed(
    config_path: Path, *, port: int | None = None, num_cpus: int | None = None, report: Report = print
) -> Iterator[Served]:
    """Run a configuration: healthy inside the `with` block, gone after it.

    The calling process becomes a Ray driver of the new cluster, so that handles work in it.
    `deployments.local_cluster.ENVIRONMENT` must be in its environment before Ray is first imported.

    Args:
        config_path: As for `serve run`.
        port: Listen here instead of the configured port.
        num_cpus: CPUs Ray may hand out; unset is the machine's, or what the replicas ask for if that is more.
        report: Receives progress.

    Raises:
        ConfigError: the configuration is wrong, or its port is taken.
        DeploymentFailed: the application did not become healthy.
    """
    config = read_serve_config(config_path, os.environ)
    if port is not None:
        config.content.setdefault("http_options", {})["port"] = port
    _check_port(config)
    if not has_keys(config.settings, os.environ):
        report(
            "no keys: it listens on this machine alone, and whoever is on it may do everything; to let others in give "
            f"it keys, in access.keys_file or the variable {config.settings.access.keys_variable}"
        )
    locate_base_model(config.settings.model, report)
    report("starting Ray")
    with LocalCluster(num_cpus or max(os.cpu_count() or 1, math.ceil(config.num_cpus))) as cluster:
        written, log = cluster.folder / "config.yaml", cluster.folder / "serve-run.log"
        written.write_text(yaml.safe_dump(config.content))
        command = [ray_command("serve"), "run", "--address", cluster.address, str(written)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=cluster.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        try:
            served = Served(config, cluster, process, log)
            _connect(cluster.address)
            _follow_until_healthy(served, report)
            yield served
        finally:
            forget_cluster()
            stop_session(process)


def _connect(address: str) -> None:
    """Join the cluster as a driver, keeping this process's own signal handlers: Ray puts others in their place."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ray.init(address, namespace="serve", log_to_driver=False, configure_logging=False)
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _check_port(config: ServeConfig) -> None:
    where = urlsplit(config.address)
    assert where.hostname is not None, "the address was built from a host"
    assert where.port is not None, "the address was built from a port"
    if not port_is_free(where.hostname, where.port):
        raise ConfigError(f"port {where.port} is taken; stop what listens there, or choose another with --port")


def _follow_until_healthy(served: Served, report: Report) -> None:
    began = time.monotonic()
    shown, shown_at, best, progressed_at = "", began, -1, began
    patience_s = served.config.settings.replica.start_timeout_s + STALL_MARGIN_S
    while True:
        served.check_alive()
        application = serve.status().applications.get(served.config.app_name)
        progress = "deploying" if application is None else _summary(application)
        now = time.monotonic()
        if (running := _num_running(application)) > best:
            best, progressed_at = running, now
        if progress != shown or now - shown_at > REPORT_EVERY_S:
            report(f"{progress} ({now - began:.0f} s)")
            shown, shown_at = progress, now
        if application is not None:
            if application.status == ApplicationStatus.RUNNING:
                return
            if application.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                raise DeploymentFailed(_reason(application))
            if now - progressed_at > patience_s:
                # Serve goes on trying for ever once one replica has run, or while Ray has no room for the next one.
                raise DeploymentFailed(
                    f"nothing has progressed for {patience_s:.0f} s ({progress})\n{_reason(application)}"
                )
        time.sleep(POLL_S)


def _num_running(application: ApplicationStatusOverview | None) -> int:
    if application is None:
        return 0
    return sum(deployment.replica_states.get("RUNNING", 0) for deployment in application.deployments.values())


def _summary(application: ApplicationStatusOverview) -> str:
    parts = []
    for name, deployment in application.deployments.items():
        running = deployment.replica_states.get("RUNNING", 0)
        parts.append(f"{name} {running}/{sum(deployment.replica_states.values())}")
    return "replicas running: " + ", ".join(parts) if parts else "building the application"


def _reason(application: ApplicationStatusOverview) -> str:
    messages = [application.message]
    messages += [deployment.message for deployment in application.deployments.values() if deployment.message]
    text = "\n".join(dict.fromkeys(filter(None, messages)))
    # A fault of this project's own kind is said in one sentence; of any other the trace is worth having.
    foreseen = re.findall(r"^lora_core\.errors\.\w+: (.+)$", text, re.MULTILINE)
    return f"the deployment failed: {foreseen[-1]}" if foreseen else f"the deployment failed:\n{text}"


def _tail(log: Path, size: int = 2000) -> str:
    return log.read_text(errors="replace")[-size:].strip()
