"""The live page and its events over HTTP, behind the gate, for a real router actor's object without Ray."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI

from cluster.access import AccessSettings, TenantSettings
from cluster.picture import FleetPicture
from cluster.quotas import TenantQuotas
from deployments import http_errors
from deployments.fleet_feed import FleetFeed, fleet_events
from deployments.fleet_page import add_fleet_page
from deployments.gate import Gate
from deployments.key_store import KeyStore
from deployments.local_cluster import free_port
from deployments.router import AdapterRouter
from lora_core.messages import Residency
from lora_core.types import AdapterRef, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus
from lora_core.workload import Workload
from tests.unit.router_fleet import Replica, make_router

OPERATOR_KEY = "operator-key-0123456789"
TENANT_KEY = "acme-operator-key-0123456789"
NUM_SLOTS = 8

Result = TypeVar("Result")


def refuse_broken(request: LoRARequest) -> LoRAResponse | None:
    """What every replica says to the adapter of this name."""
    if (request.operation, request.lora_name) != (LoRAOperation.LOAD, "broken"):
        return None
    return LoRAResponse(LoRAStatus.LOAD_INVALID_ADAPTER, "its rank is 512, and max_lora_rank is 64")


class PageServer:
    """Its methods may be called on any thread; what it serves lives on a loop of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/fleet"
        self.num_asked = 0
        self.fault: Exception | None = None
        self.replicas: dict[str, Replica] = {}
        self._sequence = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.router = self.run(self._make_router())
        self._app = self.run(self._make_app())
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)

    # The fleet

    def start_replica(self, name: str) -> None:
        """Have a replica register, report that it holds nothing, and follow."""
        self.replicas[name] = Replica(self.router, name, refuse_broken)
        self.run(self.replicas[name].start())
        self.hold(name)

    def kill_replica(self, name: str) -> None:
        """Have it vanish without a word."""
        self.run(self.replicas.pop(name).stop())

    def load(self, name: str, path: str = "") -> None:
        self.run(self.router.load(name, path or f"/{name}"))

    def unload(self, name: str) -> None:
        self.run(self.router.unload(name))

    def hold(self, replica: str, *slots: str, loading: tuple[str, ...] = (), num_changing: int = 0) -> None:
        """Have a replica report what is in its slots."""
        self._sequence += 1
        held, coming = (self._refs(replica, names) for names in (slots, loading))
        in_memory = self._refs(replica, tuple(self.replicas[replica].holding))
        residency = Residency(
            self._sequence, held, in_memory, in_memory, coming, num_slots_used=len(held) + num_changing
        )
        self.run(self.router.report_residency(replica, residency, NUM_SLOTS))

    def work(self, replica: str, work: Workload) -> None:
        """Have a replica report its work."""
        self.run(self.router.report_work(replica, work))

    # The server

    def start(self) -> None:
        """Listen."""
        self.run(self._start())

    def stop(self) -> None:
        """Listen no more, and end what is open."""
        self.run(self._stop())

    def close(self) -> None:
        """End everything."""
        self.stop()
        for name in list(self.replicas):
            self.kill_replica(name)
        self.run(self.router.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def _make_router(self) -> AdapterRouter:
        return make_router(lease_s=2.0, plan_period_s=0.2, num_slots=NUM_SLOTS)

    async def _make_app(self) -> FastAPI:
        app = FastAPI()
        http_errors.install(app)
        feed = FleetFeed(self._picture, period_s=0.2)
        add_fleet_page(app, lambda: fleet_events(feed))
        access = AccessSettings(tenants={"acme": TenantSettings()})
        keys = KeyStore(access, {access.keys_variable: f"operator={OPERATOR_KEY},acme:operator={TENANT_KEY}"})
        quotas = TenantQuotas(access.tenants)
        app.add_middleware(Gate, keys=keys, quotas=quotas, max_body_bytes=access.max_body_bytes)
        return app

    async def _picture(self) -> FleetPicture:
        self.num_asked += 1
        if self.fault is not None:
            raise self.fault
        return await self.router.fleet_picture()

    async def _start(self) -> None:
        config = uvicorn.Config(
            self._app, host="127.0.0.1", port=self.port, log_level="critical", lifespan="off", ws="none",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve())
        for _ in range(1000):
            if self._server.started:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the server does not start")

    async def _stop(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None

    def _refs(self, replica: str, names: tuple[str, ...]) -> list[AdapterRef]:
        holding = self.replicas[replica].holding
        return [AdapterRef(name, holding[name]) for name in names]


@contextmanager
def page_server() -> Iterator[PageServer]:
    """Listening, with no replicas yet."""
    server = PageServer()
    try:
        server.start()
        yield server
    finally:
        server.close()
