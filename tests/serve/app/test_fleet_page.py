"""The live page of the real fleet, in a real browser: an adapter appears, a replica goes and returns."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.demo.base_model import prepare
from deployments.launcher import Served
from tests.factories import make_adapter
from tests.serve.app.replicas import replica_processes
from tests.serve.browser import Browser, chromium

NAME = "team/seen@1"


@pytest.fixture
def page(served: Served) -> Iterator[Browser]:
    with chromium() as browser:
        browser.open(f"{served.url}/fleet")
        browser.eventually(lambda: browser.texts("article .badge") == ["✓ serving"] * 2)
        yield browser
        assert browser.errors() == []


def test_an_adapter_is_seen_to_come_into_a_slot_and_to_go(page: Browser, served: Served, tmp_path: Path) -> None:
    assert page.text("#connection-text") == "● Live"
    assert page.texts("#sign-in, #sign-out") == [], "this server has no keys, and this is its machine"
    path = make_adapter(prepare(), tmp_path / "mine", r=2, targets=("q_proj",))

    def change(route: str, **body: str) -> None:
        answer = httpx.post(f"{served.url}{route}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text

    def row() -> str:
        return next((text for text in page.texts("#adapters tbody tr") if text.startswith(NAME)), "")

    change("/v1/load_lora_adapter", lora_name=NAME, lora_path=str(path))
    page.eventually(lambda: "✓ ready" in row())
    assert f"Adapter {NAME}: ready" in page.text("#changes") or f"Adapter {NAME}: loading" in page.text("#changes")
    ask = {"model": NAME, "prompt": "Hello"}
    change("/v1/completions", **ask)
    page.eventually(lambda: any(NAME in text for text in page.texts("article tbody tr")))
    # Its heat: what it has done lately, of all that the fleet has.
    page.eventually(lambda: any(text.startswith("■ " + NAME) and " 0 %" not in text for text in rows(page)))
    page.set_screen(1280, 900)
    page.screenshot("real")
    change("/v1/unload_lora_adapter", lora_name=NAME)
    page.eventually(lambda: row() == "" and NAME not in page.text("#replicas"))
    assert f"Adapter {NAME} is gone" in page.text("#changes")


def rows(page: Browser) -> list[str]:
    """The adapters of all replicas, each with its mark, name, heat, requests and age in one line."""
    return [" ".join(text.split()) for text in page.texts("article tbody tr")]


def test_a_killed_replica_is_seen_to_go_and_another_to_come(page: Browser, served: Served) -> None:
    before = page.texts("article h3")
    victim = replica_processes(served)[0].pid
    os.kill(victim, signal.SIGKILL)
    page.eventually(lambda: len(set(before) & set(page.texts("article h3"))) == 1)
    [gone] = set(before) - set(page.texts("article h3"))
    page.eventually(lambda: f"Replica {gone} is gone" in page.text("#changes"))
    page.eventually(lambda: page.texts("article .badge") == ["✓ serving"] * 2, timeout_s=90)
    [new] = set(page.texts("article h3")) - set(before)
    assert f"Replica {new}" in page.text("#changes")
    assert page.text("#totals").startswith("Replicas serving\n2 of 2")
    page.screenshot("real-healed")
