"""`ChaosFleet`: a real fleet with a tiny model, its processes, and what should be served there."""

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from cluster.status import AdapterReport, FleetReport
from deployments.fleet_client import FleetClient, Refused, Unreachable
from deployments.launcher import Served, deployed
from deployments.local_cluster import free_port, ray_command
from tests.chaos.nodes import ExtraNode
from tests.chaos.switches import VARIABLE, Switches
from tests.chaos.truth import Truth

ROOT = Path(__file__).parents[2]
BASE = "tiny"
NUM_REPLICAS = 2
NUM_SLOTS = 3
LEASE_S = 2.0

CATCH_UP_S = 10.0
"""A replica is at the last epoch this long after it came alive."""

SETTLE_TIMEOUT_S = 120.0
"""A fleet that has not recovered by then never will."""

ADAPTER_DEADLINE_S, REPLICA_DEADLINE_S = 5.0, 10.0


class ChaosFleet:
    """The fleet, while it is deployed.

    Args:
        served: The application.
        content: Its configuration.
        folder: Of the switches.
        adapters: Name -> folder of the adapters to begin with.
    """

    def __init__(self, served: Served, content: dict[str, Any], folder: Path, adapters: Mapping[str, Path]) -> None:
        self.url = served.url
        self.switches = Switches(folder)
        self.adapters = dict(adapters)
        self.client = FleetClient(served.url)
        self.http = httpx.Client(base_url=served.url, timeout=60)
        self.desired: dict[str, str] = {}
        """Name -> path of what should be served."""
        self.num_replicas = NUM_REPLICAS
        self._served, self._content = served, content
        self._node: ExtraNode | None = None

    def close(self) -> None:
        """Close the connections, and end the extra node."""
        self.lose_node()
        self.client.close()
        self.http.close()

    def load(self, name: str, path: Path) -> None:
        """Load an adapter that should be served from now on."""
        changed = self.client.load(name, str(path))
        assert changed.is_everywhere, changed.body
        self.desired[name] = str(path)

    def unload(self, name: str) -> None:
        """Unload an adapter that should be served no more."""
        self.client.unload(name)
        del self.desired[name]

    def quiet_run(self) -> Truth:
        """What is right of the base model and of all that is served now."""
        return Truth(self.http, [*self.desired, BASE])

    # Processes

    def processes(self, word: str) -> list[psutil.Process]:
        """Processes of the cluster whose title, as Ray sets it, has a word."""
        roots = [self._served.cluster.pid] + ([self._node.pid] if self._node is not None else [])
        found = []
        for root in roots:
            for child in psutil.Process(root).children(recursive=True):
                # One that has just been killed has no command line any more.
                with contextlib.suppress(psutil.Error):
                    title = " ".join(child.cmdline())
                    found += [child] if word in title and child.status() != psutil.STATUS_ZOMBIE else []
        return found

    def replicas(self) -> list[psutil.Process]:
        """The engine replicas."""
        return self.processes("ServeReplica:llm:EngineReplica")

    def engines(self) -> list[psutil.Process]:
        """The engine processes."""
        return self.processes("faulty_engine")

    def busiest_engine(self) -> psutil.Process:
        """The engine process that computes most now."""
        engines = self.engines()
        before = [sum(engine.cpu_times()[:2]) for engine in engines]
        time.sleep(0.5)
        used = [sum(engine.cpu_times()[:2]) - past for engine, past in zip(engines, before, strict=True)]
        return engines[used.index(max(used))]

    def router(self) -> psutil.Process:
        """The router actor."""
        (found,) = self.processes("AdapterRouter")
        return found

    def controller(self) -> psutil.Process:
        """Serve's controller."""
        (found,) = self.processes("ServeController")
        return found

    # Nodes and replicas

    def add_node(self) -> None:
        """Add a node with room for one replica."""
        node = ExtraNode(self._served.cluster)
        node.start()
        self._node = node

    @property
    def has_node(self) -> bool:
        """Whether there is an added node."""
        return self._node is not None

    def lose_node(self) -> None:
        """Lose the added node, if there is one."""
        node, self._node = self._node, None
        if node is not None:
            node.lose()

    def scale(self, num_replicas: int) -> None:
        """Change the number of replicas, in place."""
        for deployment in self._content["applications"][0]["deployments"]:
            if deployment["name"] == "EngineReplica":
                deployment["num_replicas"] = num_replicas
        path = self._served.cluster.folder / "scaled.yaml"
        path.write_text(yaml.safe_dump(self._content))
        cluster = self._served.cluster
        command = [ray_command("serve"), "run", "--non-blocking", "--address", cluster.address, str(path)]
        subprocess.run(command, env=cluster.environment, check=True, capture_output=True, timeout=60)
        self.num_replicas = num_replicas

    # Settling

    def settle(self) -> None:
        """Wait until what should be is: all replicas there, at the last epoch, with every adapter and no other.

        Raises:
            AssertionError: it does not come to that, or a replica took longer than `CATCH_UP_S` once it was alive.
        """
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        seen_s: dict[str, float] = {}
        late: dict[str, float] = {}
        while True:
            wrong, fleet = self._difference()
            now = time.monotonic()
            for replica_id, replica in fleet.replicas.items() if fleet is not None else ():
                since = seen_s.setdefault(replica_id, now)
                if (replica.lag or not replica.joined) and now - since > CATCH_UP_S:
                    late[replica_id] = now - since
            if wrong is None:
                assert not late, f"not at the last epoch within {CATCH_UP_S:g} s of being alive: {late}"
                return
            assert now < deadline, f"not settled within {SETTLE_TIMEOUT_S:g} s: {wrong}"
            time.sleep(0.2)

    def _difference(self) -> tuple[str | None, FleetReport | None]:
        """What differs from what should be, None if nothing does; and the fleet as it is, where that is known."""
        try:
            fleet, adapters = self.client.fleet(), list(self.client.adapters())
        except (Refused, Unreachable) as error:
            return f"the fleet does not tell: {error}", None
        if len(fleet.replicas) != self.num_replicas:
            return f"{len(fleet.replicas)} replicas, expected {self.num_replicas}", fleet
        for replica_id, replica in fleet.replicas.items():
            if replica.lag or not replica.joined or replica.fault or replica.stalled or replica.refused:
                return f"replica {replica_id}: {replica}", fleet
        found = {adapter.name: adapter.path for adapter in adapters}
        if found != self.desired:
            return f"adapters {found}, expected {self.desired}", fleet
        return next((f"adapter {one.name}: {one}" for one in adapters if not _is_served(one)), None), fleet


