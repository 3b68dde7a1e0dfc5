"""One table from faults to HTTP answers, all in OpenAI's error envelope."""

import json
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from ray.serve.exceptions import BackPressureError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from deployments import request_id
from deployments.openai_api import error_body
from lora_core.errors import (
    AdapterError,
    AdapterLate,
    AdapterLost,
    AdapterNameTaken,
    AdapterNotFound,
    AdapterUnloaded,
    ConfigError,
    EngineError,
    InvalidAdapter,
    InvalidAdapterPath,
    InvalidRequest,
    KeyRefused,
    LoRADisabled,
    LoRAFleetError,
    NoReplica,
    NotPermitted,
    QueueFull,
    RateLimited,
    TryLater,
)
from lora_core.types import LoRAStatus

logger = logging.getLogger(__name__)


class Fault(NamedTuple):
    """How a kind of fault is answered."""

    status: int
    kind: str
    code: str | None = None


FAULTS: dict[type[Exception], Fault] = {
    InvalidRequest: Fault(400, "invalid_request_error"),
    InvalidAdapterPath: Fault(400, "invalid_request_error", "invalid_adapter_path"),
    InvalidAdapter: Fault(400, "invalid_request_error", "invalid_adapter"),
    AdapterNotFound: Fault(404, "invalid_request_error", "model_not_found"),
    AdapterNameTaken: Fault(409, "invalid_request_error", "name_taken"),
    # The adapter is still listed and the request was right: files on the server's side are missing or changed, and
    # putting them back, or loading the adapter again, lets the same request succeed.
    AdapterLost: Fault(503, "server_error", "adapter_lost"),
    # The request was overtaken by an unload or a replacement. Sent again, as OpenAI's client does after a 409, it gets
    # the new weights, or the 404 of a model that is gone.
    AdapterUnloaded: Fault(409, "invalid_request_error", "adapter_unloaded"),
    LoRADisabled: Fault(501, "invalid_request_error", "lora_disabled"),
    AdapterError: Fault(409, "invalid_request_error", "adapter_conflict"),
    ConfigError: Fault(500, "server_error"),
    EngineError: Fault(503, "server_error", "engine_unavailable"),
    KeyRefused: Fault(401, "authentication_error", "invalid_api_key"),
    NotPermitted: Fault(403, "permission_error", "not_permitted"),
    RateLimited: Fault(429, "rate_limit_error", "rate_limit_exceeded"),
    QueueFull: Fault(429, "rate_limit_error", "queue_full"),
    AdapterLate: Fault(503, "server_error", "adapter_late"),
    NoReplica: Fault(503, "server_error", "no_replica"),
    TryLater: Fault(503, "server_error", "try_later"),
    BackPressureError: Fault(429, "rate_limit_error", "too_many_requests"),
    LoRAFleetError: Fault(500, "server_error"),
}
"""From the most particular to the most general."""

INTERNAL = Fault(500, "server_error", "internal_error")

STATUS_ERRORS: dict[LoRAStatus, type[LoRAFleetError]] = {
    LoRAStatus.LOAD_NAME_EXISTS: AdapterNameTaken,
    LoRAStatus.UNLOAD_NAME_NONEXISTENT: AdapterNotFound,
    LoRAStatus.LOAD_INVALID_PATH: InvalidAdapterPath,
    LoRAStatus.LOAD_INVALID_ADAPTER: InvalidAdapter,
    LoRAStatus.PIN_NAME_NONEXISTENT: AdapterNotFound,
    LoRAStatus.PIN_ERROR: InvalidRequest,
    LoRAStatus.UNAVAILABLE: EngineError,
}
"""What a refused operation is raised as; statuses not named here are faults of the server."""


def fault_of(error: BaseException) -> tuple[Fault, dict[str, Any]]:
    """How to answer an exception: its fault, and the body. Unforeseen ones keep their text from the client."""
    for kind, fault in FAULTS.items():
        if isinstance(error, kind):
            return fault, error_body(str(error), kind=fault.kind, code=fault.code)
    message = f"internal error ({type(error).__name__}); the server's log has the details"
    return INTERNAL, error_body(message, kind=INTERNAL.kind, code=INTERNAL.code)


