"""The operator's view of the real fleet: routes, commands, another actor's calls, and what Prometheus finds."""

import contextlib
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


def test_the_fleets_metrics_are_on_one_page(served: Served) -> None:
    found: dict[str, list[str]] = {}

    for model in ("pirate", BASE):
        ask(served, model)

    def all_found() -> bool:
        found.clear()
        for line in httpx.get(f"{served.url}/metrics", timeout=30).text.splitlines():
            if not line.startswith("#"):
                found.setdefault(line.split()[0].split("{")[0], []).append(line)
        tokens = found.get("lora_fleet_tokens_total", ())
        return found.keys() >= EXPECTED and any('adapter="pirate"' in line for line in tokens)

    with contextlib.suppress(AssertionError):
        eventually(all_found, timeout_s=40)
    missing = sorted(EXPECTED - found.keys())
    assert not missing, f"{missing} of {sorted(found)}"
    tokens = [line for line in found["lora_fleet_tokens_total"] if 'adapter="pirate"' in line]
    assert tokens, found["lora_fleet_tokens_total"]
    assert 'deployment="EngineReplica"' in tokens[0]
    assert any('adapter="(base)"' in line for line in found["lora_fleet_tokens_total"])
    assert any(line.endswith(" 2.0") for line in found["lora_fleet_replicas"]), found["lora_fleet_replicas"]
    assert any('tier="slot"' in line for line in found["lora_fleet_adapters"])
    assert all(f'model_name="{BASE}"' in line for name in found if name.startswith("vllm:") for line in found[name])


EXPECTED = {
    "lora_fleet_adapters", "lora_fleet_slots", "lora_fleet_slots_used", "lora_fleet_slot_hits_total",
    "lora_fleet_slot_misses_total", "lora_fleet_loads_total", "lora_fleet_load_seconds_total",
    "lora_fleet_slot_evictions_total", "lora_fleet_watchdog_heals_total", "lora_fleet_requests_refused_total",
    "lora_fleet_tokens_total", "lora_fleet_requests_started_total", "lora_fleet_oldest_request_idle_seconds",
    "lora_fleet_adapters_desired", "lora_fleet_replicas", "lora_fleet_replicas_stalled", "lora_fleet_epoch",
    "lora_fleet_epoch_lag", "lora_fleet_replicas_behind", "lora_fleet_table_age_seconds",
    "lora_fleet_decision_seconds_bucket", "lora_fleet_nodes", "lora_fleet_nodes_silent",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:num_preemptions_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    "vllm:lora_requests_info",
}  # fmt: skip
"""Of `docs/metrics.md`, those that are there after this test's requests, also where nothing has moved them."""