def _is_served(adapter: AdapterReport) -> bool:
    """Whether an adapter is ready, and every replica has it."""
    everywhere = all(one.acknowledged == "applied" and one.error is None for one in adapter.replicas.values())
    return adapter.state == "ready" and adapter.replaced_by is None and everywhere


@contextlib.contextmanager
def chaos_fleet(folder: Path, base: Path, adapters: Mapping[str, Path]) -> Iterator[ChaosFleet]:
    """A fleet of `NUM_REPLICAS` replicas on a Ray of its own, with these adapters loaded."""
    switches = folder / "switches"
    switches.mkdir()
    journal = folder / "journal" / "journal.sqlite"
    # The head, its workers and `serve run` find this project, and the switches, by these.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ[VARIABLE] = str(switches)
    content = configuration(base, journal)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    report = functools.partial(print, file=sys.stderr)
    with deployed(path, port=free_port(), num_cpus=NUM_REPLICAS, report=report) as served:
        content["http_options"] = {"host": "127.0.0.1", "port": int(served.url.rsplit(":", 1)[1])}
        fleet = ChaosFleet(served, content, switches, adapters)
        try:
            for name, adapter in adapters.items():
                fleet.load(name, adapter)
            fleet.settle()
            yield fleet
        finally:
            fleet.close()


def configuration(base: Path, journal: Path) -> dict[str, Any]:
    """`cluster/config.yaml` with a tiny model, short deadlines, and the application that faults can be inflicted on."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "cluster" / "config.yaml").read_text())
    application = content["applications"][0]
    application["import_path"] = "tests.chaos.application:build"
    application["args"] = {
        "model": str(base),
        "model_name": BASE,
        "engine": {"dtype": "float32", "device": "cpu", "kv_cache_tokens": 4096, "num_threads": 1},
        "lora_config": {"enable_lora": True, "max_num_loras": NUM_SLOTS, "max_lora_rank": 16, "read_timeout_s": 5},
        "router": {"journal": str(journal), "lease_s": LEASE_S},
        "watchdog": {
            "adapter_deadline_s": ADAPTER_DEADLINE_S,
            "waiting_deadline_s": 30,
            "replica_deadline_s": REPLICA_DEADLINE_S,
        },
    }
    for deployment in application["deployments"]:
        if deployment["name"] == "EngineReplica":
            # A fleet of a fixed size: each fault says how many replicas there should be.
            deployment.pop("autoscaling_config", None)
            deployment["num_replicas"] = NUM_REPLICAS
    return content
