"""`lora-fleet doctor`: what it finds in packages, ports, configurations and memory, and how it ends."""

import json
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from deployments.cli import cli
from deployments.doctor import network
from deployments.doctor.finding import Finding, Verdict
from deployments.doctor.network import network_findings
from deployments.doctor.versions import package_findings
from deployments.fleet_commands import Exit
from deployments.serve_config import read_serve_config
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine_plan import plan_engine
from lora_core.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "cluster" / "config.yaml"
GIB = 1 << 30

Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path, tiny_base: Path) -> Written:
    """The shipped configuration with a tiny model, other sections of `args`, and another port or number of GPUs."""

    def write(num_gpus: float = 0, port: int = 0, **args: Any) -> Path:
        content = yaml.safe_load(CONFIG.read_text())
        if port:
            content["http_options"]["port"] = port
        application = content["applications"][0]
        application["args"] = {"model": str(tiny_base), **args}
        application["deployments"][0]["ray_actor_options"] |= {"num_gpus": num_gpus} if num_gpus else {}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def doctor(path: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["doctor", str(path), *words])


def told(result: Result) -> tuple[dict[str, Finding], Any]:
    """Findings by subject, and the memory's report."""
    body = json.loads(result.stdout)
    found = [Finding(one["subject"], Verdict(one["verdict"]), one["found"], one["remedy"]) for one in body["findings"]]
    assert body["ok"] == all(one.verdict is not Verdict.FAULT for one in found) == (result.exit_code == Exit.DONE)
    return {one.subject: one for one in found}, body["memory"]


def test_packages_are_held_against_what_is_required() -> None:
    torch = metadata.version("torch")
    required = [
        "torch>=2",
        "msgspec>=0.1",
        "pyyaml==0.1",
        "rich>=999",
        "no-such-package",
        "pytest>=999; extra == 'dev'",
    ]
    found = {one.subject: one for one in package_findings(required)}
    assert found["torch"] == Finding("torch", Verdict.OK, torch)
    assert found["pyyaml"].verdict is Verdict.FAULT
    assert "where ==0.1 is required" in found["pyyaml"].found
    assert found["rich"].verdict is Verdict.WARNING
    assert found["no-such-package"] == Finding(
        "no-such-package", Verdict.FAULT, "not installed", found["no-such-package"].remedy
    )
    assert found["packages"].found == "1 others, all as required"
    assert "pytest" not in found


def test_a_configuration_that_can_be_served_is_well(written: Written) -> None:
    lora = {"enable_lora": True, "max_num_loras": 3, "max_lora_rank": 8, "host_memory_bytes": GIB // 8}
    path = written(engine={"device": "cpu", "max_model_len": 64}, lora_config=lora)
    result = doctor(path, "--json")
    found, memory = told(result)
    assert found["configuration"].verdict is Verdict.OK
    assert found["memory"].verdict is Verdict.OK, found["memory"]
    assert {"python", "torch", "ray", "cpu", "gpu", "C compiler", "sockets", "port", "own name", "hub"} <= found.keys()
    assert (memory["num_slots"], memory["most_slots"], memory["kv_cache_tokens"]) == (3, 256, 16384)
    assert memory["most_kv_cache_tokens"] > 16384
    shown = doctor(path)
    assert "slots: 3 of rank 8" in shown.stdout
    assert "KV cache: 16384 tokens, 256 requests of max_model_len 64" in shown.stdout


def test_as_many_slots_fit_as_it_says(written: Written, tiny_base: Path) -> None:
    gib = 0.9
    lora: dict[str, Any] = {"enable_lora": True, "max_num_loras": 16, "max_lora_rank": 256}
    result = doctor(
        written(engine={"max_model_len": 64, "dtype": "float32"}, lora_config=lora), "--gpu-gib", str(gib), "--json"
    )
    _, memory = told(result)
    assert memory["device"] == "cuda"
    most = memory["most_slots"]
    assert 16 < most < 256, "the test is of a GPU that is too small for all"
    engine = EngineConfig(model=tiny_base, max_model_len=64, dtype="float32")
    device = torch.device("cuda")

    def kv_tokens(slots: int) -> int:
        config = LoRAConfig(**{**lora, "max_num_loras": slots})
        return plan_engine(engine, config, device, free=int(gib * GIB)).kv_cache_tokens

    assert memory["tokens_by_slots"] == {str(slots): kv_tokens(slots) for slots in {8, 16, 32, most} if slots <= most}
    with pytest.raises(ConfigError, match="max_num_loras"):
        kv_tokens(most + 1)


def test_a_configuration_that_does_not_fit_says_what_to_set(written: Written) -> None:
    lora = {"enable_lora": True, "max_num_loras": 256, "max_lora_rank": 256}
    result = doctor(written(engine={"max_model_len": 64}, lora_config=lora), "--gpu-gib", "0.4", "--json")
    found, memory = told(result)
    assert result.exit_code == Exit.REFUSED
    assert memory is None
    assert "lower max_num_loras from 256 to" in found["memory"].found


def test_gpus_that_are_not_here_are_missed(written: Written) -> None:
    path = written(num_gpus=1)
    found, _ = told(doctor(path, "--json"))
    assert "a replica asks Ray for num_gpus 1" in found["memory"].found
    assert "--gpu-gib" in found["memory"].found
    planned, memory = told(doctor(path, "--gpu-gib", "80", "--json"))
    assert planned["memory"].verdict is Verdict.OK
    assert memory["usable_bytes"] == int(80 * GIB * 0.9)


def test_a_broken_configuration_is_told_beside_the_rest(written: Written) -> None:
    found, memory = told(doctor(written(engine={"max_modle_len": 1}), "--json"))
    assert "did you mean 'max_model_len'?" in found["configuration"].found
    assert found["configuration"].verdict is Verdict.FAULT
    assert found["torch"].verdict is Verdict.OK
    assert memory is None
    assert "port" not in found


def test_a_taken_port_is_a_fault(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PATIENCE_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = read_serve_config(written(port=listener.getsockname()[1]))
        listener.listen(0)
        found = {one.subject: one for one in network_findings(config)}
    assert found["port"].verdict is Verdict.FAULT
    assert "is taken" in found["port"].found


def test_a_proxy_in_the_way_is_seen(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_serve_config(written())
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.delenv("NO_PROXY", raising=False)
    found = {one.subject: one for one in network_findings(config)}
    assert "NO_PROXY=127.0.0.1" in found["proxy"].remedy
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert {one.subject: one for one in network_findings(config)}["proxy"].verdict is Verdict.OK


def test_the_hub_is_asked_for_where_it_is_needed(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    remote = read_serve_config(written(lora_config={"enable_lora": True, "allow_remote": True}))
    found = {one.subject: one for one in network_findings(remote)}
    assert found["hub"].verdict is Verdict.WARNING
    assert "http://127.0.0.1:1 does not answer" in found["hub"].found
    local = read_serve_config(written())
    assert "not needed" in {one.subject: one for one in network_findings(local)}["hub"].found
