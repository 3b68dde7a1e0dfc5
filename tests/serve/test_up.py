"""`lora-fleet up`: what it says when it serves. What cannot work ends it with the reason, and leaves nothing behind."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from deployments.local_cluster import free_port
from tests import factories
from tests.engine.byte_model import byte_model

CONFIG = Path(__file__).parents[2] / "cluster" / "config.yaml"


def up(folder: Path, *options: str, **args: Any) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end."""
    command = command_line(folder, *options, **args)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def command_line(folder: Path, *options: str, **args: Any) -> list[str]:
    """The command for the shipped configuration with other `args`."""
    content = yaml.safe_load(CONFIG.read_text())
    content["applications"][0]["args"] |= args
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return [str(Path(sys.executable).with_name("lora-fleet")), "up", str(path), *options]


def test_an_unknown_key_is_refused_before_anything_starts(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = up(tmp_path, modle="demo")
    assert ended.returncode == 1
    assert "unknown key 'modle'; did you mean 'model'?" in ended.stderr
    assert "starting Ray" not in ended.stderr
    assert time.monotonic() - began < 60


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        ended = up(tmp_path, "--port", str(port))
    assert ended.returncode == 1
    assert f"port {port} is taken" in ended.stderr


def test_faulty_keys_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("acme=short\n")
    ended = up(tmp_path, access={"keys_file": str(tmp_path / "keys"), "tenants": {"acme": {}}})
    assert ended.returncode == 1
    assert "keys, line 1: the key of 'acme' has 5 characters; expected at least 16" in ended.stderr
    assert "starting Ray" not in ended.stderr


def test_a_program_learns_where_the_server_is(tmp_path: Path) -> None:
    base = byte_model(tmp_path / "base")
    adapter = factories.make_adapter(base, tmp_path / "mine", r=4, targets=("q_proj",), seed=1)
    words = command_line(
        tmp_path, "--json", "--port", str(free_port()), "--num-cpus", "4", model=str(base),
        engine={"dtype": "float32", "device": "cpu", "kv_cache_tokens": 4096, "num_threads": 1},
        lora_config={"enable_lora": True, "max_lora_rank": 8, "lora_paths": [f"mine={adapter}"]},
    )  # fmt: skip
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            told = json.loads(process.stdout.readline())
            assert (told["model"], told["adapters"], told["with_key"]) == ("base", ["mine"], False)
            assert httpx.get(f"{told['url']}/health", timeout=30).json()["status"] == "ok"
            assert httpx.get(told["metrics"], timeout=30).status_code == 200
            assert Path(told["log"]).exists()
        finally:
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=90)
    assert (process.returncode, rest) == (0, ""), "nothing else is said there"
    assert not Path(told["log"]).exists(), "it goes with the cluster"


def test_a_failed_deployment_ends_with_its_reason(tmp_path: Path) -> None:
    base = factories.tiny_llama(tmp_path / "base")
    lora = {"enable_lora": True, "lora_paths": [f"bad={tmp_path}/nowhere"]}
    ended = up(tmp_path, "--port", str(free_port()), model=str(base), engine={}, lora_config=lora)
    assert ended.returncode == 1
    assert "the deployment failed: lora_paths: cannot be served: 'bad'" in ended.stderr
    assert f"{tmp_path}/nowhere" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "no keys: it listens on this machine alone" in ended.stderr
