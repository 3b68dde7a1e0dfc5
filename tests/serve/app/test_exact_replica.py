"""A request that one replica alone is to answer, on the real application."""

import httpx

from deployments.exact_replica import HEADER
from deployments.launcher import Served


def test_each_replica_can_be_asked_by_its_id_and_one_that_is_not_there_is_refused_with_those_that_are(
    served: Served,
) -> None:
    with httpx.Client(base_url=served.url, timeout=120) as http:
        replicas = sorted(http.get("/v1/fleet").json()["replicas"])
        assert len(replicas) == 2
        body = {"model": "pirate", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
        answers = [http.post("/v1/completions", json=body, headers={HEADER: name}) for name in replicas]
        assert [answer.status_code for answer in answers] == [200, 200], answers
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        refused = http.post("/v1/completions", json={**body, "stream": True}, headers={HEADER: "nobody"})
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert message == f"no replica 'nobody' takes requests; those that do: {', '.join(replicas)}"
