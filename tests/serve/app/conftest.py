"""The application of `cluster/config.yaml`, deployed once for this package on a free loopback port."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.launcher import Served, deployed
from deployments.local_cluster import free_port
from tests.reference import Reference

CONFIG = Path(__file__).parents[3] / "cluster" / "config.yaml"
BASE = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="package")
def served() -> Iterator[Served]:
    with deployed(CONFIG, port=free_port(), num_cpus=4) as application:
        yield application


@pytest.fixture(scope="package")
def reference() -> Reference:
    return Reference()
