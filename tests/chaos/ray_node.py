"""`ray start`, for a further node, too, where Ray binds loopback: it takes that for a platform without nodes."""

import sys
import time
from typing import Any

from ray._private import ray_constants, services
from ray.scripts.scripts import cli

PATIENCE_S = 120.0
"""How long a node may take to join. Ray gives up after 30 s, which on a busy machine is not enough."""

look_up = services.get_node


def patient_look_up(gcs_address: str, node_id: str) -> Any:
    """What the cluster knows of a node, as soon as it does."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return look_up(gcs_address, node_id)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


if __name__ == "__main__":
    # Of this process only: those it starts bind what their environment says.
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.get_node_ip_address = lambda address=None: "127.0.0.1"
    services.get_node = patient_look_up
    sys.exit(cli())
