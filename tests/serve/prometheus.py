"""`PrometheusServer`: a real Prometheus on loopback, run with this project's own configuration of it."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from deployments.local_cluster import free_port

GRAFANA = Path(__file__).parents[2] / "cluster" / "grafana"


def command(name: str) -> str:
    """Where a program of Prometheus is; without it the test is skipped, but in CI it fails."""
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not here; `make prometheus` installs it on Debian"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


class PrometheusServer(NamedTuple):
    """One that runs."""

    url: str

    def query(self, expression: str) -> list[float]:
        """The values that an expression has now, NaN and infinities left out: they are no data."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30)
        found = answer.json()
        assert found["status"] == "success", f"{expression}: {found}"
        values = [float(one["value"][1]) for one in found["data"]["result"]]
        return [value for value in values if abs(value) < float("inf")]

    def get(self, path: str) -> Any:
        """The data of a route of its API."""
        return httpx.get(f"{self.url}{path}", timeout=30).raise_for_status().json()["data"]


@contextmanager
def prometheus(folder: Path, target_url: str, interval_s: int = 2) -> Iterator[PrometheusServer]:
    """Scrape a fleet that has no keys, as `cluster/grafana/prometheus.yml` says, but more often."""
    config = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = config["global"]["evaluation_interval"] = f"{interval_s}s"
    (job,) = config["scrape_configs"]
    job["scrape_timeout"] = f"{interval_s}s"
    job["static_configs"] = [{"targets": [urlsplit(target_url).netloc]}]
    del job["authorization"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(GRAFANA / "alerts.yml", folder)
    port = free_port()
    words = [command("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        server = PrometheusServer(f"http://127.0.0.1:{port}")
        _wait_until_ready(server, process, folder / "log")
        yield server
    finally:
        process.terminate()
        process.wait(10)


def _wait_until_ready(server: PrometheusServer, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{server.url}/-/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
