"""The pages of several nodes, asked for over HTTP; the nodes of the cluster are stood in for by their addresses."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments import node_metrics
from deployments.local_cluster import free_port
from deployments.node_metrics import NodeMetrics

PAGE = '# HELP ray_lora_fleet_slots Slots.\n# TYPE ray_lora_fleet_slots gauge\nray_lora_fleet_slots{replica="r"} 4.0\n'


class Agent(BaseHTTPRequestHandler):
    """As a node's agent; one at `/broken/metrics` answers with a fault."""

    num_asked = 0

    def do_GET(self) -> None:
        Agent.num_asked += 1
        body = PAGE.encode()
        self.send_response(200 if self.path == "/metrics" else 500)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def agent() -> Iterator[str]:
    Agent.num_asked = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Agent)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(10)


async def values(metrics: NodeMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(await metrics.page())
    return {one.name: one.value for family in families for one in family.samples}


async def test_nodes_that_do_not_answer_are_counted_and_hold_nobody_up(
    agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [f"{agent}/metrics", f"{agent}/broken/metrics", f"http://127.0.0.1:{free_port()}/metrics"]
    monkeypatch.setattr(node_metrics, "agent_addresses", lambda: addresses)
    found = await values(NodeMetrics("base"))
    assert found == {"lora_fleet_slots": 4.0, "lora_fleet_nodes": 3.0, "lora_fleet_nodes_silent": 2.0}


async def test_those_who_ask_at_once_get_one_page_and_later_ones_another(
    agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_metrics, "agent_addresses", lambda: [f"{agent}/metrics"])
    metrics = NodeMetrics("base")
    pages = await asyncio.gather(*(metrics.page() for _ in range(5)))
    assert (len(set(pages)), Agent.num_asked) == (1, 1)
    await metrics.page()
    assert Agent.num_asked == 2


async def test_one_who_leaves_takes_the_page_from_nobody(agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_metrics, "agent_addresses", lambda: [f"{agent}/metrics"])
    metrics = NodeMetrics("base")
    first, second = (asyncio.create_task(metrics.page()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert "lora_fleet_slots" in await second
