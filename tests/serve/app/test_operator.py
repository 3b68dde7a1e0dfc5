"""The operator's view of the real fleet: routes, commands, another actor's calls, and what Prometheus finds."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import ray
from ray import serve
from typer.testing import CliRunner, Result

from cluster.demo.base_model import prepare
from cluster.status import AdapterReport, FleetReport, Page
from deployments.cli import cli
from deployments.fleet_commands import Exit
from deployments.launcher import Served
from tests.factories import make_adapter
from tests.serve.app.conftest import BASE

NAMES = ["json", "pirate", "telegram"]


def ask(served: Served, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text


def run(served: Served, *words: str) -> Result:
    return CliRunner().invoke(cli, [*words, "--url", served.url])


def eventually(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.2)


def test_adapters_are_shown_as_asked_for_acknowledged_and_held(served: Served) -> None:
    ask(served, "pirate")
    listed = httpx.get(f"{served.url}/v1/adapters").json()
    adapters = {one["name"]: one for one in listed["data"]}
    assert set(NAMES) <= adapters.keys()
    pirate = adapters["pirate"]
    assert (pirate["state"], pirate["static"], pirate["pinned"]) == ("ready", True, False)
    assert pirate["path"].endswith("cluster/demo/adapters/pirate")
    assert {one["acknowledged"] for one in pirate["replicas"].values()} == {"applied"}
    assert "slot" in {one["tier"] for one in pirate["replicas"].values()}, "it has just answered"
    fleet = httpx.get(f"{served.url}/v1/fleet").json()
    assert fleet["replicas"].keys() == pirate["replicas"].keys()
    assert [(one["lag"], one["joined"], one["num_slots"]) for one in fleet["replicas"].values()] == [(0, True, 4)] * 2


def test_the_commands_change_the_real_fleet(served: Served, tmp_path: Any) -> None:
    path = make_adapter(prepare(), tmp_path / "mine", r=2, targets=("q_proj",))
    assert run(served, "load", "mine", str(path)).exit_code == Exit.DONE
    try:
        ask(served, "mine")
        assert run(served, "pin", "mine").exit_code == Exit.DONE
        listed = {one["name"]: one for one in json.loads(run(served, "list", "--json").output)}
        assert (listed["mine"]["pinned"], listed["mine"]["path"]) == (True, str(path))
        table = run(served, "status").output
        assert re.search(r"^mine +ready +pin ", table, re.MULTILINE), table
        # A pin takes its slots in its own time.
        eventually(lambda: run(served, "status", "mine", "--json").output.count('"tier":"slot"') == 2)
        assert run(served, "unpin", "mine").exit_code == Exit.DONE
        assert run(served, "load", "mine", str(path.parent)).exit_code == Exit.CONFLICT
        refusal = run(served, "load", "other", "/no/such/folder")
        assert refusal.exit_code == Exit.REFUSED
        failures = httpx.get(f"{served.url}/v1/fleet").json()["failures"]
        assert "/no/such/folder" in failures["other"]["text"]
    finally:
        assert run(served, "unload", "mine").exit_code == Exit.DONE
    assert run(served, "unload", "mine").exit_code == Exit.NOT_FOUND
    assert run(served, "status", "mine").exit_code == Exit.NOT_FOUND


def test_another_actor_sees_the_same(served: Served) -> None:
    @ray.remote(num_cpus=0)
    class Operator:
        async def look(self) -> tuple[FleetReport, Page, AdapterReport]:
            handle = serve.get_app_handle("llm")
            return await handle.fleet.remote(), await handle.adapters.remote(), await handle.adapter.remote("json")

    fleet, page, adapter = ray.get(Operator.remote().look.remote(), timeout=60)  # type: ignore[attr-defined]
    assert len(fleet.replicas) == 2
    assert set(NAMES) <= {one.name for one in page.adapters}
    assert adapter.name == "json"


def test_prometheus_finds_the_metrics(served: Served) -> None:
    for model in ("pirate", BASE):
        ask(served, model)
    found: dict[str, list[str]] = {}

    def all_found() -> bool:
        text = httpx.get(served.cluster.metrics_url).text
        for line in text.splitlines():
            if line.startswith("ray_lora_fleet_"):
                found.setdefault(line.split("{")[0].removeprefix("ray_lora_fleet_"), []).append(line)
        return found.keys() >= EXPECTED

    eventually(all_found, timeout_s=60)
    tokens = [line for line in found["tokens_total"] if 'adapter="pirate"' in line]
    assert tokens, found["tokens_total"]
    assert 'deployment="EngineReplica"' in tokens[0]
    assert any('adapter="(base)"' in line for line in found["tokens_total"])
    assert any(line.endswith(" 2.0") for line in found["replicas"]), found["replicas"]
    assert any('tier="slot"' in line for line in found["adapters"])


EXPECTED = {
    "adapters", "slots_used", "slot_hits_total", "slot_misses_total", "loads_total", "load_seconds_total",
    "tokens_total", "requests_started_total", "requests_running", "oldest_request_idle_seconds",
    "adapters_desired", "replicas", "replicas_stalled", "epoch", "epoch_lag", "replicas_behind",
    "table_age_seconds",
}  # fmt: skip
"""Of `docs/metrics.md`, those that this test's requests move; without the prefix."""
