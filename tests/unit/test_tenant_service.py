"""What each tenant sees, changes and uses up, over HTTP."""

import asyncio
import json
import threading
from contextlib import aclosing
from typing import cast

import httpx
import pytest

from cluster.callers import Caller
from cluster.quotas import TenantQuotas
from deployments import folder_looks
from deployments.caller_context import acting_as
from deployments.http_api import Service
from deployments.openai_api import ChatCompletionRequest
from deployments.tenant_service import as_tenants_see
from lora_core.errors import (
    AdapterLate,
    AdapterNameTaken,
    AdapterUnloaded,
    EngineDead,
    EngineError,
    EngineUnavailable,
    LoRAFleetError,
    RateLimited,
    RequestTimeout,
)
from lora_core.sources import AdapterSources
from tests.unit.gated_fleet import ADAPTERS, BASE, BODIES, CHANGES, Connect, Fleet, access_of, completion, connector


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def connect(fleet: Fleet) -> Connect:
    return connector(fleet)


async def test_a_tenant_sees_its_own_models_and_those_all_share(connect: Connect, fleet: Fleet) -> None:
    async with connect("acme") as client:
        answer = await client.get("/v1/models")
        cards = {card["id"]: card for card in answer.json()["data"]}
        assert set(cards) == {BASE, "shared", "acme/a", "canary", "acme/canary"}
        assert cards["acme/canary"]["targets"] == {"acme/a": 1.0}
        assert cards["acme/a"]["root"] == "/models/acme/a"
        assert "globex" not in answer.text
        for name in ("shared", "canary", BASE):
            assert "globex" not in (await client.get(f"/v1/models/{name}")).text
        assert "lora" in (await client.get("/v1/models/acme/a")).json()
    async with connect("operator") as client:
        assert {card["id"] for card in (await client.get("/v1/models")).json()["data"]} == {
            BASE, *ADAPTERS, *fleet.targets,
        }  # fmt: skip
        assert "globex/secret" in (await client.get("/v1/models/canary")).json()["targets"]
        assert "lora" in (await client.get("/v1/models/globex/secret")).json()


def without_ids(answer: httpx.Response, name: str) -> tuple[int, dict[str, str], str]:
    """An answer without what differs between any two requests."""
    body = answer.json()
    assert body.pop("request_id")
    headers = {key: value for key, value in answer.headers.items() if key != "content-length"}
    return answer.status_code, headers, json.dumps(body).replace(name, "NAME")


@pytest.mark.parametrize("who", ["acme", "acme:operator"])
async def test_forbidden_names_are_answered_as_unknown_ones_are(connect: Connect, who: str) -> None:
    answers: dict[str, list[tuple[int, dict[str, str], str]]] = {}
    async with connect(who) as client:
        for name in ("globex/secret", "globex/absent", "nobody/absent", "absent"):
            found = [
                await client.post("/v1/completions", json=completion(name)),
                await client.post("/v1/completions", json=completion(name, stream=True)),
                await client.post("/v1/chat/completions", json={**BODIES["/v1/chat/completions"], "model": name}),
                await client.post("/tokenize", json={"model": name, "prompt": "x"}),
                await client.post("/detokenize", json={"model": name, "tokens": [1]}),
                await client.get(f"/v1/models/{name}"),
            ]
            if who == "acme:operator" and "/" in name:
                found += [await client.post(path, json={"lora_name": name}) for path in CHANGES[1:]]
            assert {answer.status_code for answer in found} == {404}
            answers[name] = [without_ids(answer, name) for answer in found]
    assert answers["globex/secret"] == answers["globex/absent"] == answers["nobody/absent"]
    assert answers["absent"] == answers["globex/secret"][:6]
    assert "globex" not in str(list(answers.values()))


