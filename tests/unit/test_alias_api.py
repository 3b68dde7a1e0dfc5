"""Aliases, least copies and versions over HTTP, on a real router with replicas that are asyncio tasks."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deployments import http_errors
from deployments.alias_api import alias_routes
from deployments.router import AdapterRouter
from tests.unit.router_fleet import Replica, fleet, make_router


@pytest.fixture
async def router() -> AsyncIterator[AdapterRouter]:
    router = make_router(num_slots=3)
    async with fleet(router, Replica(router, "r0"), Replica(router, "r1")):
        for name in ("tuned@1", "tuned@2", "other"):
            await router.load(name, f"/{name}")
        yield router


@pytest.fixture
async def http(router: AdapterRouter) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    http_errors.install(app)
    app.include_router(alias_routes(router))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://fleet") as client:
        yield client


async def test_an_alias_is_set_moved_rolled_back_and_removed(http: httpx.AsyncClient, router: AdapterRouter) -> None:
    first = await http.post("/v1/set_lora_alias", json={"alias": "tuned", "targets": {"tuned@1": 1}})
    assert (first.status_code, first.json()["targets"]) == (200, {"tuned@1": 1.0})
    again = await http.post("/v1/set_lora_alias", json={"alias": "tuned", "targets": {"tuned@1": 7.5}})
    assert again.json() == first.json(), "the same shares: nothing was moved"
    canary = await http.post("/v1/set_lora_alias", json={"alias": "tuned", "targets": {"tuned@1": 90, "tuned@2": 10}})
    assert canary.json()["targets"] == {"tuned@1": 0.9, "tuned@2": 0.1}
    assert canary.json()["epoch"] > first.json()["epoch"]
    (listed,) = (await http.get("/v1/lora_aliases")).json()["data"]
    before = {"targets": first.json()["targets"], "epoch": first.json()["epoch"]}
    assert listed == {**canary.json(), "object": "lora_alias", "before": [before]}
    back = await http.post("/v1/rollback_lora_alias", json={"alias": "tuned"})
    assert (back.status_code, back.json()["targets"]) == (200, {"tuned@1": 1.0})
    assert back.json()["epoch"] > canary.json()["epoch"]
    assert (await router.table()).aliases["tuned"].targets == {"tuned@1": 1.0}
    further = await http.post("/v1/rollback_lora_alias", json={"alias": "tuned"})
    assert (further.status_code, "has not been moved" in further.text) == (400, True)
    removed = await http.post("/v1/remove_lora_alias", json={"alias": "tuned"})
    assert (removed.status_code, (await http.get("/v1/lora_aliases")).json()["data"]) == (200, [])
    assert (await router.table()).aliases == {}
    for operation in ("rollback", "remove"):
        assert (await http.post(f"/v1/{operation}_lora_alias", json={"alias": "tuned"})).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"alias": "x", "targets": {}}, 400, "has 0 targets; expected 1 to 16"),
        ({"alias": "x", "targets": {f"a{i}": 1 for i in range(17)}}, 400, "has 17 targets; expected 1 to 16"),
        ({"alias": "x", "targets": {"other": 0}}, 400, "1 weight(s) sum to 0"),
        ({"alias": "x", "targets": {"other": -1}}, 400, "other"),
        ({"alias": "x", "targets": {"other": True}}, 400, "other"),
        ({"alias": "x", "targets": {"other": "1"}}, 400, "other"),
        ({"alias": "x", "targets": {"other": 10**400}}, 400, "other"),
        (
            {"alias": "x", "targets": {"tuned@9": 1}},
            400,
            "no adapter named 'tuned@9' is loaded; versions of 'tuned': 1, 2",
        ),
        ({"alias": "x", "targets": {"ghost": 1}}, 400, "loaded: other, tuned@1, tuned@2"),
        ({"alias": "other", "targets": {"tuned@1": 1}}, 409, "'other' is an adapter"),
        ({"alias": "base", "targets": {"other": 1}}, 409, "base model's name"),
        ({"alias": "a\nb", "targets": {"other": 1}}, 400, "the alias's name"),
        ({"alias": "", "targets": {"other": 1}}, 400, "alias"),
        ({"alias": "x"}, 400, "targets"),
        ({"alias": "x", "target": "other", "targets": {"other": 1}}, 400, "target"),
    ],
)
async def test_an_alias_that_cannot_be_is_refused_with_the_numbers(
    http: httpx.AsyncClient, router: AdapterRouter, body: dict[str, Any], status: int, named: str
) -> None:
    epoch = router._registry.epoch
    answer = await http.post("/v1/set_lora_alias", json=body)
    assert (answer.status_code, named in answer.json()["error"]["message"]) == (status, True), answer.text
    assert router._registry.epoch == epoch
    assert (await router.table()).aliases == {}


async def test_an_adapter_that_an_alias_needs_stays_and_its_name_is_the_aliases(router: AdapterRouter) -> None:
    await router.set_alias("live", {"tuned@1": 1.0})
    kept = await router.unload("tuned@1")
    assert (kept.status.value, "'live' point to it" in kept.message) == ("load_name_exists", True)
    for in_place in (False, True):
        taken = await router.load("live", "/x", in_place)
        assert (taken.status.value, "is an alias" in taken.message) == ("load_name_exists", True)
    await router.set_alias("live", {"tuned@2": 1.0})
    assert (await router.unload("tuned@1")).status.value == "success"


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"lora_name": "other", "min_copies": 2}, 200, "at least 2 replica(s)"),
        ({"lora_name": "other", "min_copies": 0}, 400, "min_copies"),
        ({"lora_name": "other", "min_copies": 3}, 400, "is 3, and there are 2 replica(s)"),
        ({"lora_name": "tuned@9", "min_copies": 2}, 404, "versions of 'tuned': 1, 2"),
        ({"lora_name": "other", "min_copies": "2"}, 400, "min_copies"),
    ],
)
async def test_least_copies(
    http: httpx.AsyncClient, router: AdapterRouter, body: dict[str, Any], status: int, named: str
) -> None:
    answer = await http.post("/v1/set_lora_copies", json=body)
    assert (answer.status_code, named in answer.text) == (status, True), answer.text
    assert (await router.table()).adapters["other"].min_copies == (2 if status == 200 else 1)


async def test_claims_beyond_the_slots_are_refused_with_the_numbers(
    http: httpx.AsyncClient, router: AdapterRouter
) -> None:
    # Two replicas of three slots, of which one each stays free: four can be claimed.
    for name in ("other", "tuned@1"):
        assert (await http.post("/v1/set_lora_copies", json={"lora_name": name, "min_copies": 2})).status_code == 200
    third = await http.post("/v1/set_lora_copies", json={"lora_name": "tuned@2", "min_copies": 2})
    assert (third.status_code, "6 least copies would take 6 slots, and at most 4" in third.text) == (400, True)
    pin = await router.pin("tuned@2")
    assert (pin.status.value, "would take 6 slots, and at most 4" in pin.message) == ("pin_error", True)
    assert (await router.pin("other")).status.value == "success", "its copies are what a pin gives it anyway"
