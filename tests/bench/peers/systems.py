"""The systems that are compared: how each is started, and which batches it can answer."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_core.engine.process_environment import process_environment
from tests.bench.peers.points import LONG_PROMPT_TOKENS, NEW_TOKENS, Point
from tests.bench.peers.process import ROOT, Peer

MAX_RANK = 16
MODEL_TOKENS = 1024
"""Longest prompt and answer."""
STEP_TOKENS = 2048
"""Most tokens in a step, of every system that knows of steps."""
KV_TOKENS = 32_768
BATCH = 32
START_S = 900
"""Longest start: compiling takes vLLM over a minute on two free cores, and four times that on busy ones."""

assert LONG_PROMPT_TOKENS + NEW_TOKENS <= MODEL_TOKENS


@dataclass(frozen=True)
class Workplace:
    """What all systems share.

    Attributes:
        model: Folder of the base model.
        adapters: Folders of the adapters, by name.
        cores: The cores that all of them run on, with a thread for each.
        folder: For logs.
        peers: The interpreter of the peers' environment.
    """

    model: Path
    adapters: Mapping[str, Path]
    cores: Sequence[int]
    folder: Path
    peers: Path


@dataclass(frozen=True)
class System:
    """One compared system.

    Attributes:
        name: In the lines.
        program: Module or script below `tests.bench.peers` that answers for it.
        settings: Its own, beside those that all have.
        lora: Whether it has adapters.
        mixes: Whether base rows may be beside them.
        takes_long: Whether the long prompts are asked of it too.
        is_foreign: Whether it runs in the peers' environment.
    """

    name: str
    program: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    lora: bool = False
    mixes: bool = True
    takes_long: bool = True
    is_foreign: bool = False

    def runs(self, point: Point) -> bool:
        """Whether it can answer such a batch."""
        if point.prompt_tokens >= LONG_PROMPT_TOKENS and not self.takes_long:
            return False
        return (self.lora or not point.adapters) and (self.mixes or not point.is_mixed)

    def start(self, place: Workplace, dtype: str) -> Peer:
        """Start its process; it answers when it is ready."""
        settings = {
            "model": str(place.model),
            "adapters": {name: str(path) for name, path in place.adapters.items()} if self.lora else {},
            "lora": self.lora,
            "dtype": dtype,
            "threads": len(place.cores),
            "batch": BATCH,
            "max_model_len": MODEL_TOKENS,
            "step_tokens": STEP_TOKENS,
            "kv_cache_tokens": KV_TOKENS,
            "max_lora_rank": MAX_RANK,
            **self.settings,
        }
        if self.is_foreign:
            command = [str(place.peers), str(Path(__file__).with_name(f"{self.program}.py"))]
            environment = vllm_environment(place)
        else:
            command = [sys.executable, "-m", f"tests.bench.peers.{self.program}"]
            environment = {**process_environment(len(place.cores)), "HF_HUB_OFFLINE": "1"}
        return Peer(
            self.name, command, settings, environment=environment, cores=place.cores,
            log=place.folder / f"{self.name}-{dtype}.log", folder=place.folder if self.is_foreign else ROOT,
        )  # fmt: skip


def vllm_environment(place: Workplace) -> dict[str, str]:
    """Variables under which vLLM keeps to itself, and to the given cores."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, place.cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(place.folder / "vllm-cache"),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        # This project's packages are not to be found by those of the peers.
        "PYTHONPATH": "",
    }


VLLM: Mapping[str, Any] = {"program": "vllm_offline", "mixes": False, "is_foreign": True}

REFERENCE = System("peft", "hugging_face", {"kind": "peft"}, lora=True, takes_long=False)

OURS_BASE = System("ours-base", "ours")

SYSTEMS = (
    OURS_BASE,
    System("ours", "ours", lora=True),
    System("vllm-base", settings={"compile": False}, **VLLM),
    System("vllm-base-compiled", settings={"compile": True}, **VLLM),
    # With adapters its CPU platform turns compilation off, so that this is all there is.
    System("vllm", settings={"compile": False}, lora=True, **VLLM),
    System("transformers", "hugging_face", {"kind": "generate"}, takes_long=False),
    System("transformers-cb", "hugging_face", {"kind": "continuous"}, takes_long=False),
    REFERENCE,
)
