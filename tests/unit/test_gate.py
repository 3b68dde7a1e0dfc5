"""What every HTTP request passes first: keys, routes, sizes and ids."""

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from fastapi.routing import APIRoute

from cluster.access import AccessSettings
from deployments import exact_replica
from deployments.alias_api import AliasService, alias_routes
from deployments.caller_context import current_caller
from deployments.fleet_api import FleetService, fleet_routes
from deployments.request_id import new_call_id
from deployments.route_access import DECLARED
from tests.unit.gated_fleet import (
    ADAPTERS,
    CHANGES,
    KEYS,
    READS,
    UNDECLARED,
    USES,
    Connect,
    Fleet,
    access_of,
    application,
    completion,
    connector,
    statuses,
)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def connect(fleet: Fleet) -> Connect:
    return connector(fleet)


@pytest.mark.parametrize("key", [None, "", "wrong-key-000000000", "acme", KEYS["acme"][:-1], f"{KEYS['acme']} x"])
async def test_without_a_right_key_nothing_opens(connect: Connect, fleet: Fleet, key: str | None) -> None:
    async with connect(key=key) as client:
        assert set((await statuses(client)).values()) == {401}
        answer = await client.get("/v1/models")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/openapi.json")).status_code == 200
        assert (await client.get("/docs")).status_code == 200
    assert fleet.adapters == ADAPTERS
    assert not fleet.calls


async def test_a_key_is_taken_as_a_bearers_alone(connect: Connect) -> None:
    key = KEYS["operator"]
    async with connect() as client:
        for headers in (
            [("Authorization", key)], [("Authorization", f"Basic {key}")], [("X-API-Key", key)],
            [("Authorization", f"Bearer {key}"), ("Authorization", f"Bearer {key}")],
        ):  # fmt: skip
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        assert (await client.get(f"/v1/models?api_key={key}")).status_code == 401
        assert (await client.get("/v1/models", headers={"Authorization": f"bearer  {key} "})).status_code == 200


async def test_which_keys_open_which_routes(connect: Connect) -> None:
    async with connect("acme", pinned_slots=1) as client:
        found = await statuses(client)
        assert {found[path] for path in USES + READS} == {200}
        assert {found[path] for path in CHANGES + UNDECLARED} == {403}
    async with connect("acme:operator", pinned_slots=1) as client:
        found = await statuses(client)
        assert {found[path] for path in USES + READS + CHANGES if path != "/v1/pin_lora_adapter"} <= {200, 404}
        assert {found[path] for path in UNDECLARED} == {403}
    async with connect("operator", pinned_slots=1) as client:
        found = await statuses(client)
        assert {found[path] for path in (*USES, *READS, *UNDECLARED)} == {200}


async def test_every_declared_route_exists(fleet: Fleet) -> None:
    app = application(fleet, access_of(), KEYS)
    exist = {
        (method, getattr(route, "path", "")) for route in app.routes for method in getattr(route, "methods", None) or ()
    }
    assert set(DECLARED) <= exist


@pytest.mark.parametrize(("who", "status"), [("acme", 403), ("acme:operator", 403), (None, 401)])
async def test_routes_over_the_whole_fleet_are_its_operators(
    connect: Connect, fleet: Fleet, who: str | None, status: int
) -> None:
    added = [*alias_routes(cast(AliasService, fleet)).routes, *fleet_routes(cast(FleetService, fleet)).routes]
    routes = [route for route in added if isinstance(route, APIRoute)]
    asked = {(method, route.path_format) for route in routes for method in route.methods or ()}
    assert asked >= {("POST", "/v1/set_lora_alias"), ("POST", "/v1/set_lora_copies"), ("GET", "/v1/fleet")}
    described = application(fleet, access_of(), KEYS).openapi()["paths"]
    assert asked <= {(method.upper(), path) for path, methods in described.items() for method in methods}
    async with connect(who) as client:
        for method, path in asked:
            body = {"alias": "acme/x", "targets": {"acme/a": 1}, "lora_name": "acme/a", "min_copies": 1}
            answer = await client.request(method, path.replace("{name}", "acme/a"), json=body)
            assert answer.status_code == status, (method, path)


SPELLINGS = (
    "/v1/nothing", "/", "//v1/new", "/v1/new/", "/v1//new", "/V1/NEW", "/v1/%6eew", "/v1/models/../new", "/v1/new;x",
    "/mounted", "/mounted/", "/v1/completions/../new", "/%2e%2e/v1/new", "/v1/models/%2e%2e/new", "/v1/more/%2e",
)  # fmt: skip


async def test_no_spelling_of_a_path_opens_more(connect: Connect) -> None:
    async with connect("acme:operator") as client:
        for path in SPELLINGS:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "TRACE", "FROB"):
                url = httpx.URL("http://fleet").copy_with(raw_path=path.encode())
                answer = await client.request(method, url)
                assert answer.status_code in (403, 404), (method, path)
                assert "seen" not in answer.text
                assert "globex" not in answer.text


@pytest.mark.parametrize("who", ["operator", "acme"])
async def test_large_bodies_are_413_with_the_limit(connect: Connect, who: str) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 64

    async with connect(who) as client:
        for content in (b"x" * 1025, parts()):
            answer = await client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 413
            assert "more than 1024 bytes (access.max_body_bytes" in answer.json()["error"]["message"]
        fits = json.dumps(completion("shared")).encode().ljust(1024)
        headers = {"Content-Type": "application/json"}
        assert (await client.post("/v1/completions", content=fits, headers=headers)).status_code == 200


