"""`NodeMetrics`: asks every node of the Ray cluster for its metrics, and makes one page of them."""

import asyncio
import logging

import httpx
import ray

from deployments.exposition import FleetExposition

logger = logging.getLogger(__name__)

NODE_TIMEOUT_S = 4.0
"""How long a node's agent may take to answer: Prometheus itself waits 10 s, as it comes."""

NODES_AT_ONCE = 32


class NodeMetrics:
    """Whoever asks while a page is being made gets that one.

    Every process of the fleet hands its metrics to the agent of its node, so that nothing that serves requests is asked
    here, and a process that is busy, or has just died, is on the page all the same.

    Args:
        model_name: The base model's.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._making: asyncio.Task[str] | None = None

    async def page(self) -> str:
        """The fleet's page, as Prometheus reads it."""
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make(), name="metrics-page")
        return await asyncio.shield(self._making)

    async def _make(self) -> str:
        addresses = await asyncio.to_thread(agent_addresses)
        turns = asyncio.Semaphore(NODES_AT_ONCE)
        # The environment's proxies are for the world outside.
        async with httpx.AsyncClient(timeout=NODE_TIMEOUT_S, trust_env=False) as client:
            pages = await asyncio.gather(*(_ask(client, address, turns) for address in addresses))
        return await asyncio.to_thread(self._joined, pages)

    def _joined(self, pages: list[str | None]) -> str:
        exposition = FleetExposition(self._model_name)
        for page in pages:
            exposition.take(page or "")
        exposition.add("lora_fleet_nodes", "Nodes of the Ray cluster.", len(pages))
        exposition.add("lora_fleet_nodes_silent", "Nodes whose metrics are missing here.", pages.count(None))
        return exposition.text()


def agent_addresses() -> list[str]:
    """Where the agents of the live nodes are asked."""
    return [_url(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in ray.nodes() if node["Alive"]]


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"


async def _ask(client: httpx.AsyncClient, address: str, turns: asyncio.Semaphore) -> str | None:
    async with turns:
        try:
            answer = await client.get(address)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            logger.warning("the metrics of %s are missing: %s: %s", address, type(error).__name__, error)
            return None
        return answer.text