def retry_headers(error: BaseException) -> dict[str, str]:
    """`Retry-After`, in whole seconds, of a fault that says when sending the request again is worth while."""
    after_s: float | None = getattr(error, "retry_after_s", None)
    return {} if after_s is None else {"Retry-After": str(max(1, math.ceil(after_s)))}


def describe_validation(error: ValidationError | RequestValidationError) -> tuple[str, str | None]:
    """The faults of a body in one sentence, and the field the first one names."""
    faults = error.errors()
    if faults[0]["type"] == "json_invalid":
        return f"the body is not JSON: {faults[0]['ctx']['error']} (at character {faults[0]['loc'][-1]})", None
    if faults[0]["loc"] in ((), ("body",)) and faults[0]["type"] in _NOT_AN_OBJECT:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    parts = []
    for fault in faults[:MOST_TOLD]:
        where = _field(fault["loc"])
        sentence = fault["msg"].removeprefix("Value error, ") + _found(fault)
        parts.append(f"{where}: {sentence}" if where else sentence)
    if len(faults) > MOST_TOLD:
        parts.append(f"and {len(faults) - MOST_TOLD} more faults")
    return "; ".join(dict.fromkeys(parts)), _field(faults[0]["loc"]) or None


_NOT_AN_OBJECT = ("missing", "dict_type", "model_type", "model_attributes_type")
_NO_FIELD = ("body", "str", "int", "list", "NamedTool")


MOST_TOLD = 16
"""Faults of a body that its refusal names; the rest are counted."""

LONGEST_FOUND = 40
"""Characters of a wrong value that its refusal repeats."""

LONGEST_LOGGED = 1000
"""Characters of an error that its line in the log has."""


def _found(fault: Mapping[str, Any]) -> str:
    """What was there instead: a plain value, or the kind of another one; nothing where the sentence says it."""
    if fault["type"] in ("value_error", "missing", "too_long", "too_short"):
        return ""
    value = fault["input"]
    if isinstance(value, (dict, list)):
        return ", found an object" if isinstance(value, dict) else f", found a list of {len(value)}"
    # As JSON, in which the client wrote it; half of a surrogate pair is escaped.
    text = json.dumps(value, default=str)
    return f", found {text if len(text) <= LONGEST_FOUND else text[:LONGEST_FOUND] + '...'}"


def _field(loc: tuple[int | str, ...]) -> str:
    # Between a field's names stand those of the types it may have: "str", "list[...]", "constrained-str".
    return ".".join(
        str(part) for part in loc if isinstance(part, int) or (part.isidentifier() and part not in _NO_FIELD)
    )


class ErrorResponse(JSONResponse):
    """JSON of a message that may repeat half of a surrogate pair, which UTF-8 has no bytes for: it is escaped."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def install(app: FastAPI) -> None:
    """Make every error of `app` leave in the envelope."""

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(Exception)
    @app.exception_handler(LoRAFleetError)
    async def refused(request: Request, error: Exception) -> JSONResponse:
        # What nobody foresaw is answered outside of all that has been set for the request.
        with request_id.bound(request.scope):
            return error_response(error)


def error_response(error: Exception) -> JSONResponse:
    """The answer to a request that ended with this, in the envelope; a line of the log says so under the same id."""
    headers: Mapping[str, str] | None = None
    if isinstance(error, RequestValidationError):
        message, param = describe_validation(error)
        status, body = 400, error_body(message, kind="invalid_request_error", param=param)
    elif isinstance(error, HTTPException):
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        status, headers, body = error.status_code, error.headers, error_body(str(error.detail), kind=kind)
    else:
        fault, body = fault_of(error)
        status, headers = fault.status, {"WWW-Authenticate": "Bearer"} if fault.status == 401 else retry_headers(error)
    # As JSON: an id and a message may hold what a client sent.
    logger.warning("request %s: %d: %s", json.dumps(request_id.current()), status, json.dumps(body)[:LONGEST_LOGGED])
    return ErrorResponse(request_id.stamped(body), status, headers)
