"""A canary on the running application: versions, an alias over them that is moved and rolled back, and its files."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from deployments.launcher import Served
from deployments.succession import num_joined

DEMO = Path(__file__).parents[3] / "cluster" / "demo" / "adapters"
VERSIONS = {"tone@1": str(DEMO / "pirate"), "tone@2": str(DEMO / "json")}


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
        yield client


async def answered_by(http: httpx.AsyncClient, num_requests: int) -> Counter[str]:
    body = {"model": "tone", "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(num_requests)))
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    return Counter(answer.json()["model"] for answer in answers)


async def alias(http: httpx.AsyncClient, operation: str, **fields: Any) -> httpx.Response:
    return await http.post(f"/v1/{operation}_lora_alias", json={"alias": "tone", **fields})


async def test_a_canary_is_tried_taken_back_and_taken_over(http: httpx.AsyncClient) -> None:
    for name, path in VERSIONS.items():
        loaded = await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        assert loaded.status_code == 200, loaded.text
    assert (await alias(http, "set", targets={"tone@1": 1})).status_code == 200
    assert await answered_by(http, 4) == {"tone@1": 4}
    assert (await alias(http, "set", targets={"tone@1": 1, "tone@2": 1})).status_code == 200
    assert (await answered_by(http, 24)).keys() == VERSIONS.keys()
    refused = await http.post("/v1/unload_lora_adapter", json={"lora_name": "tone@2"})
    assert (refused.status_code, "'tone' point to it" in refused.text) == (409, True)
    assert (await alias(http, "rollback")).json()["targets"] == {"tone@1": 1.0}
    assert await answered_by(http, 8) == {"tone@1": 8}
    streamed = {"model": "tone", "prompt": "Hello", "max_tokens": 2, "stream": True}
    async with http.stream("POST", "/v1/completions", json=streamed) as events:
        text = "".join([piece async for piece in events.aiter_text()])
    assert '"model": "tone@1"' in text
    card = (await http.get("/v1/models/tone")).json()
    assert (card["id"], card["targets"]) == ("tone", {"tone@1": 1.0})
    handle = serve.get_app_handle("llm")
    moved = await asyncio.to_thread(lambda: handle.set_alias.remote("tone", {"tone@2": 1.0}).result(timeout_s=60))
    assert moved.targets == {"tone@2": 1.0}
    assert await answered_by(http, 8) == {"tone@2": 8}
    copies = await http.post("/v1/set_lora_copies", json={"lora_name": "tone@2", "min_copies": 2})
    assert copies.status_code == 200, copies.text
    assert (await http.get("/v1/models/tone@2")).json()["lora"]["min_copies"] == 2
    removed = await alias(http, "remove")
    assert removed.status_code == 200
    gone = await http.post("/v1/completions", json={"model": "tone", "prompt": "Hello", "max_tokens": 1})
    assert gone.status_code == 404
    for name in VERSIONS:
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": name})).status_code == 200


async def test_a_moved_alias_outlives_the_router_actor(http: httpx.AsyncClient, served: Served) -> None:
    name, path = "kept@1", VERSIONS["tone@1"]
    assert (await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})).status_code == 200
    set_to = {"alias": "kept", "targets": {name: 3}}
    moved = (await http.post("/v1/set_lora_alias", json=set_to)).json()
    (actor,) = [
        found["name"]
        for found in ray.util.list_named_actors(all_namespaces=True)
        if found["name"].startswith("SERVE_DEPLOYMENT_ACTOR")
    ]
    assert await num_joined(actor) > 0, "as the router actor of another version would ask"
    assert await num_joined("of no such actor") == 0
    ray.kill(ray.get_actor(actor, namespace="serve"), no_restart=True)
    body = {"model": "kept", "prompt": "Hello", "max_tokens": 1}
    answer = await http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["model"]) == (200, name), "without the actor, the last table serves"
    (found,) = (await http.get("/v1/lora_aliases")).json()["data"]
    assert (found["targets"], found["epoch"]) == (moved["targets"], moved["epoch"])
    assert (await http.post("/v1/remove_lora_alias", json={"alias": "kept"})).status_code == 200
    assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": name})).status_code == 200
