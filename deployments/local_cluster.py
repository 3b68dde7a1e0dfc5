"""A Ray cluster of one's own on this machine: loopback only, private files, ended by process id."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

from deployments.socket_folder import sweep
from lora_core.errors import LoRAFleetError

JOINING = {
    # Without it Ray turns token authentication on and writes a token to the home folder.
    "RAY_AUTH_MODE": "disabled",
    # Makes every Ray process bind loopback; the name comes from the platforms Ray first needed it on.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""What a program must have in its environment, before it imports Ray, to join such a cluster."""

ENVIRONMENT = {
    **JOINING,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A router actor that died is noticed as soon as a replica is; Serve looks every 10 s otherwise.
    "RAY_SERVE_DEPLOYMENT_ACTOR_HEALTH_CHECK_PERIOD_S": "1",
    # A replica that fails its health check has no engine that could end its requests: it is not waited for.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
"""Set for the head and for everything that joins it."""

OBJECT_STORE_BYTES = 200_000_000
"""Requests and tokens are small: Ray's default of 30 % of memory would be wasted."""


class ClusterError(LoRAFleetError):
    """The cluster did not start; the message ends with what Ray said."""


class LocalCluster:
    """A head node in a session of its own, for the length of a `with` block.

    Args:
        num_cpus: CPUs Ray may hand out; unset is the machine's.
        environment: Further variables for the head and all its workers.
    """

    def __init__(self, num_cpus: int | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._num_cpus = num_cpus
        self.environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self.environment.pop("RAY_ADDRESS", None)
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = Path()
        """Private to this cluster, removed with it."""

    @property
    def pid(self) -> int:
        """The head's process, which all of the cluster's others descend from."""
        assert self._process is not None, "the cluster is running"
        return self._process.pid

    @property
    def log(self) -> Path:
        """What the head printed."""
        return self.folder / "head.log"

    def __enter__(self) -> "LocalCluster":
        # Short, since Ray puts sockets below it and a socket's path holds 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="lf-", dir="/tmp"))
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        command = [ray_command("ray"), "start", "--head", "--block", f"--port={port}", f"--temp-dir={self.folder}"]
        command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}", *agent_ports(free_port())]
        command += [f"--num-cpus={self._num_cpus}"] if self._num_cpus is not None else []
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait_until_started()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def alive(self) -> bool:
        """Whether the head still runs."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """End the head and what it started, and remove its files."""
        if self._process is not None:
            started: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                started = psutil.Process(self._process.pid).children(recursive=True)
            stop_session(self._process, patience_s=2)
            # Workers end by themselves when their raylet is gone, and engine processes when their replica is.
            for process in psutil.wait_procs(started, timeout=5)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)
        # Of replicas that were killed together with their engines.
        sweep()

    def _wait_until_started(self, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while b"Ray runtime started" not in self.log.read_bytes():
            if not self.alive() or time.monotonic() > deadline:
                raise ClusterError(f"Ray did not start: {self.log.read_text(errors='replace')[-2000:].strip()}")
            time.sleep(0.1)


def stop_session(process: "subprocess.Popen[bytes]", patience_s: float = 5) -> None:
    """End a process started in its own session: asked first, then killed with all that shares its session."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    for _ in range(50):
        # Below the ephemeral range, so that no outgoing connection takes it in the meantime.
        port = 20_000 + secrets.randbelow(10_000)
        if port_is_free("127.0.0.1", port):
            return port
    raise ClusterError("no free TCP port found between 20000 and 30000")


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def agent_ports(metrics_port: int) -> list[str]:
    """Options of `ray start` that give a node's agents their ports.

    A raylet waits for agents that choose theirs, and on a busy machine not for long enough.
    """
    options = ("--dashboard-agent-grpc-port", "--dashboard-agent-listen-port", "--runtime-env-agent-port")
    ports = {metrics_port}
    while len(ports) <= len(options):
        ports.add(free_port())
    others = ports - {metrics_port}
    return [f"--metrics-export-port={metrics_port}", *map("{}={}".format, options, others)]


def ray_command(name: str) -> str:
    """Path of a console script (`ray`, `serve`) of this very environment."""
    return str(Path(sys.executable).parent / name)
