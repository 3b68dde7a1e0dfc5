"""The routes that change what is served, over a service that answers as told: bodies, statuses, envelopes."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from cluster.entry import AdapterEntry
from cluster.fleet import AdapterInFleet, Alias, AliasInFleet, LoadOutcome, Retry
from deployments.adapter_card import status_body
from deployments.generation import GenerateChunk
from deployments.http_api import events, http_app
from deployments.http_errors import STATUS_ERRORS, fault_of
from deployments.openai_api import CompletionRequest, GenerationRequest, TextRequest, TokensRequest
from lora_core.errors import (
    AdapterLate,
    AdapterLost,
    AdapterUnloaded,
    InvalidRequest,
    LoRAFleetError,
    NoReplica,
    QueueFull,
    RateLimited,
    TryLater,
)
from lora_core.types import LoadReport, LoRAStatus

REPORT = LoadReport(
    generation=7, content_hash="abc", num_modules=3, ranks={4: 1, 8: 2}, num_bytes=4096, phases_s={"read": 0.5}
)


class Recorder:
    """Notes each operation, and ends it with one outcome or error."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.outcome = LoadOutcome(status=LoRAStatus.SUCCESS, message="done", per_replica={"r0": "success: done"})
        self.error: Exception | None = None
        self.replicas, self.on_demand = 1, False

    async def _take(self, *call: Any) -> LoadOutcome:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return self.outcome

    async def load_adapter(
        self, lora_name: str, lora_path: str, load_inplace: bool = False, path_is_final: bool = False
    ) -> LoadOutcome:
        return await self._take("load", lora_name, lora_path, load_inplace)

    async def unload_adapter(self, lora_name: str) -> LoadOutcome:
        return await self._take("unload", lora_name)

    async def pin_adapter(self, lora_name: str) -> LoadOutcome:
        return await self._take("pin", lora_name)

    async def unpin_adapter(self, lora_name: str) -> LoadOutcome:
        return await self._take("unpin", lora_name)

    async def aliases(self) -> list[AliasInFleet]:
        return []

    async def set_alias(self, alias: str, targets: dict[str, float]) -> Alias:
        await self._take("set alias", alias, targets)
        return Alias(name=alias, targets=targets, epoch=7)

    async def roll_back_alias(self, alias: str) -> Alias:
        await self._take("roll back alias", alias)
        return Alias(name=alias, targets={}, epoch=7)

    async def remove_alias(self, alias: str) -> int:
        await self._take("remove alias", alias)
        return 7

    async def set_min_copies(self, lora_name: str, min_copies: int) -> AdapterEntry:
        await self._take("min copies", lora_name, min_copies)
        return AdapterEntry(name=lora_name, path="/", generation=7, state="ready", min_copies=min_copies)

    async def collect(self, request: GenerationRequest) -> list[GenerateChunk]:
        await self._take("collect", request.model)
        return [GenerateChunk(text="a", token_ids=[1])]

    async def pieces(self, request: GenerationRequest) -> AsyncGenerator[GenerateChunk, None]:
        await self._take("pieces", request.model)
        yield GenerateChunk(text="a", token_ids=[1])

    async def models(self, is_wanted: Callable[[str], bool] | None = None) -> dict[str, dict[str, Any]]:
        return {}

    async def pinned(self) -> set[str]:
        return set()

    async def tokenize(self, request: TextRequest) -> dict[str, Any]:
        return {"count": len(request.prompt or "")}

    async def detokenize(self, request: TokensRequest) -> dict[str, Any]:
        return {"prompt": "a" * len(request.tokens)}

    async def model(self, name: str) -> dict[str, Any]:
        return {"id": name}

    async def num_replicas(self) -> int:
        return self.replicas

    async def starts_on_demand(self) -> bool:
        return self.on_demand


@pytest.fixture
def service() -> Recorder:
    return Recorder()


@pytest.fixture
async def http(service: Recorder) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(http_app(service)), base_url="http://fleet") as client:
        yield client


async def test_a_fleet_without_replicas_is_healthy_only_where_the_next_request_starts_one(
    http: httpx.AsyncClient, service: Recorder
) -> None:
    answers = []
    for service.replicas, service.on_demand in ((1, False), (0, False), (0, True)):
        answer = await http.get("/health")
        answers.append((answer.status_code, answer.json()["status"], answer.json()["replicas"]))
    assert answers == [(200, "ok", 1), (503, "no replica is ready", 0), (200, "ok", 0)]