async def test_ids_are_in_errors_and_logs_and_calls(
    connect: Connect, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"X-Request-Id": "mine-42"}
    async with connect("operator") as client:
        for answer in (
            await client.get("/v1/models/absent", headers=headers),
            await client.get("/v1/broken", headers=headers),
            await client.post("/v1/completions", json={}, headers=headers),
            await client.get("/v1/models", headers={**headers, "Authorization": ""}),
        ):
            assert answer.json()["request_id"] == "mine-42"
            assert f'request "mine-42": {answer.status_code}: ' in caplog.text
            assert "a secret" not in answer.text
        assert (await client.get("/v1/models/absent")).json()["request_id"]
        await client.post("/v1/completions", json=completion("shared"), headers=headers)
        await client.post("/v1/completions", json=completion("shared"), headers={"X-Request-Id": "x" * 999})
    assert fleet.call_ids[0].startswith("mine-42.")
    assert len(fleet.call_ids[1]) < 100
    assert new_call_id() != new_call_id()


@pytest.mark.parametrize(
    ("client", "host", "opens"),
    [
        ("127.0.0.1", "127.0.0.1:8000", True), ("127.0.0.1", "localhost:8000", True), ("::1", "[::1]:8000", True),
        ("::ffff:127.0.0.1", "LOCALHOST", True), ("10.0.0.1", "127.0.0.1:8000", False),
        ("127.0.0.1", "rebound.example:8000", False), ("127.0.0.1", "127.0.0.1.rebound.example", False),
        ("", "localhost", False), ("testclient", "localhost", False),
    ],
)  # fmt: skip
async def test_without_keys_the_machine_itself_may_do_everything_and_nobody_else_anything(
    fleet: Fleet, client: str, host: str, opens: bool
) -> None:
    app = application(fleet, AccessSettings(), {})
    transport = httpx.ASGITransport(app, client=(client, 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet", headers={"Host": host}) as http:
        for path in ("/v1/models", "/v1/new", "/v1/models/globex/secret", "/health"):
            answer = await http.get(path)
            assert answer.status_code == (200 if opens else 403)
            assert opens or "no keys" in answer.json()["error"]["message"]


@pytest.mark.parametrize("who", [None, "operator"])
async def test_websockets_are_closed(fleet: Fleet, who: str | None) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if who is None else [(b"authorization", f"Bearer {KEYS[who]}".encode())]
    scope = {
        "type": "websocket",
        "path": "/v1/models",
        "headers": headers,
        "query_string": b"",
        "client": ("127.0.0.1", 5),
    }
    await application(fleet, access_of(), KEYS)(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_calls_of_other_actors_are_the_operators() -> None:
    assert current_caller().is_fleet_operator


async def test_only_the_fleets_operator_chooses_the_replica_that_answers(connect: Connect, fleet: Fleet) -> None:
    body, header = {"model": "shared", "prompt": "hi"}, {exact_replica.HEADER: "r1"}
    async with connect(key=KEYS["operator"]) as client:
        for headers in (header, {}):
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert fleet.replicas == ["r1", ""]
    for key in (KEYS["acme"], KEYS["acme:operator"]):
        async with connect(key=key) as client:
            answer = await client.post("/v1/completions", json=body, headers=header)
            assert answer.status_code == 403
            assert exact_replica.HEADER in answer.json()["error"]["message"]
    assert len(fleet.replicas) == 2


async def test_packed_bodies_are_refused_unread(connect: Connect, fleet: Fleet) -> None:
    async with connect("operator") as client:
        content = gzip.compress(json.dumps(completion("shared")).encode())
        for coding in ("gzip", "br", "GZIP, identity"):
            headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
            answer = await client.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 415, answer.text
            assert answer.headers["accept-encoding"] == "identity"
            assert coding.lower() in answer.json()["error"]["message"]
        plain = {"Content-Encoding": "identity"}
        assert (await client.post("/v1/completions", json=completion("shared"), headers=plain)).status_code == 200
    assert len(fleet.call_ids) == 1


@pytest.mark.parametrize("who", ["acme", "operator"])
async def test_a_slash_too_much_changes_nothing_for_what_is_posted(connect: Connect, who: str) -> None:
    async with connect(who) as client:
        for slashes in ("/", "//"):
            answer = await client.post("/v1/completions" + slashes, json=completion("shared"))
            assert answer.status_code == 200, answer.text
        assert (await client.get("/v1/models/shared/")).status_code == 404, "a name may end with a slash"
    async with connect("acme") as client:
        assert (await client.post("/v1/set_lora_alias/", json={})).status_code == 403, "and opens nothing more"
        assert (await client.post("/", json={})).status_code == 404


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_of_another_kind_is_refused_with_the_kind_that_is_read(connect: Connect, kind: str | None) -> None:
    """A page of another site can make its reader's browser send these, and no JSON."""
    async with connect("acme") as client:
        headers = {} if kind is None else {"Content-Type": kind}
        content = json.dumps(completion("shared")).encode()
        answer = await client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400
        assert "sent with Content-Type: application/json" in answer.json()["error"]["message"]
        assert answer.headers["content-type"] == "application/json"


async def test_other_methods_are_refused_with_those_there_are(connect: Connect) -> None:
    async with connect("operator") as client:
        for method in ("OPTIONS", "PUT", "HEAD", "GET"):
            answer = await client.request(method, "/v1/completions")
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
            assert "access-control-allow-origin" not in answer.headers
        assert "Method Not Allowed" in (await client.put("/v1/completions")).json()["error"]["message"]
