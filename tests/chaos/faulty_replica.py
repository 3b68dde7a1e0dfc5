"""A replica that is real but for its switches: words to the router actor get lost, and its engine can stall."""

from cluster.changes import Change
from cluster.fleet import Outcome
from deployments.replica import EngineReplica
from deployments.router_client import RouterClient
from lora_core.errors import RequestTimeout
from tests.chaos.switches import Switches

LOST_ON_THE_WAY = "acknowledgement-lost"
"""The next acknowledgement does not reach the router actor."""

ANSWER_LOST = "acknowledgement-answer-lost"
"""The next acknowledgement reaches it, and the replica is not told so."""


class LossyRouterClient(RouterClient):
    """Loses what it is told to lose. A call to an actor is answered or fails: so do these."""

    async def acknowledge(self, replica_id: str, outcomes: list[Outcome]) -> list[Change]:
        switches = Switches.of_this_process()
        if switches.take(LOST_ON_THE_WAY):
            raise RequestTimeout("the acknowledgement was lost")
        answer = await super().acknowledge(replica_id, outcomes)
        if switches.take(ANSWER_LOST):
            raise RequestTimeout("the answer to the acknowledgement was lost")
        return answer


class FaultyReplica(EngineReplica):
    """Serves as `EngineReplica` does."""

    engine_module = "tests.chaos.faulty_engine"
    router_client = LossyRouterClient
