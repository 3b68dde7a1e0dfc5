"""HTTP as its users know it: the official client, the routes, and each refusal with its status and reason."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import torch
from pydantic import BaseModel

from cluster.demo.base_model import prepare
from deployments.launcher import Served
from tests.factories import make_adapter
from tests.reference import ADAPTERS, DEMO_ADAPTERS, QUESTIONS, Reference
from tests.serve.app.conftest import BASE

QUESTION = QUESTIONS[0]


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=120, max_retries=0) as openai_client:
        yield openai_client


def chat(model: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 24, **fields}


def test_official_client_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    answers = {}
    for model in (BASE, *DEMO_ADAPTERS):
        whole = client.chat.completions.create(**chat(model))
        stream = client.chat.completions.create(**chat(model, stream=True, stream_options={"include_usage": True}))
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        answers[model] = whole.choices[0].message.content
        assert text == answers[model]
        streamed, asked_first = chunks[-1].usage, whole.usage
        assert streamed is not None
        assert asked_first is not None
        assert (streamed.prompt_tokens, streamed.completion_tokens) == (
            asked_first.prompt_tokens,
            asked_first.completion_tokens,
        )
        assert whole.model == model
        assert whole.choices[0].finish_reason in ("stop", "length")
    assert len(set(answers.values())) == 4, answers
    assert set(json.loads(answers["json"] or "")) == {"topic", "answer", "confidence"}


def test_official_client_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=BASE, prompt="The capital of France is", max_tokens=8, temperature=0)
    chunks = list(client.completions.create(
        model=BASE, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
    ))  # fmt: skip
    assert "Paris" in whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8


def test_several_prompts_are_answered_as_each_alone(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time", "Roses are red,"] * 5
    for model in (BASE, "pirate"):
        fields: dict[str, Any] = {"model": model, "max_tokens": 4, "temperature": 0}
        together = client.completions.create(prompt=prompts, **fields)
        alone = [client.completions.create(prompt=prompt, **fields).choices[0].text for prompt in prompts[:4]]
        assert [choice.text for choice in together.choices] == alone * 5
        assert [choice.index for choice in together.choices] == list(range(20))
        streamed = dict.fromkeys(range(20), "")
        for chunk in client.completions.create(prompt=prompts, stream=True, **fields):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert list(streamed.values()) == alone * 5


class Capital(BaseModel, extra="forbid"):
    country: Literal["France", "Spain"]
    is_large: bool


def test_official_client_parses_answers_into_classes(client: openai.OpenAI) -> None:
    for model in (BASE, "json"):
        answer = client.chat.completions.parse(**chat(model, max_tokens=60), response_format=Capital)
        assert isinstance(answer.choices[0].message.parsed, Capital)


def test_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    for kind, change in (
        (openai.NotFoundError, {"model": "absent"}),
        (openai.BadRequestError, {"temperature": 9}),
        (openai.BadRequestError, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (openai.BadRequestError, {"max_tokens": 10_000}),
    ):
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                client.chat.completions.create(**{**chat(BASE, stream=stream), **change})
            body = caught.value.response.json()
            assert caught.value.request_id == body["request_id"] == caught.value.response.headers["x-request-id"]
            assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("absent")


def test_the_id_of_a_refused_request_is_in_its_log(served: Served, http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=chat("absent"), headers={"X-Request-Id": "looked-for-7c1d"})
    assert (answer.headers["x-request-id"], answer.json()["request_id"]) == ("looked-for-7c1d",) * 2
    deadline = time.monotonic() + 20
    while "looked-for-7c1d" not in served.log.read_text(errors="replace") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert 'request "looked-for-7c1d": 404' in served.log.read_text(errors="replace")


def test_tokens_equal_peft(http: httpx.Client, reference: Reference) -> None:
    for model in (BASE, *DEMO_ADAPTERS):
        expected = reference.tokens(None if model == BASE else model, QUESTION, 24)
        answer = http.post("/v1/chat/completions", json=chat(model, return_token_ids=True)).json()
        assert answer["choices"][0]["token_ids"] == expected, model


def test_seed_repeats_and_stop_strings_stop(http: httpx.Client) -> None:
    sampled = chat(BASE, temperature=1.0, top_p=0.9, top_k=50, seed=11)
    texts = {http.post("/v1/chat/completions", json=sampled).json()["choices"][0]["message"]["content"] for _ in "ab"}
    assert len(texts) == 1
    body = {"model": BASE, "prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 32, "stop": [" 9", "10"]}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"].endswith(",")
    assert "9" not in choice["text"]


def test_models_are_listed_with_root_and_parent(client: openai.OpenAI, http: httpx.Client) -> None:
    cards = {model.id: model for model in client.models.list()}
    assert set(cards) >= {BASE, *DEMO_ADAPTERS}
    pirate = http.get("/v1/models/pirate")
    assert pirate.status_code == 200
    assert pirate.json()["parent"] == BASE
    assert pirate.json()["root"] == str(ADAPTERS / "pirate")
    assert http.get(f"/v1/models/{BASE}").json()["parent"] is None
    assert http.get("/v1/models/absent").status_code == 404


def test_health(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok", "replicas": 2}


def test_load_use_unload(http: httpx.Client, tmp_path: Path) -> None:
    folder = make_adapter(prepare(), tmp_path / "extra", r=4, targets=("q_proj", "v_proj"), seed=5)
    load, began = {"lora_name": "extra", "lora_path": str(folder)}, int(time.time())
    loaded = http.post("/v1/load_lora_adapter", json=load)
    assert loaded.status_code == 200, loaded.text
    assert len(loaded.json()["replicas"]) == 2
    assert "Success: LoRA adapter 'extra' added successfully." in loaded.text, "as vLLM says it"
    assert http.post("/v1/chat/completions", json=chat("extra")).status_code == 200
    assert began <= http.get("/v1/models/extra").json()["created"] <= time.time()
    assert http.post("/v1/load_lora_adapter", json=load).status_code == 200, "the same again is no conflict"
    other = http.post("/v1/load_lora_adapter", json={**load, "lora_path": str(ADAPTERS / "json")})
    assert other.status_code == 409
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "extra"}).status_code == 200
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "extra"}).status_code == 404
    assert http.post("/v1/chat/completions", json=chat("extra")).status_code == 404
    assert "extra" not in {model["id"] for model in http.get("/v1/models").json()["data"]}


def broken_adapters(folder: Path) -> dict[str, Path]:
    """One adapter for each way to be refused."""
    base = prepare()

    def copy(name: str) -> Path:
        return Path(shutil.copytree(ADAPTERS / "pirate", folder / name))

    no_config = copy("no-config")
    (no_config / "adapter_config.json").unlink()
    broken_json = copy("broken-json")
    (broken_json / "adapter_config.json").write_text("{")
    pickled = copy("pickled")
    (pickled / "adapter_model.safetensors").unlink()
    torch.save({}, pickled / "adapter_model.bin")
    unknown_target = copy("unknown-target")
    config = json.loads((unknown_target / "adapter_config.json").read_text())
    (unknown_target / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["x_proj"]}))
    from safetensors.torch import load_file, save_file

    weights = load_file(unknown_target / "adapter_model.safetensors")
    save_file(
        {key.replace("q_proj", "x_proj"): value for key, value in weights.items()},
        unknown_target / "adapter_model.safetensors",
    )
    wrong_shape = copy("wrong-shape")
    save_file(
        {key: value[..., :-8].contiguous() if "lora_A" in key else value for key, value in weights.items()},
        wrong_shape / "adapter_model.safetensors",
    )
    high_rank = make_adapter(base, folder / "high-rank", r=32, targets=("q_proj",), seed=6)
    return {
        "adapter_config.json": no_config, "JSON": broken_json, ".bin": pickled, "x_proj": unknown_target,
        "568": wrong_shape, "16": high_rank, "nowhere": folder / "nowhere",
    }  # fmt: skip


def test_bad_adapters_are_refused_and_leave_nothing(http: httpx.Client, tmp_path: Path) -> None:
    for named, folder in broken_adapters(tmp_path).items():
        answer = http.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(folder)})
        assert answer.status_code == 400, answer.text
        assert named in answer.json()["error"]["message"], answer.text
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "bad"}).status_code == 404
    good = http.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(ADAPTERS / "pirate")})
    assert good.status_code == 200, "a refused name can be loaded rightly at once"
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "bad"}).status_code == 200
    assert http.post("/v1/chat/completions", json=chat("pirate")).status_code == 200


@pytest.mark.parametrize("name", [BASE, "pirate"])
def test_taken_names_conflict(http: httpx.Client, name: str) -> None:
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(ADAPTERS / "telegram")})
    assert answer.status_code == 409
    assert name in answer.json()["error"]["message"]


def test_unknown_model_names_the_known_ones(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=chat("piratte"))
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert all(name in message for name in ("piratte", BASE, *DEMO_ADAPTERS))


def test_context_length_is_refused_with_both_numbers(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": BASE, "prompt": [1] * 2000, "max_tokens": 100})
    assert answer.status_code == 400
    assert "2000" in answer.json()["error"]["message"]
    assert "2048" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "JSON"),
        ("[]", ""),
        (json.dumps({"model": BASE}), "messages"),
        (json.dumps({**chat(BASE), "temperature": 9}), "temperature"),
        (json.dumps({**chat(BASE), "max_tokens": "many"}), "max_tokens"),
        (json.dumps({**chat(BASE), "frobnicate": 1}), "frobnicate"),
    ],
)
def test_malformed_bodies_are_400_in_the_envelope(http: httpx.Client, content: str, named: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]


def test_unknown_route_is_404_in_the_envelope(http: httpx.Client) -> None:
    answer = http.get("/v1/nothing")
    assert answer.status_code == 404
    assert "message" in answer.json()["error"]
