"""Traces of requests on a real fleet, as a collector receives them."""

import itertools
import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from deployments.launcher import Served, deployed
from deployments.local_cluster import free_port
from tests.engine.byte_model import byte_model
from tests.factories import make_adapter
from tests.serve.collector import Collector, collector

CONFIG = Path(__file__).parents[2] / "cluster" / "config.yaml"

ENGINE = {"queue", "prefill", "decode"}
INSIDE = {"attempt", "replica", *ENGINE}
CHAT = "POST /v1/chat/completions"


@pytest.fixture(scope="module")
def received() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def traced(base: Path, received: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = yaml.safe_load(CONFIG.read_text())
    (application,) = config["applications"]
    application["args"] = {
        "model": str(base),
        "model_name": "tiny",
        "engine": {"dtype": "float32", "device": "cpu", "kv_cache_tokens": 4096, "num_threads": 1},
        "lora_config": {"enable_lora": True, "max_num_loras": 4, "max_lora_rank": 8},
        "tracing": {"otlp_endpoint": received.url},
    }
    engine = next(one for one in application["deployments"] if one["name"] == "EngineReplica")
    engine["autoscaling_config"] = {"min_replicas": 1, "max_replicas": 1}
    path = tmp_path_factory.mktemp("traces") / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with deployed(path, port=free_port(), num_cpus=4) as served:
        yield served


def ask(served: Served, trace: str, *, flags: str = "01", model: str = "tiny", **fields: object) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello."}]
    body = {"model": model, "messages": messages, "max_tokens": 4, "ignore_eos": True, **fields}
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-{flags}", "X-Request-Id": f"mine-{trace}"}
    return httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=120)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_followed_from_its_callers_span_to_the_engines_steps(
    traced: Served, received: Collector, base: Path, tmp_path: Path, stream: bool
) -> None:
    trace, name = secrets.token_hex(16), f"cold-{stream}"
    adapter = make_adapter(base, tmp_path / name, r=2, targets=("q_proj",), seed=int(stream))
    loaded = httpx.post(
        f"{traced.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(adapter)}, timeout=120
    )
    assert loaded.status_code == 200, loaded.text
    assert ask(traced, trace, model=name, stream=stream).status_code == 200
    spans = received.trace(trace, lambda names: names >= {CHAT, *INSIDE})
    names = {span.id: name for name, span in spans.items()}
    assert {name: names.get(span.parent, "") for name, span in spans.items()} == {
        CHAT: "", "attempt": CHAT, "replica": "attempt",
        "queue": "replica", "slot": "queue", "prefill": "replica", "decode": "replica",
    }  # fmt: skip
    assert spans[CHAT].parent == "00f067aa0ba902b7", "the client's own span"
    in_time = [spans[name] for name in ("slot", "prefill", "decode")]
    assert spans["queue"].start_ns == spans["slot"].start_ns <= spans["slot"].end_ns <= spans["queue"].end_ns
    assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(in_time))
    assert spans["queue"].end_ns == spans["prefill"].start_ns
    assert spans["prefill"].end_ns == spans["decode"].start_ns
    assert all(span.start_ns <= span.end_ns for span in spans.values())
    assert spans["attempt"].attributes["lora_fleet.adapter"] == name
    assert spans["attempt"].attributes["lora_fleet.replica"] == spans["replica"].process
    assert spans[CHAT].attributes["lora_fleet.request_id"] == f"mine-{trace}"
    assert spans[CHAT].attributes["http.response.status_code"] == 200
    assert spans["replica"].attributes["gen_ai.usage.output_tokens"] == 4
    assert spans["decode"].attributes["lora_fleet.tokens"] == 4
    assert not any(span.is_error for span in spans.values())


def test_each_of_several_answers_has_spans_of_its_own(traced: Served, received: Collector) -> None:
    trace = secrets.token_hex(16)
    assert ask(traced, trace, n=2).status_code == 200
    received.trace(trace, lambda names: names >= {CHAT, *INSIDE})
    decodes = [span for span in received.spans if span.trace == trace and span.name == "decode"]
    assert {span.attributes["lora_fleet.answer"] for span in decodes} == {0, 1}


def test_a_refusal_has_no_spans_of_a_replica(traced: Served, received: Collector) -> None:
    trace = secrets.token_hex(16)
    assert ask(traced, trace, model="absent").status_code == 404
    spans = received.trace(trace, lambda names: CHAT in names)
    assert spans.keys() == {CHAT}
    assert spans[CHAT].attributes["http.response.status_code"] == 404


def test_what_its_caller_does_not_trace_is_not_traced(traced: Served, received: Collector) -> None:
    untraced, after = secrets.token_hex(16), secrets.token_hex(16)
    assert ask(traced, untraced, flags="00").status_code == 200
    assert ask(traced, after).status_code == 200
    received.trace(after, lambda names: names >= {CHAT, *INSIDE})
    assert not [span for span in received.spans if span.trace == untraced]


def test_a_request_without_a_trace_begins_one(traced: Served, received: Collector) -> None:
    mine = secrets.token_hex(16)
    httpx.get(f"{traced.url}/v1/models", headers={"X-Request-Id": mine}, timeout=30).raise_for_status()
    httpx.get(f"{traced.url}/health", timeout=30).raise_for_status()
    assert ask(traced, secrets.token_hex(16)).status_code == 200
    trace = secrets.token_hex(16)
    assert ask(traced, trace).status_code == 200
    received.trace(trace, lambda names: names >= {CHAT, *INSIDE})
    (found,) = [span for span in received.spans if span.attributes.get("lora_fleet.request_id") == mine]
    assert (found.name, found.parent) == ("GET /v1/models", "")
    assert not [span for span in received.spans if span.attributes.get("url.path") == "/health"]
