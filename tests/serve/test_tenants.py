"""Keys and tenants on a real fleet: the tries of `make tenants`, what its description says of it, and request ids."""

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any, cast

import httpx
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.tenants.attempt import attempt
from tests.tenants.fleet import BASE, KEYS, TenantFleet, tenant_fleet

NUM_EXAMPLES = 15
"""Of each operation, by each of two keys."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantFleet]:
    with tenant_fleet(tmp_path_factory.mktemp("tenants")) as running:
        yield running


def test_nothing_of_another_tenant_is_seen_or_changed(fleet: TenantFleet) -> None:
    report = asyncio.run(attempt(fleet, 40))
    assert report.leaks == []
    assert report.num_tries > 1000


@pytest.mark.parametrize("who", ["operator", "acme:operator"])
def test_no_body_that_the_description_allows_is_a_fault_of_the_server(fleet: TenantFleet, who: str) -> None:
    schema = schemathesis.openapi.from_url(f"{fleet.url}/openapi.json")
    operations: list[Any] = [cast(Any, operation).ok() for operation in schema.get_all_operations()]
    assert len(operations) >= 11
    statuses: set[int] = set()
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(
            max_examples=NUM_EXAMPLES, deadline=None, database=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                # Left to chance, no name would be that of a model.
                case.body["model"] = BASE
            answer = case.call(headers={"Authorization": f"Bearer {KEYS[who]}"}, timeout=120)
            statuses.add(answer.status_code)
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()) == {"error", "request_id"}

        check()
    assert {200, 400, 404} <= statuses


def test_ids_of_requests_are_in_answers_headers_and_log(fleet: TenantFleet) -> None:
    mine = f"mine-{uuid.uuid4()}"
    with httpx.Client(base_url=fleet.url, headers={"Authorization": f"Bearer {KEYS['acme']}"}) as client:
        for headers in ({}, {"X-Request-Id": mine}):
            answer = client.get("/v1/models/absent", headers=headers)
            assert answer.headers.get_list("x-request-id") == [answer.json()["request_id"]]
        assert answer.json()["request_id"] == mine
        assert client.get("/v1/models").headers["x-request-id"]
        refused = client.get("/v1/fleet", headers={"X-Request-Id": mine, "Authorization": ""})
        assert (refused.status_code, refused.json()["request_id"]) == (401, mine)
    logs = [path.read_text(errors="replace") for path in fleet.log_folder.rglob("*") if path.is_file()]
    assert any(f'request "{mine}": 404' in text for text in logs)
    assert any(f'request "{mine}": 401' in text for text in logs)
    assert not any(key in text for key in KEYS.values() for text in logs)


def test_the_official_client_knows_what_went_wrong(fleet: TenantFleet) -> None:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="wrong-key-0123456789", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.request_id
        with pytest.raises(openai.NotFoundError):
            client.with_options(api_key=KEYS["acme"]).completions.create(model="globex/zebra-7f3a", prompt="x")
        models = client.with_options(api_key=KEYS["acme"]).models.list()
        assert {model.id for model in models} == {BASE, "common", "acme/own"}


def test_texts_to_tokens_and_back(fleet: TenantFleet) -> None:
    with httpx.Client(base_url=fleet.url, headers={"Authorization": f"Bearer {KEYS['acme']}"}, timeout=60) as client:
        text = "Grüße, 世界"
        tokens = client.post("/tokenize", json={"model": "acme/own", "prompt": text, "return_token_strs": True}).json()
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == len(text.encode())
        assert tokens["max_model_len"] > 0
        assert client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        answer = client.post("/tokenize", json=chat).json()
        written = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
        assert written == "<user>hi<assistant>"
        asked = client.post("/v1/chat/completions", json={"model": BASE, "max_tokens": 1, **chat}).json()
        assert asked["usage"]["prompt_tokens"] == answer["count"]
        bare = client.post("/tokenize", json={**chat, "add_generation_prompt": False}).json()
        assert bare["count"] == answer["count"] - len("<assistant>")
        for body, named in (
            ({"tokens": [9999]}, "tokens[0] is 9999"), ({"tokens": [-1]}, "tokens.0"), ({"tokens": "x"}, "tokens"),
        ):  # fmt: skip
            refused = client.post("/detokenize", json=body)
            assert refused.status_code == 400
            assert named in refused.json()["error"]["message"]
        for wrong in ({}, {"prompt": "x", **chat}, {"prompt": "\ud800"}):
            headers = {"Content-Type": "application/json"}
            assert client.post("/tokenize", content=json.dumps(wrong), headers=headers).status_code == 400
