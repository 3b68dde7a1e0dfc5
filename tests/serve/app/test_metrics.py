"""Every query of the dashboard, by a real Prometheus that scrapes the real fleet under load."""

import asyncio
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.demo.base_model import prepare
from deployments.launcher import Served
from tests.factories import make_adapter
from tests.serve.app.conftest import BASE, MAX_WAITING
from tests.serve.prometheus import GRAFANA, command, prometheus

DASHBOARD = json.loads((GRAFANA / "lora_fleet.json").read_text())

WINDOW = "30s"
"""What Grafana puts for `$__rate_interval`, which is four scrapes long or more."""

QUESTION = "Tell me of the sea, in a few words, and then of the land."

EXTRA = [f"metrics-{index}" for index in range(4)]
"""Adapters beside those that are served: more than the four slots hold."""


def expressions() -> dict[str, str]:
    """Of each target of each panel."""
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    targets = {f"{panel['title']} {one['refId']}": one["expr"] for panel in panels for one in panel["targets"]}
    return {
        name: query.replace("$__rate_interval", WINDOW).replace("$adapter", ".*") for name, query in targets.items()
    }


async def burst(url: str, model: str, count: int) -> list[int]:
    """Status codes of so many requests at once, each with a text of its own to compute."""
    bodies = [
        {"model": model, "messages": [{"role": "user", "content": f"{number} of {count}."}], "max_tokens": 1}
        for number in range(count)
    ]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        answers = await asyncio.gather(*(client.post(f"{url}/v1/chat/completions", json=body) for body in bodies))
    return [answer.status_code for answer in answers]


@contextmanager
def load(url: str, models: list[str]) -> Iterator[None]:
    """One request after another within the block, streamed and not, each model in its turn."""
    stopped = threading.Event()

    def run() -> None:
        turn = 0
        with httpx.Client(timeout=120) as client:
            while not stopped.is_set():
                turn += 1
                body = {
                    "model": models[turn % len(models)],
                    "messages": [{"role": "user", "content": QUESTION}],
                    "max_tokens": 6,
                    "stream": turn % 2 == 0,
                }
                answer = client.post(f"{url}/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                time.sleep(0.05)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(120)


@pytest.fixture
def models(served: Served, tmp_path: Path) -> Iterator[list[str]]:
    for seed, name in enumerate(EXTRA):
        path = make_adapter(prepare(), tmp_path / name, r=2, targets=("q_proj",), seed=seed)
        body = {"lora_name": name, "lora_path": str(path)}
        httpx.post(f"{served.url}/v1/load_lora_adapter", json=body, timeout=120).raise_for_status()
    yield [BASE, "pirate", "json", *EXTRA]
    for name in EXTRA:
        httpx.post(f"{served.url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=120).raise_for_status()


def num_errors(page: str) -> float:
    """Answers that ended by an error, of all adapters, as a page of metrics counts them."""
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    return sum(
        one.value
        for one in samples
        if one.name == "vllm:request_success_total" and one.labels["finished_reason"] == "error"
    )


def test_every_query_of_the_dashboard_finds_data(served: Served, models: list[str], tmp_path: Path) -> None:
    found: dict[str, list[float]] = {}
    # Of replicas that other tests have killed.
    errors_before = num_errors(httpx.get(f"{served.url}/metrics", timeout=30).text)
    with prometheus(tmp_path, served.url) as server, load(served.url, models):
        # Far more than may wait for one adapter, in either process of the ingress.
        codes = asyncio.run(burst(served.url, "pirate", 8 * MAX_WAITING))
        assert {200, 429} == set(codes)
        deadline = time.monotonic() + 90
        while missing := {name: query for name, query in expressions().items() if not found.get(name)}:
            assert time.monotonic() < deadline, f"no data for {missing}; targets: {server.get('/api/v1/targets')}"
            found |= {name: server.query(query) for name, query in missing.items()}
            time.sleep(1)
        for variable in DASHBOARD["templating"]["list"]:
            if variable["type"] == "query":
                ((metric, label),) = re.findall(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
                assert server.query(f"count by ({label}) ({metric})")
        rules = [rule for group in server.get("/api/v1/rules")["groups"] for rule in group["rules"]]
        assert {rule["health"] for rule in rules} == {"ok"}, rules
        firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
        assert "NoReplica" not in firing
        assert all(abs(value) < float("inf") for values in found.values() for value in values)
        assert server.query("max(lora_fleet_replicas)") == [2.0]
        assert server.query('count(vllm:lora_requests_info{max_lora="4"})') == [2.0]
        errors = server.query('sum(vllm:request_success_total{finished_reason="error"})')
        assert sum(errors) == errors_before, "what was sent here was answered, or refused before any replica"


def test_the_page_is_as_prometheus_wants_it(served: Served) -> None:
    answer = httpx.get(f"{served.url}/metrics", timeout=30)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.text))
    series = [(one.name, tuple(sorted(one.labels.items()))) for family in families for one in family.samples]
    assert len(series) == len(set(series)), "a series is on the page once"
    # `check metrics` finds fault with names too; those of vLLM's series are vLLM's.
    checked = subprocess.run(
        [command("promtool"), "check", "metrics"], input=answer.text, capture_output=True, text=True, check=False
    )
    own = [line for line in checked.stderr.splitlines() if not line.startswith("vllm:")]
    assert not own, own


def test_the_dashboard_shows_all_that_is_documented() -> None:
    documented = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    rows = [line.split("|")[1] for line in documented.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`((?:lora_fleet|vllm)[\w:]+)`", row)}
    shown = {name for query in expressions().values() for name in re.findall(r"(?:lora_fleet|vllm)[\w:]+", query)}
    assert len(names) > 30
    # What is asked of a histogram are its buckets; and what has sets of adapters as labels is for other programs.
    suffixes = ("", "_total", "_bucket")
    missing = {name for name in names if not any(name + suffix in shown for suffix in suffixes)}
    assert missing == {"vllm:lora_requests_info"}


def test_the_alarms_are_rules() -> None:
    subprocess.run([command("promtool"), "check", "rules", GRAFANA / "alerts.yml"], check=True, capture_output=True)


def test_the_alarms_ask_for_what_there_is() -> None:
    """Some never have data in a fleet that is well: their names are looked for in what documents them."""
    documented = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    rules: list[dict[str, Any]] = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        for name in re.findall(r"(?:lora_fleet|vllm)[\w:]+", rule["expr"]):
            assert f"`{name.removesuffix('_total')}`" in documented, name
            assert f"`{rule['alert']}`" in documented, rule["alert"]
