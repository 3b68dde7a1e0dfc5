"""`lora-fleet chat`, `bench serve` and `doctor` beside the real fleet."""

import json
from pathlib import Path

from typer.testing import CliRunner

from deployments.cli import cli
from deployments.fleet_commands import Exit
from deployments.launcher import Served
from tests.serve.app.conftest import BASE, CONFIG


def test_an_adapter_is_talked_to(served: Served) -> None:
    words = ["chat", "pirate", "What is the capital of France?", "--temperature", "0", "--max-tokens", "24"]
    said = CliRunner().invoke(cli, [*words, "--url", served.url])
    assert said.exit_code == Exit.DONE, said.output
    assert "Paris" in said.stdout
    told = json.loads(CliRunner().invoke(cli, [*words, "--json", "--url", served.url]).stdout)
    assert told["content"].strip() == said.stdout.strip()
    assert CliRunner().invoke(cli, ["chat", "nobody", "Hello", "--url", served.url]).exit_code == Exit.NOT_FOUND


def test_the_catalogue_is_driven(served: Served, tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    words = ["--requests", "12", "--rate", "8", "--answer-tokens", "2:4", "--prompt-words", "8:16", "--zipf", "0"]
    result = CliRunner().invoke(
        cli, ["bench", "serve", *words, "--ignore-eos", "--save", str(saved), "--url", served.url]
    )
    assert result.exit_code == Exit.DONE, result.output
    assert "12 answered in" in result.stdout
    kept = json.loads(saved.read_bytes())
    asked = {one["model"] for one in kept["requests"]}
    assert asked <= {"json", "pirate", "telegram"}, f"adapters alone, and not {BASE}"
    assert sum(one["is_cold"] for one in kept["requests"]) >= len(asked)
    assert kept["summary"]["tokens_are_counted"]


def test_a_doctor_knows_the_fleet_at_its_port(served: Served, tmp_path: Path) -> None:
    port = served.url.rpartition(":")[2]
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.read_text().replace("port: 8000", f"port: {port}"))
    result = CliRunner().invoke(cli, ["doctor", str(config), "--json"])
    found = {one["subject"]: one for one in json.loads(result.stdout)["findings"]}
    assert found["port"]["verdict"] == "ok", found["port"]
    assert f"{port}: a server of this project answers there, with 2 replicas" in found["port"]["found"]
    assert found["memory"]["verdict"] == "ok", found["memory"]