async def test_what_is_behind_a_shared_name_is_not_told(connect: Connect, fleet: Fleet) -> None:
    for stream in (False, True):
        bodies = {name: completion(name, stream=stream) for name in ("canary", "acme/canary", "shared")}
        fleet.fault = ""
        async with connect("acme") as client:
            answer = await client.post("/v1/completions", json=bodies["canary"])
            assert answer.status_code == 200
            assert '"model":"canary"' in answer.text.replace(": ", ":")
            assert "globex" not in answer.text
            own = await client.post("/v1/completions", json=bodies["acme/canary"])
            assert '"model":"acme/a"' in own.text.replace(": ", ":")
            fleet.fault = "adapter 'globex/secret': /models/globex/secret is gone"
            for name in ("canary", "shared"):
                refused = await client.post("/v1/completions", json=bodies[name])
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_lost")
                assert f"model {name!r} cannot be served now" in refused.json()["error"]["message"]
                assert "globex" not in refused.text
            told = await client.post("/v1/completions", json=bodies["acme/canary"])
            assert "is gone" in told.json()["error"]["message"], "of its own it is told all"
        async with connect("operator") as client:
            assert "is gone" in (await client.post("/v1/completions", json=bodies["shared"])).text


async def test_an_alias_of_ones_own_does_not_tell_of_others(connect: Connect, fleet: Fleet) -> None:
    fleet.targets["acme/canary"] = "globex/secret"
    async with connect("acme:operator") as client:
        for path in ("/v1/models", "/v1/models/acme/canary"):
            answer = await client.get(path)
            assert ("acme/canary" in answer.text, "globex" in answer.text) == (True, False)
        for fault in ("fault", "late_fault"):
            for stream in (False, True):
                setattr(fleet, fault, AdapterUnloaded("adapter 'globex/secret' was unloaded"))
                refused = await client.post("/v1/completions", json=completion("acme/canary", stream=stream))
                assert ("cannot be served now" in refused.text, "globex" in refused.text) == (True, False)
            setattr(fleet, fault, None)


@pytest.mark.parametrize("kind", [EngineDead, RequestTimeout, EngineUnavailable])
async def test_why_an_engine_cannot_answer_is_told_to_the_operator_alone(
    connect: Connect, fleet: Fleet, caplog: pytest.LogCaptureFixture, kind: type[EngineError]
) -> None:
    """A replica is stalled for the sake of one adapter, and all of its requests end."""
    why = "the replica is stalled: adapter 'globex/secret': its oldest request has made no progress for 130 s"
    for fault in ("fault", "late_fault"):
        setattr(fleet, fault, kind(why))
        for stream in (False, True):
            for name in ("acme/a", "shared", "canary", BASE):
                async with connect("acme") as client:
                    answer = await client.post("/v1/completions", json=completion(name, stream=stream))
                is_late = stream and fault == "late_fault"
                assert (answer.status_code, "engine_unavailable" in answer.text) == (200 if is_late else 503, True)
                assert ("could not answer this now" in answer.text, "globex" in answer.text) == (True, False)
            async with connect("operator") as client:
                assert why in (await client.post("/v1/completions", json=completion("acme/a", stream=stream))).text
        setattr(fleet, fault, None)
    assert why in caplog.text


async def test_an_alias_that_stands_for_ones_own_adapter_is_not_named(connect: Connect, fleet: Fleet) -> None:
    fleet.change_fault = AdapterNameTaken("adapter 'acme/a' was not unloaded: alias(es) 'globex/x' point to it")
    for who, is_told in (("acme:operator", False), ("operator", True)):
        async with connect(who) as client:
            answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "acme/a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "name_taken")
            assert ("globex" in answer.text) == is_told
            assert "'acme/a' was not unloaded" in answer.text
    assert "acme/a" in fleet.adapters


async def test_what_ended_a_replica_is_not_told_and_what_ended_ones_own_answer_is(
    connect: Connect, fleet: Fleet
) -> None:
    stalled = EngineDead("the replica is stalled: adapter 'globex/secret': its oldest request has made no progress")
    not_finite = {
        name: EngineError(f"LoRA adapter {name!r} gave logits that are not finite (NaN or infinity)")
        for name in ("globex/secret", "acme/a")
    }
    for fault, name, is_told in (
        (stalled, "acme/a", False),
        (stalled, BASE, False),
        (not_finite["globex/secret"], "canary", False),
        (not_finite["acme/a"], "acme/a", True),
        (not_finite["acme/a"], "acme/canary", True),
    ):
        for late in (False, True):
            for stream in (False, True):
                fleet.fault, fleet.late_fault = "" if late else copy_of(fault), copy_of(fault) if late else None
                async with connect("acme") as client:
                    refused = await client.post("/v1/completions", json=completion(name, stream=stream))
                assert (str(fault) in refused.text) == is_told
                assert ("could not answer this now" in refused.text) != is_told
                assert "globex" not in refused.text
    fleet.fault, fleet.late_fault = copy_of(stalled), None
    async with connect("operator") as client:
        assert str(stalled) in (await client.post("/v1/completions", json=completion("acme/a"))).text


