"""The application on Ray Serve with a tiny model, two replicas of two slots each, and a client of it."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from deployments.launcher import deployed
from deployments.local_cluster import free_port
from tests.cases.world import MAX_RANK, World

CONFIG = Path(__file__).parents[2] / "cluster" / "config.yaml"
BASE = "tiny"
NUM_REPLICAS = 2
NUM_SLOTS = 2


class Reply(NamedTuple):
    """An HTTP answer."""

    status: int
    body: dict[str, Any]

    @property
    def message(self) -> str:
        """What it says, to the one who did it right or wrong."""
        error = self.body.get("error")
        return str(error["message"] if isinstance(error, dict) else self.body.get("message", ""))

    @property
    def tokens(self) -> list[int]:
        """Token ids of a completion."""
        tokens: list[int] = self.body["choices"][0]["token_ids"]
        return tokens


class App:
    """A client of the running application; any thread may use it."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.http = httpx.Client(base_url=url, timeout=120, limits=limits)

    def post(self, path: str, body: Any, *, timeout_s: float | None = None) -> Reply:
        """POST JSON (or the bytes given), and read the answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        headers = {"Content-Type": "application/json"}
        answer = self.http.post(path, content=content, headers=headers, timeout=timeout)
        return Reply(answer.status_code, answer.json())

    def load(self, name: str, folder: Path | str, **fields: Any) -> Reply:
        """POST /v1/load_lora_adapter."""
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder), **fields})

    def unload(self, name: str) -> Reply:
        """POST /v1/unload_lora_adapter."""
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def complete(self, model: str, prompt: Sequence[int], num_tokens: int = 12, **how: Any) -> Reply:
        """A greedy completion of token ids."""
        return self.post("/v1/completions", completion(model, prompt, num_tokens), **how)

    def stream(self, model: str, prompt: Sequence[int], num_tokens: int) -> Iterator[list[int]]:
        """The tokens of a streamed completion as they come; a stream cut short raises."""
        body = {**completion(model, prompt, num_tokens), "stream": True}
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    yield event["choices"][0].get("token_ids", [])
        raise AssertionError("the stream ended without [DONE]")

    def models(self) -> dict[str, dict[str, Any]]:
        """GET /v1/models, by id."""
        return {model["id"]: model for model in self.http.get("/v1/models").json()["data"]}

    def healthy(self) -> bool:
        """Whether /health is green and both replicas are there."""
        answer = self.http.get("/health")
        return answer.status_code == 200 and answer.json()["replicas"] == NUM_REPLICAS

    def at_once(self, num: int, ask: Any) -> list[Reply]:
        """Call from many threads."""
        with ThreadPoolExecutor(num) as pool:
            return list(pool.map(ask, range(num)))


def completion(model: str, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """Body of a greedy completion of token ids."""
    return {
        "model": model, "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip


@contextlib.contextmanager
def application(world: World) -> Iterator[App]:
    """The application of `cluster/config.yaml` with a tiny model, on a free loopback port and a Ray of its own."""
    content = yaml.safe_load(CONFIG.read_text())
    content["applications"][0]["args"] = {
        "model": str(world.base()),
        "model_name": BASE,
        "engine": {"dtype": "float32", "device": "cpu", "kv_cache_tokens": 2048, "num_threads": 1},
        "lora_config": {"enable_lora": True, "max_num_loras": NUM_SLOTS, "max_lora_rank": MAX_RANK},
    }
    path = world.new_folder() / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    with deployed(path, port=free_port(), num_cpus=4, report=lambda line: print(line, file=sys.stderr)) as served:
        app = App(served.url)
        with app.http:
            yield app
