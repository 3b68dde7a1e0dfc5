"""The HTTP routes: bodies in, JSON and server-sent events out, every error in OpenAI's envelope."""

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from importlib.metadata import version
from typing import Any, Protocol

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from starlette.responses import JSONResponse, Response, StreamingResponse

from cluster.fleet import LoadOutcome
from deployments import http_errors, request_id
from deployments.adapter_card import outcome_body
from deployments.alias_api import AliasService, alias_routes
from deployments.answer import Answer
from deployments.generation import GenerateChunk
from deployments.openai_api import (
    AdapterNameRequest,
    ChatCompletionRequest,
    CompletionRequest,
    ErrorBody,
    GenerationRequest,
    LoadAdapterRequest,
    TextRequest,
    TokensRequest,
)
from lora_core.types import LoRAStatus

logger = logging.getLogger(__name__)


class Service(AliasService, Protocol):
    """What the routes call; `deployments.ingress.Ingress` is one."""

    async def collect(self, request: GenerationRequest) -> list[GenerateChunk]: ...

    def pieces(self, request: GenerationRequest) -> AsyncGenerator[GenerateChunk, None]: ...

    async def load_adapter(
        self, lora_name: str, lora_path: str, load_inplace: bool = False, path_is_final: bool = False
    ) -> LoadOutcome: ...

    async def unload_adapter(self, lora_name: str) -> LoadOutcome: ...

    async def pin_adapter(self, lora_name: str) -> LoadOutcome: ...

    async def unpin_adapter(self, lora_name: str) -> LoadOutcome: ...

    async def models(self, is_wanted: Callable[[str], bool] | None = None) -> dict[str, dict[str, Any]]: ...

    async def model(self, name: str) -> dict[str, Any]: ...

    async def pinned(self) -> set[str]: ...

    async def tokenize(self, request: TextRequest) -> dict[str, Any]: ...

    async def detokenize(self, request: TokensRequest) -> dict[str, Any]: ...

    async def num_replicas(self) -> int: ...

    async def starts_on_demand(self) -> bool: ...


def http_app(service: Service) -> FastAPI:
    """The routes of one service."""
    app = FastAPI(
        title="lora-fleet",
        description="One base model in memory, a LoRA adapter per request.",
        version=version("lora-fleet"),
        # Behind a proxy that speaks TLS they lead elsewhere; `deployments.gate` makes do without.
        redirect_slashes=False,
        # Told to readers of the description; `deployments.gate` has looked at the key before.
        dependencies=[Depends(HTTPBearer(auto_error=False))],
        responses={
            "4XX": {"model": ErrorBody, "description": "Refused, and why."},
            "5XX": {"model": ErrorBody, "description": "A fault of the server."},
        },
    )
    http_errors.install(app)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: ChatCompletionRequest) -> Response:
        """Continue a conversation."""
        return await respond(service, request)

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest) -> Response:
        """Continue a text."""
        return await respond(service, request)

    @app.post("/tokenize")
    async def tokenize(request: TextRequest) -> dict[str, Any]:
        """The token ids of a text or chat."""
        return await service.tokenize(request)

    @app.post("/detokenize")
    async def detokenize(request: TokensRequest) -> dict[str, Any]:
        """The text of token ids."""
        return await service.detokenize(request)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The base model and every adapter."""
        return {"object": "list", "data": list((await service.models()).values())}

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> dict[str, Any]:
        """One model."""
        return await service.model(model_id)

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: LoadAdapterRequest) -> JSONResponse:
        """Load an adapter on every replica, or replace it in place; 207 where some have yet to get it."""
        outcome = await service.load_adapter(request.lora_name, request.lora_path, request.load_inplace)
        if outcome.status is LoRAStatus.PARTIAL:
            return JSONResponse(outcome_body(outcome), 207)
        return JSONResponse(outcome_body(outcome, f"Success: LoRA adapter '{request.lora_name}' added successfully."))

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: AdapterNameRequest) -> JSONResponse:
        """Unload an adapter from every replica."""
        outcome = await service.unload_adapter(request.lora_name)
        return JSONResponse(outcome_body(outcome, f"Success: LoRA adapter '{request.lora_name}' removed successfully."))

    @app.post("/v1/pin_lora_adapter")
    async def pin_lora_adapter(request: AdapterNameRequest) -> JSONResponse:
        """Keep an adapter in a slot of every replica."""
        return JSONResponse(outcome_body(await service.pin_adapter(request.lora_name)))

    @app.post("/v1/unpin_lora_adapter")
    async def unpin_lora_adapter(request: AdapterNameRequest) -> JSONResponse:
        """Let an adapter's slot be taken again."""
        return JSONResponse(outcome_body(await service.unpin_adapter(request.lora_name)))

    app.include_router(alias_routes(service))

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health() -> JSONResponse:
        """200 while at least one replica can serve, or the next request starts the first one."""
        replicas = await service.num_replicas()
        is_ok = replicas > 0 or await service.starts_on_demand()
        status = {"status": "ok" if is_ok else "no replica is ready", "replicas": replicas}
        return JSONResponse(status, 200 if is_ok else 503)

    return app


async def respond(service: Service, request: GenerationRequest) -> Response:
    """Answer whole or as events; a refusal raises before anything is sent, so that it has an HTTP status."""
    if not request.stream:
        return JSONResponse(Answer(request).whole(await service.collect(request)))
    pieces = service.pieces(request)
    first = await anext(pieces)
    return StreamingResponse(events(request, first, pieces), media_type="text/event-stream")


async def events(
    request: GenerationRequest, first: GenerateChunk, rest: AsyncGenerator[GenerateChunk, None]
) -> AsyncIterator[str]:
    """Write an answer as server-sent events.

    A fault in the middle becomes an event with OpenAI's `error` object, and ends the stream; only a complete answer is
    followed by `[DONE]`. When the client leaves, `rest` is closed, which ends the request in its engine.
    """
    async with aclosing(rest):
        try:
            async for chunk in Answer(request).chunks(_resume(first, rest)):
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        except Exception as error:
            body = request_id.stamped(http_errors.fault_of(error)[1])
            logger.warning("a stream ended early: %s: %s", type(error).__name__, json.dumps(body))
            yield f"data: {json.dumps(body)}\n\n"
        else:
            yield "data: [DONE]\n\n"


async def _resume(first: GenerateChunk, rest: AsyncIterator[GenerateChunk]) -> AsyncIterator[GenerateChunk]:
    yield first
    async for piece in rest:
        yield piece