def copy_of(fault: LoRAFleetError) -> LoRAFleetError:
    """A new one, as each request gets."""
    return type(fault)(str(fault))


async def test_when_to_come_back_is_told_and_not_what_for(connect: Connect, fleet: Fleet) -> None:
    fleet.fault = AdapterLate("adapter 'globex/secret' could not be brought to a slot", 7)
    async with connect("acme") as client:
        for stream in (False, True):
            for name, is_told in (("canary", False), ("acme/canary", True)):
                answer = await client.post("/v1/completions", json=completion(name, stream=stream))
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
                assert answer.json()["error"]["code"] == "adapter_late"
                assert ("globex" in answer.text) == is_told


async def test_a_tenants_operator_changes_its_own_adapters_alone(connect: Connect, fleet: Fleet) -> None:
    async with connect("acme:operator", pinned_slots=1) as client:
        for name in ("globex/secret", "globex/new", "shared", "new", BASE, "/acme/x"):
            body = {"lora_name": name, "lora_path": "/models/acme/x"}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 403
        for path in CHANGES[1:]:
            assert (await client.post(path, json={"lora_name": "shared"})).status_code == 403
            assert (await client.post(path, json={"lora_name": "globex/secret"})).status_code == 404
        assert (fleet.adapters, fleet.pins) == (ADAPTERS, set())
        loaded = await client.post(
            "/v1/load_lora_adapter", json={"lora_name": "acme/b", "lora_path": "/models/acme/../acme/b"}
        )
        assert loaded.status_code == 200
        assert fleet.calls == [("load", "acme/b", "/models/acme/b", True)]
        assert (await client.post("/v1/pin_lora_adapter", json={"lora_name": "acme/b"})).status_code == 200
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "acme/a"})).status_code == 200


@pytest.mark.parametrize(
    "path", ["/models/globex/secret", "/models/acme/../globex/secret", "/etc", "globex/x", "a/b@c"]
)
async def test_a_tenants_adapters_come_from_its_own_places(connect: Connect, fleet: Fleet, path: str) -> None:
    async with connect("acme:operator") as client:
        answer = await client.post("/v1/load_lora_adapter", json={"lora_name": "acme/b", "lora_path": path})
        assert answer.status_code == 400
        assert "/models/acme, hub:acme (access.tenants.acme.sources" in answer.json()["error"]["message"]
        hub = await client.post("/v1/load_lora_adapter", json={"lora_name": "acme/b", "lora_path": "acme/x@main"})
        assert hub.status_code == 200
    assert fleet.calls == [("load", "acme/b", "acme/x@main", True)]


def limits(answer: httpx.Response, limit: str, value: int) -> None:
    """Check that an answer is a refusal by this limit."""
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    message = answer.json()["error"]["message"]
    assert f"over {limit}, which is {value} for 'acme'" in message
    assert f"operator of this server can raise it (access.tenants.acme.{limit})" in message
    assert "globex" not in answer.text


async def test_a_tenants_path_on_storage_that_hangs_holds_up_nobody_else(
    connect: Connect, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(folder_looks, "PATIENCE_S", 0.2)
    monkeypatch.setattr(AdapterSources, "locate", lambda self, path: answers.wait(10) and path)
    async with connect("acme:operator") as client:
        load = asyncio.create_task(client.post("/v1/load_lora_adapter", json=BODIES["/v1/load_lora_adapter"]))
        await asyncio.sleep(0.01)
        assert (await client.get("/v1/models")).status_code == 200
        assert not load.done(), "nobody waited for it"
        refused = await load
        assert (refused.status_code, "has not answered" in refused.text) == (503, True)
        assert fleet.calls == []
        answers.set()


async def test_adapters_are_counted_those_under_way_too(connect: Connect, fleet: Fleet) -> None:
    fleet.go_on.clear()
    async with connect("acme:operator", adapters=3) as client:
        bodies = [{"lora_name": f"acme/{name}", "lora_path": "/models/acme/x"} for name in "bcdba"]
        tasks = [asyncio.create_task(client.post("/v1/load_lora_adapter", json=body)) for body in bodies]
        refused = await tasks[2]
        limits(refused, "adapters", 3)
        fleet.go_on.set()
        assert [task.result().status_code for task in (await asyncio.wait(tasks))[0] if task is not tasks[2]] == [
            200
        ] * 4
        limits(await client.post("/v1/load_lora_adapter", json=bodies[2]), "adapters", 3)
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "acme/b"})).status_code == 200
        assert (await client.post("/v1/load_lora_adapter", json=bodies[2])).status_code == 200


