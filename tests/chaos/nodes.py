"""`ExtraNode`: a second node of a local cluster, on this machine, that can be lost as a whole."""

import subprocess
import sys
import time

import psutil

from deployments.local_cluster import OBJECT_STORE_BYTES, LocalCluster, agent_ports, free_port, stop_session

ATTEMPTS = 2


class ExtraNode:
    """A node from `start` until it is lost."""

    def __init__(self, cluster: LocalCluster, num_cpus: int = 1) -> None:
        self._cluster = cluster
        self._num_cpus = num_cpus
        self._log = cluster.folder / "extra-node.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process that all of the node's others descend from."""
        assert self._process is not None, "the node runs"
        return self._process.pid

    def start(self) -> None:
        """Returns when it has joined the cluster; where Ray gives up, it is tried again."""
        for _ in range(ATTEMPTS):
            try:
                if self._joins():
                    return
            except BaseException:
                self.lose()
                raise
            self.lose()
        raise AssertionError(f"the node did not start: {self._log.read_text(errors='replace')}")

    def lose(self) -> None:
        """Kill everything on it at once, as a power cut does."""
        if self._process is None:
            return
        try:
            root = psutil.Process(self._process.pid)
            processes = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            processes = []
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        # Also what has lost its parent.
        stop_session(self._process, patience_s=0)
        psutil.wait_procs(processes, timeout=5)
        self._process = None

    def _joins(self) -> bool:
        command = [sys.executable, "-m", "tests.chaos.ray_node", "start", "--block"]
        command += [f"--address={self._cluster.address}", "--node-ip-address=127.0.0.1", f"--num-cpus={self._num_cpus}"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"]
        command += agent_ports(free_port())
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=self._cluster.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        while self._process.poll() is None:
            if b"Ray runtime started" in self._log.read_bytes():
                return True
            time.sleep(0.1)
        return False
