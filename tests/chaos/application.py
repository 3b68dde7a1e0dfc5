"""`build(args)`: the application of `deployments.app`, with replicas that faults can be inflicted on."""

from typing import Any

from ray.serve import Application

from deployments import app
from tests.chaos.faulty_replica import FaultyReplica


def build(args: dict[str, Any]) -> Application:
    """As `deployments.app.build`."""
    # By this name `build` finds what it deploys.
    vars(app)["EngineReplica"] = FaultyReplica
    return app.build(args)