async def test_aliases_are_not_counted_as_adapters(connect: Connect, fleet: Fleet) -> None:
    async with connect("acme:operator", adapters=2) as client:
        load = {"lora_name": "acme/b", "lora_path": "/models/acme/x"}
        assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == 200
        limits(await client.post("/v1/load_lora_adapter", json={**load, "lora_name": "acme/c"}), "adapters", 2)


async def test_pins_are_counted(connect: Connect, fleet: Fleet) -> None:
    fleet.adapters["acme/b"] = "/models/acme/b"
    fleet.pins.add("globex/secret")
    async with connect("acme:operator", pinned_slots=1) as client:
        both = [client.post("/v1/pin_lora_adapter", json={"lora_name": name}) for name in ("acme/a", "acme/b")]
        first, second = await asyncio.gather(*both)
        assert first.status_code == 200
        limits(second, "pinned_slots", 1)
        assert (await client.post("/v1/pin_lora_adapter", json={"lora_name": "acme/a"})).status_code == 200, "again"
    async with connect("acme:operator") as client:
        limits(await client.post("/v1/pin_lora_adapter", json={"lora_name": "acme/b"}), "pinned_slots", 0)


async def test_requests_and_tokens_are_counted_and_others_are_not_held_up(connect: Connect) -> None:
    async with connect("acme", requests_per_minute=2) as client:
        for _ in range(2):
            assert (await client.get("/v1/models")).status_code == 200
        limits(await client.get("/v1/models"), "requests_per_minute", 2)
        assert (await client.get("/health", headers={"Authorization": ""})).status_code == 200
    async with connect("globex", requests_per_minute=2) as client:
        assert (await client.get("/v1/models")).status_code == 200
    async with connect("acme", tokens_per_minute=20) as client:
        # The prompt's 5 tokens and 2 of the answer each time, whatever was reserved.
        for stream in (False, True, False):
            answer = await client.post("/v1/completions", json=completion("acme/a", stream=stream, max_tokens=6))
            assert answer.status_code == 200
        limits(await client.post("/v1/completions", json=completion("acme/a", max_tokens=6)), "tokens_per_minute", 20)
        limits(
            await client.post("/v1/completions", json=completion("acme/a", max_tokens=6, stream=True)),
            "tokens_per_minute", 20,
        )  # fmt: skip


async def test_a_streams_tokens_count_as_they_come(fleet: Fleet) -> None:
    access = access_of(tokens_per_minute=6)
    quotas = TenantQuotas(access.tenants)
    service = as_tenants_see(cast(Service, fleet), BASE, access, quotas)
    # Nothing says how long its answer may be.
    chat = ChatCompletionRequest.model_validate({**BODIES["/v1/chat/completions"], "stream": True})
    with acting_as(Caller("acme")):
        async with aclosing(service.pieces(chat)) as pieces:
            await anext(pieces)
            with pytest.raises(RateLimited, match="over tokens_per_minute, which is 6"):
                quotas.charge("acme", 1)


async def test_requests_at_a_time_are_counted_to_their_end(connect: Connect, fleet: Fleet) -> None:
    fleet.go_on.clear()
    async with connect("acme", concurrent_requests=1) as client:
        first = asyncio.create_task(client.post("/v1/completions", json=completion("shared", stream=True)))
        await asyncio.sleep(0.01)
        limits(await client.get("/v1/models"), "concurrent_requests", 1)
        fleet.go_on.set()
        assert (await first).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
