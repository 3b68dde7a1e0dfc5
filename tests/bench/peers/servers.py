"""Servers that are compared over HTTP: this project's whole stack with one replica, and vLLM's OpenAI server."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import yaml

from deployments.local_cluster import free_port
from tests.bench.peers.process import ROOT, Child
from tests.bench.peers.systems import BATCH, KV_TOKENS, MAX_RANK, MODEL_TOKENS, STEP_TOKENS, Workplace, vllm_environment

BASE_NAME = "base"


class Server(Child):
    """An OpenAI-style server of its own on a loopback port.

    Attributes:
        url: Its address.
    """

    url = ""

    def wait_until_ready(self, num_models: int, timeout_s: float) -> None:
        """Return when it lists so many models. Raises PeerFailed."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.failed(f"it ended with status {self.process.returncode}")
            try:
                answer = httpx.get(f"{self.url}/v1/models", timeout=5)
                if answer.status_code == 200 and len(answer.json()["data"]) >= num_models:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise self.failed(f"not ready within {timeout_s:g} s")


@dataclass(frozen=True)
class ServerKind:
    """How a server is started.

    Attributes:
        name: In the lines.
        program: `ours`, `vllm` or `stand-in`.
        lora: Whether it serves the adapters.
        compile: Of vLLM's.
    """

    name: str
    program: str
    lora: bool = True
    compile: bool = False

    def start(self, place: Workplace) -> Server:
        """Start it, on a free port; `Server.wait_until_ready` waits for it."""
        port = free_port()
        command, environment = _COMMANDS[self.program](self, place, port)
        server = Server(
            self.name, command, environment=environment, cores=place.cores, grace_s=45,
            log=place.folder / f"{self.name}-http.log", folder=place.folder if self.program == "vllm" else ROOT,
        )  # fmt: skip
        server.url = f"http://127.0.0.1:{port}"
        return server


def _ours(kind: ServerKind, place: Workplace, port: int) -> tuple[Sequence[str], dict[str, str]]:
    lora: dict[str, object] = {"enable_lora": kind.lora}
    if kind.lora:
        paths = [f"{name}={path}" for name, path in place.adapters.items()]
        lora |= {"max_num_loras": len(paths), "max_lora_rank": MAX_RANK, "lora_paths": paths}
    engine = {
        "dtype": "bfloat16", "device": "cpu", "num_threads": len(place.cores), "max_model_len": MODEL_TOKENS,
        "max_num_seqs": BATCH, "max_num_batched_tokens": STEP_TOKENS, "kv_cache_tokens": KV_TOKENS,
        "enable_prefix_caching": False,
    }  # fmt: skip
    content = yaml.safe_load((ROOT / "cluster" / "config.yaml").read_text())
    content["http_options"]["port"] = port
    application = content["applications"][0]
    application["args"] = {
        "model": str(place.model), "model_name": BASE_NAME, "engine": engine, "lora_config": lora,
    }  # fmt: skip
    for deployment in application["deployments"]:
        deployment.pop("autoscaling_config", None)
        deployment["num_replicas"] = 1
    config = place.folder / f"{kind.name}.yaml"
    config.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-c", "from deployments.cli import main; main()", "up", str(config)]
    # The replica's processes are started by Ray, which gives them its own number of OpenMP threads.
    return command, {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def _vllm(kind: ServerKind, place: Workplace, port: int) -> tuple[Sequence[str], dict[str, str]]:
    command = [str(place.peers), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(place.model), "--served-model-name", BASE_NAME, "--dtype", "bfloat16"]
    command += ["--max-model-len", str(MODEL_TOKENS), "--max-num-seqs", str(BATCH)]
    command += ["--max-num-batched-tokens", str(STEP_TOKENS), "--no-enable-prefix-caching"]
    # Access logs cost time in both servers, and this project's are off by default.
    command += ["--disable-uvicorn-access-log", "--disable-log-stats"]
    command += [] if kind.compile else ["--enforce-eager"]
    if kind.lora:
        command += ["--enable-lora", "--max-loras", str(len(place.adapters)), "--max-lora-rank", str(MAX_RANK)]
        command += ["--lora-modules", *(f"{name}={path}" for name, path in place.adapters.items())]
    return command, vllm_environment(place)


def _stand_in(kind: ServerKind, place: Workplace, port: int) -> tuple[Sequence[str], dict[str, str]]:
    command = [sys.executable, "-m", "tests.bench.peers.stand_in_server", str(port), BASE_NAME]
    return [*command, *(place.adapters if kind.lora else ())], {}


_COMMANDS = {"ours": _ours, "vllm": _vllm, "stand-in": _stand_in}

KINDS = (
    ServerKind("ours", "ours"),
    ServerKind("vllm", "vllm"),
    ServerKind("vllm-base", "vllm", lora=False),
    ServerKind("vllm-base-compiled", "vllm", lora=False, compile=True),
)
