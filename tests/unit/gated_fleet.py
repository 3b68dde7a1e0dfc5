"""An application behind the gate, over a fleet of two tenants that answers as told."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import httpx
from fastapi import APIRouter, FastAPI

from cluster.access import AccessSettings, TenantSettings
from cluster.fleet import LoadOutcome
from cluster.quotas import TenantQuotas
from deployments import exact_replica
from deployments.fleet_api import FleetService, fleet_routes
from deployments.fleet_page import add_fleet_page
from deployments.gate import Gate
from deployments.generation import GenerateChunk
from deployments.http_api import Service, http_app
from deployments.key_store import KeyStore
from deployments.openai_api import GenerationRequest, TextRequest, TokensRequest, model_card
from deployments.request_id import new_call_id
from deployments.tenant_service import as_tenants_see
from lora_core.errors import AdapterLost, AdapterNotFound, LoRAFleetError
from lora_core.types import LoRAStatus

BASE = "base"
KEYS = {
    "operator": "operator-key-00000", "acme": "acme-key-0000000000", "acme:operator": "acme-operator-key-0",
    "globex": "globex-key-00000000",
}  # fmt: skip
ADAPTERS = {"shared": "/models/globex/shared", "acme/a": "/models/acme/a", "globex/secret": "/models/globex/secret"}


class Fleet:
    """A service with adapters of two tenants."""

    def __init__(self) -> None:
        self.adapters = dict(ADAPTERS)
        self.pins: set[str] = set()
        self.calls: list[tuple[Any, ...]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.call_ids: list[str] = []
        self.replicas: list[str] = []
        # Names that stand for adapters, each of which it puts into the request that names it.
        self.targets = {"canary": "globex/secret", "acme/canary": "acme/a"}
        self.fault: str | LoRAFleetError = ""
        # After the first piece of an answer.
        self.late_fault: LoRAFleetError | None = None
        self.change_fault: LoRAFleetError | None = None

    async def collect(self, request: GenerationRequest) -> list[GenerateChunk]:
        return [piece async for piece in self.pieces(request)]

    async def pieces(self, request: GenerationRequest) -> AsyncGenerator[GenerateChunk, None]:
        request.model = self.targets.get(request.model, request.model)
        self._find(request.model)
        if self.fault:
            raise self.fault if isinstance(self.fault, LoRAFleetError) else AdapterLost(self.fault)
        self.call_ids.append(new_call_id())
        self.replicas.append(exact_replica.current())
        await self.go_on.wait()
        for count in (1, 2):
            yield GenerateChunk(
                text="a", token_ids=[1], prompt_tokens=5, completion_tokens=count,
                finish_reason="stop" if count == 2 else None,
            )  # fmt: skip
            if self.late_fault is not None:
                raise self.late_fault

    async def load_adapter(
        self, lora_name: str, lora_path: str, load_inplace: bool = False, path_is_final: bool = False
    ) -> LoadOutcome:
        self.calls.append(("load", lora_name, lora_path, path_is_final))
        await self.go_on.wait()
        self.adapters[lora_name] = lora_path
        return LoadOutcome(status=LoRAStatus.SUCCESS, message="done")

    async def unload_adapter(self, lora_name: str) -> LoadOutcome:
        self._find(lora_name)
        if self.change_fault is not None:
            raise self.change_fault
        del self.adapters[lora_name]
        return LoadOutcome(status=LoRAStatus.SUCCESS, message="done")

    async def pin_adapter(self, lora_name: str) -> LoadOutcome:
        self._find(lora_name)
        await asyncio.sleep(0)
        self.pins.add(lora_name)
        return LoadOutcome(status=LoRAStatus.SUCCESS, message="done")

    async def unpin_adapter(self, lora_name: str) -> LoadOutcome:
        self._find(lora_name)
        self.pins.discard(lora_name)
        return LoadOutcome(status=LoRAStatus.SUCCESS, message="done")

    async def models(self, is_wanted: Callable[[str], bool] | None = None) -> dict[str, dict[str, Any]]:
        roots = {BASE: "/models/globex/base", **self.adapters, **self.targets}
        wanted = filter(is_wanted, roots) if is_wanted is not None else roots
        cards = {name: model_card(name, root=roots[name], parent=None, created=1) for name in wanted}
        return {
            name: {**card, "targets": {self.targets[name]: 1.0}} if name in self.targets else card
            for name, card in cards.items()
        }

    async def model(self, name: str) -> dict[str, Any]:
        self._find(self.targets.get(name, name))
        return {**(await self.models())[name], "lora": {"replicas": {"r0": "/models/globex/x"}}}

    async def pinned(self) -> set[str]:
        return self.pins

    async def tokenize(self, request: TextRequest) -> dict[str, Any]:
        self._find(request.model or BASE)
        return {"count": 1}

    async def detokenize(self, request: TokensRequest) -> dict[str, Any]:
        self._find(request.model or BASE)
        return {"prompt": "a"}

    async def num_replicas(self) -> int:
        return 1

    async def starts_on_demand(self) -> bool:
        return False

    async def events(self) -> AsyncGenerator[bytes, None]:
        yield b"data: {}\n\n"

    def _find(self, name: str) -> None:
        if name not in self.adapters and name != BASE:
            raise AdapterNotFound(f"model {name!r} does not exist; known models: {BASE}, {', '.join(self.adapters)}")


def access_of(**acme: Any) -> AccessSettings:
    settings = TenantSettings(sources=("/models/acme", "hub:acme"), **acme)
    return AccessSettings(tenants={"acme": settings, "globex": TenantSettings()}, max_body_bytes=1024)


def application(fleet: Fleet, access: AccessSettings, keys: dict[str, str]) -> FastAPI:
    """The routes behind the gate, and some that nobody has declared."""
    quotas = TenantQuotas(access.tenants)
    text = ",".join(f"{who}={key}" for who, key in keys.items())
    app = http_app(as_tenants_see(cast(Service, fleet), BASE, access, quotas))
    app.include_router(fleet_routes(cast(FleetService, fleet)))
    add_fleet_page(app, fleet.events)

    @app.get("/v1/new")
    async def new() -> dict[str, str]:
        return {"seen": "all"}

    router = APIRouter(prefix="/v1/more")

    @router.get("/{name:path}")
    async def more(name: str) -> dict[str, str]:
        return {"seen": name}

    @app.get("/v1/broken")
    async def broken() -> None:
        raise RuntimeError("a secret")

    app.include_router(router)
    app.mount("/mounted", http_app(cast(Service, fleet)))
    keys_of = KeyStore(access, {"LORA_FLEET_KEYS": text} if text else {})
    app.add_middleware(Gate, keys=keys_of, quotas=quotas, max_body_bytes=access.max_body_bytes)
    return app


Connect = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


def connector(fleet: Fleet) -> Connect:
    """Makes clients of one application for each set of quotas."""
    apps: dict[str, FastAPI] = {}

    @asynccontextmanager
    async def connected(
        who: str | None = None, key: str | None = None, **acme: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        app = apps.setdefault(json.dumps(acme), application(fleet, access_of(**acme), KEYS))
        key = KEYS[who] if who is not None else key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("10.0.0.1", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://fleet", headers=headers) as client:
            yield client

    return connected


def completion(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "x", **fields}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "shared", "messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": completion("shared"),
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/load_lora_adapter": {"lora_name": "acme/b", "lora_path": "/models/acme/b"},
    "/v1/unload_lora_adapter": {"lora_name": "acme/a"},
    "/v1/pin_lora_adapter": {"lora_name": "acme/a"},
    "/v1/unpin_lora_adapter": {"lora_name": "acme/a"},
}
CHANGES = [path for path in BODIES if path.endswith("_lora_adapter")]
USES = [path for path in BODIES if path not in CHANGES]
READS = ["/v1/models", "/v1/models/shared"]
UNDECLARED = ["/v1/new", "/v1/more/a", "/mounted/v1/models", "/mounted/health", "/redoc", "/docs/oauth2-redirect"]


async def statuses(client: httpx.AsyncClient) -> dict[str, int]:
    """Of every route, asked once."""
    found = {path: (await client.post(path, json=body)).status_code for path, body in BODIES.items()}
    found |= {path: (await client.get(path)).status_code for path in (*READS, *UNDECLARED)}
    return found