async def test_each_route_asks_for_its_operation(http: httpx.AsyncClient, service: Recorder) -> None:
    load = {"lora_name": "a", "lora_path": "/a"}
    for body in (load, {**load, "load_inplace": False}, {**load, "load_inplace": True}):
        assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 200
    for operation in ("unload", "pin", "unpin"):
        answer = await http.post(f"/v1/{operation}_lora_adapter", json={"lora_name": "a"})
        told = {name: value for name, value in answer.json().items() if name != "vllm_message"}
        assert told == {"status": "success", "message": "done", "replicas": {"r0": "success: done"}}
    assert service.calls == [
        ("load", "a", "/a", False),
        ("load", "a", "/a", False),
        ("load", "a", "/a", True),
        ("unload", "a"),
        ("pin", "a"),
        ("unpin", "a"),
    ]


async def test_vllms_bodies_are_read_as_they_are(http: httpx.AsyncClient, service: Recorder) -> None:
    load = {"lora_name": "a", "lora_path": "/a", "load_inplace": True, "is_3d_lora_weight": False}
    loaded = await http.post("/v1/load_lora_adapter", json=load)
    # What scripts that were written for vLLM look at.
    assert (loaded.status_code, "Success: LoRA adapter 'a' added successfully." in loaded.text) == (200, True)
    for number in (3, None):
        body = {"lora_name": "a", "lora_int_id": number}
        unloaded = await http.post("/v1/unload_lora_adapter", json=body)
        assert unloaded.status_code == 200
        assert "Success: LoRA adapter 'a' removed successfully." in unloaded.text
    assert service.calls == [("load", "a", "/a", True), ("unload", "a"), ("unload", "a")]


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        ("load", {"lora_name": "a", "lora_path": "/a", "load_inplace": "yes"}, "load_inplace"),
        ("load", {"lora_name": "a", "lora_path": "/a", "is_3d_lora_weight": True}, "is_3d_lora_weight is not supp"),
        ("load", {"lora_name": "a", "lora_path": "/a", "inplace": True}, "inplace"),
        ("pin", {}, "lora_name"),
        ("unpin", {"lora_name": ""}, "lora_name"),
        ("pin", {"lora_name": "a", "lora_path": "/a"}, "lora_path"),
    ],
)
async def test_wrong_bodies_are_refused_by_field(
    http: httpx.AsyncClient, service: Recorder, route: str, body: dict[str, Any], named: str
) -> None:
    answer = await http.post(f"/v1/{route}_lora_adapter", json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert service.calls == []


@pytest.mark.parametrize(
    ("noops", "warning"),
    [
        ([], None),
        (["layers.0.q_proj"], "1 of 3 modules change nothing: on a fixed input their output is the base's"),
        (["layers.0.q_proj", "layers.1.q_proj", "lm_head"], "this adapter changes nothing"),
    ],
)
async def test_a_load_answers_with_what_it_found(
    http: httpx.AsyncClient, service: Recorder, noops: list[str], warning: str | None
) -> None:
    report = {**{name: getattr(REPORT, name) for name in REPORT.__struct_fields__}, "noop_modules": noops}
    service.outcome = LoadOutcome(status=LoRAStatus.SUCCESS, message="loaded", epoch=7, report=LoadReport(**report))
    answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
    found = answer.json()["report"]
    warnings = found.pop("warnings")
    assert found == {
        "generation": 7,
        "content_hash": "abc",
        "num_modules": 3,
        "ranks": {"4": 1, "8": 2},
        "num_bytes": 4096,
        "noop_modules": noops,
        "phases_s": {"read": 0.5},
    }
    assert len(warnings) == (warning is not None)
    assert warning is None or warnings[0].startswith(warning)


async def test_a_load_that_some_replicas_have_yet_to_follow_is_no_plain_success(
    http: httpx.AsyncClient, service: Recorder
) -> None:
    told = {"r0": "success: done", "r1": "load_error: no space left on device"}
    service.outcome = LoadOutcome(status=LoRAStatus.PARTIAL, message="on 1 of 2", per_replica=told, behind=["r1"])
    answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
    assert answer.status_code == 207
    assert answer.json() == {"status": "partial", "message": "on 1 of 2", "replicas": told, "behind": ["r1"]}


def test_an_adapters_card_tells_its_state_in_the_fleet() -> None:
    entry = AdapterEntry(name="a", path="/a", generation=7, state="ready", content_hash="abc", pinned=True)
    retry = Retry(reason="other files", num_attempts=2, in_s=1.5)
    replicas = {"r0": "slot", "r1": "refused: other files"}
    status = AdapterInFleet(entry=entry, report=None, replicas=replicas, retries={"r1": retry})
    assert status_body(status) == {
        "generation": 7,
        "content_hash": "abc",
        "pinned": True,
        "min_copies": 1,
        "replicas": replicas,
        "retries": {"r1": {"reason": "other files", "num_attempts": 2, "in_s": 1.5}},
        "report": None,
    }


@pytest.mark.parametrize(
    ("status", "code", "http_status"),
    [
        (LoRAStatus.LOAD_NAME_EXISTS, "name_taken", 409),
        (LoRAStatus.UNLOAD_NAME_NONEXISTENT, "model_not_found", 404),
        (LoRAStatus.LOAD_INVALID_PATH, "invalid_adapter_path", 400),
        (LoRAStatus.LOAD_INVALID_ADAPTER, "invalid_adapter", 400),
        (LoRAStatus.PIN_NAME_NONEXISTENT, "model_not_found", 404),
        (LoRAStatus.PIN_ERROR, None, 400),
        (LoRAStatus.UNAVAILABLE, "engine_unavailable", 503),
        (LoRAStatus.LOAD_ERROR, None, 500),
        (LoRAStatus.UNLOAD_ERROR, None, 500),
        (LoRAStatus.UNSPECIFIED_ERROR, None, 500),
    ],
)
def test_every_status_has_its_answer(status: LoRAStatus, code: str | None, http_status: int) -> None:
    error = STATUS_ERRORS.get(status, LoRAFleetError)("in so many words")
    fault, body = fault_of(error)
    assert (fault.status, body["error"]["code"]) == (http_status, code)
    assert body["error"]["message"] == "in so many words"


@pytest.mark.parametrize(
    ("error", "code", "http_status"),
    [(AdapterLost("gone"), "adapter_lost", 503), (AdapterUnloaded("over"), "adapter_unloaded", 409)],
)
async def test_adapters_that_vanish_under_a_request(
    http: httpx.AsyncClient, service: Recorder, error: Exception, code: str, http_status: int
) -> None:
    service.error = error
    for stream in (False, True):
        answer = await http.post("/v1/completions", json={"model": "a", "prompt": "x", "stream": stream})
        assert answer.status_code == http_status
        assert (answer.json()["error"]["code"], answer.json()["error"]["message"]) == (code, str(error))


async def test_an_unload_in_the_middle_of_a_stream_is_an_error_event() -> None:
    async def overtaken() -> AsyncGenerator[GenerateChunk, None]:
        yield GenerateChunk(text="a", token_ids=[1])
        raise AdapterUnloaded("adapter 'a' was unloaded")

    pieces = overtaken()
    request = CompletionRequest.model_validate({"model": "a", "prompt": "x", "stream": True})
    written = [event async for event in events(request, await anext(pieces), pieces)]
    assert '"adapter_unloaded"' in written[-1]
    assert "adapter 'a' was unloaded" in written[-1]


@pytest.mark.parametrize(
    ("error", "status", "code", "after"),
    [
        (QueueFull("256 requests are waiting", 2.1), 429, "queue_full", "3"),
        (AdapterLate("not in a slot", 60), 503, "adapter_late", "60"),
        (NoReplica("no replica", 0.2), 503, "no_replica", "1"),
        (RateLimited("over 600 requests per minute", 59.5), 429, "rate_limit_exceeded", "60"),
        (TryLater("not yet", 4), 503, "try_later", "4"),
    ],
)
async def test_what_only_time_can_help_says_when_to_come_back(
    http: httpx.AsyncClient, service: Recorder, error: TryLater, status: int, code: str, after: str
) -> None:
    service.error = error
    for stream in (False, True):
        answer = await http.post("/v1/completions", json={"model": "a", "prompt": "b", "stream": stream})
        assert (answer.status_code, answer.headers["Retry-After"]) == (status, after)
        assert answer.json()["error"]["code"] == code
        assert answer.json()["error"]["message"] == str(error)


async def test_a_refusal_may_repeat_what_utf_8_has_no_bytes_for(http: httpx.AsyncClient, service: Recorder) -> None:
    """As a chat template's may that quotes a message."""
    service.error = InvalidRequest("the base model's chat template refuses these messages: no '\ud800' after 'ü'")
    answer = await http.post("/v1/completions", json={"model": "a", "prompt": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == str(service.error)
