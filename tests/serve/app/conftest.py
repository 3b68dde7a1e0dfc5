"""The application of `cluster/config.yaml`, with a shorter queue, deployed once for this package on a loopback port."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.launcher import Served, deployed
from deployments.local_cluster import free_port
from tests.reference import Reference

CONFIG = Path(__file__).parents[3] / "cluster" / "config.yaml"
BASE = "SmolLM2-135M-Instruct"


MAX_WAITING = 32
"""Requests that may wait for one adapter: few, so that a test can surely send more."""


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config["applications"][0]["args"]["queue"] = {"max_waiting_per_adapter": MAX_WAITING}
    path = tmp_path_factory.mktemp("served") / CONFIG.name
    path.write_text(yaml.safe_dump(config))
    with deployed(path, port=free_port(), num_cpus=4) as application:
        yield application


@pytest.fixture(scope="package")
def reference() -> Reference:
    return Reference()
