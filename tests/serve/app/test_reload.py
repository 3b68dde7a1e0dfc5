"""An adapter's life on the running application: its report, replaced in place, pinned, and its folder changed."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.demo.base_model import prepare
from deployments.launcher import Served
from tests.factories import make_adapter
from tests.serve.app.replicas import replica_processes, wait_until_healed
from tests.serve.app.test_faults import streamed, whole

SUBJECT = 2
"""What the requests ask about. No greedy choice is a near tie there (the closest is decided by 0.044 in fp32), so that
tokens may be compared whatever shares their batch."""

NAME = "fresh"
NUM_MODULES = 2 * 30


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of two adapters of one shape."""
    root = tmp_path_factory.mktemp("trained")
    targets = ("q_proj", "v_proj")
    return [make_adapter(prepare(), root / str(seed), r=4, targets=targets, seed=seed) for seed in (5, 6)]


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
        yield client


async def post(http: httpx.AsyncClient, operation: str, **fields: Any) -> httpx.Response:
    return await http.post(f"/v1/{operation}_lora_adapter", json={"lora_name": NAME, **fields})


async def load(http: httpx.AsyncClient, folder: Path, **fields: Any) -> httpx.Response:
    return await post(http, "load", lora_path=str(folder), **fields)


async def tokens_of(http: httpx.AsyncClient, num_tokens: int = 8) -> list[int]:
    return await whole(http, NAME, SUBJECT, max_tokens=num_tokens, ignore_eos=True)


def fill(folder: Path, source: Path) -> None:
    """Put another adapter's files into a folder, each at once, as a careful trainer does."""
    folder.mkdir(exist_ok=True)
    for file in source.iterdir():
        shutil.copy(file, folder / ".new")
        os.replace(folder / ".new", folder / file.name)


async def lora_field(http: httpx.AsyncClient) -> dict[str, Any]:
    field: dict[str, Any] = (await http.get(f"/v1/models/{NAME}")).json()["lora"]
    return field


async def test_report_reload_pin_and_a_changed_folder(
    http: httpx.AsyncClient, served: Served, trained: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / NAME
    fill(folder, trained[0])
    first = await load(http, folder)
    assert first.status_code == 200, first.text
    check_report(first.json()["report"])
    await check_replacement(http, folder, trained)
    await check_pins(http)
    await check_a_late_replica_with_other_files(http, served, folder, trained)
    assert (await post(http, "unload")).status_code == 200


def check_report(report: dict[str, Any]) -> None:
    assert (report["num_modules"], report["ranks"]) == (NUM_MODULES, {"4": NUM_MODULES})
    assert report["num_bytes"] > 100_000
    assert set(report["phases_s"]) >= {"read", "check"}
    assert report["warnings"] == []


async def check_replacement(http: httpx.AsyncClient, folder: Path, trained: list[Path]) -> None:
    old_tokens = await tokens_of(http, 200)
    before = await lora_field(http)
    in_flight = asyncio.create_task(streamed(http, NAME, SUBJECT, max_tokens=200, ignore_eos=True))
    await asyncio.sleep(0.3)
    fill(folder, trained[1])
    refused = await load(http, folder)
    assert refused.status_code == 409
    assert "load_inplace" in refused.json()["error"]["message"]
    replaced = await load(http, folder, load_inplace=True)
    assert replaced.status_code == 200, replaced.text
    assert not in_flight.done(), "the stream was to be in flight"
    new_tokens = await tokens_of(http)
    assert new_tokens != old_tokens[: len(new_tokens)]
    assert await in_flight == (old_tokens, "done"), "what was in flight ends on the old weights"
    after = await lora_field(http)
    assert after["generation"] == replaced.json()["report"]["generation"] > before["generation"]
    assert after["content_hash"] != before["content_hash"]
    again = await load(http, folder, load_inplace=True)
    assert (again.status_code, again.json()["report"]["generation"]) == (200, after["generation"])
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    broken = await load(http, folder, load_inplace=True)
    assert broken.status_code == 400, broken.text
    assert NAME in broken.json()["error"]["message"]
    assert "x1f" not in broken.text
    assert (await lora_field(http))["generation"] == after["generation"]
    assert await tokens_of(http) == new_tokens


async def check_pins(http: httpx.AsyncClient) -> None:
    for name in (NAME, NAME, "pirate", "json"):
        pinned = await post(http, "pin", lora_name=name)
        assert pinned.status_code == 200, pinned.text
    one_too_many = await post(http, "pin", lora_name="telegram")
    assert one_too_many.status_code == 400
    assert "4 adapter(s) would be, and at most 3 can" in one_too_many.json()["error"]["message"]
    assert (await post(http, "pin", lora_name="absent")).status_code == 404
    for name in ("pirate", "json", "json"):
        assert (await post(http, "unpin", lora_name=name)).status_code == 200
    assert (await lora_field(http))["pinned"]


async def check_a_late_replica_with_other_files(
    http: httpx.AsyncClient, served: Served, folder: Path, trained: list[Path]
) -> None:
    """The folder now holds a broken file, then the first adapter again: neither is what is served."""
    tokens = await tokens_of(http)
    fill(folder, trained[0])
    victim = replica_processes(served)[0].pid
    os.kill(victim, signal.SIGKILL)
    await wait_until_healed(http, served, victim)
    states = (await lora_field(http))["replicas"]
    [reason] = [state for state in states.values() if state.startswith("refused: ")]
    assert str(folder) in reason
    assert len(states) == 2
    answers = await asyncio.gather(*(tokens_of(http) for _ in range(16)))
    assert all(answer == tokens for answer in answers), "the other replica answers, with the weights that are served"
    healed = await load(http, folder, load_inplace=True)
    assert healed.status_code == 200, healed.text
    field = await lora_field(http)
    assert {state.partition(":")[0] for state in field["replicas"].values()} <= {"slot", "host", "loaded"}
    assert field["pinned"]
    assert await tokens_of(http) != tokens


async def test_an_adapter_that_changes_nothing_is_served_with_a_warning(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    folder = make_adapter(prepare(), tmp_path / "untrained", r=2, targets=("q_proj",), std=0.0)
    loaded = await load(http, folder)
    assert loaded.status_code == 200, loaded.text
    report = loaded.json()["report"]
    assert len(report["noop_modules"]) == report["num_modules"] == 30
    assert "changes nothing" in report["warnings"][0]
    assert (await post(http, "unload")).status_code == 200
