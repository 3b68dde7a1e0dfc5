"""`ray start`, for a further node, too, where Ray binds loopback: it takes that for a platform without nodes."""

import sys

from ray._private import ray_constants, services
from ray.scripts.scripts import cli

if __name__ == "__main__":
    # Of this process only: those it starts bind what their environment says.
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.get_node_ip_address = lambda address=None: "127.0.0.1"
    sys.exit(cli())
