"""Tokens of a running stream while an adapter loads and gets a slot, in an engine process as a replica has it."""

import asyncio
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

from deployments.engine_client import EngineClient
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.messages import GenerateRequest, SamplingParams
from lora_core.types import LoRAOperation, LoRARequest, LoRAStatus
from tests.bench.load_rates import PROMPT
from tests.bench.random_adapter import weight_bytes
from tests.bench.result import report, require

TIMEOUT_S = 300.0
QUIET_TOKENS = 16
"""Tokens between two loads that show the stream's usual gap."""

GOAL = 2.0

RIVAL = """
import torch
torch.set_num_threads(1)
source, target = torch.ones(1 << 28, dtype=torch.uint8), torch.zeros(1 << 28, dtype=torch.uint8)
print("copying", flush=True)
while True:
    target.copy_(source)
"""
"""A process that copies memory and has nothing to do with the engine: what any neighbour costs the stream."""


class Arrivals:
    """When each token of one endless base-model stream arrived, as its reader saw it."""

    def __init__(self, client: EngineClient, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self._stream = client.submit(GenerateRequest("stream", PROMPT, sampling))
        self._times: list[float] = []
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def wait_for(self, num_tokens: int) -> None:
        """Wait until this many more tokens have come."""
        until = len(self._times) + num_tokens
        while len(self._times) < until:
            require(not self._task.done(), "the stream ended before the loads did")
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), TIMEOUT_S)

    def gaps_ms(self, began: float, ended: float) -> list[float]:
        """The gaps that overlap a time."""
        return [(b - a) * 1e3 for a, b in pairwise(self._times) if b > began and a < ended]

    async def close(self) -> None:
        """Stop reading."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._stream.close()

    async def _read(self) -> None:
        async for delta in self._stream:
            require(delta.error is None, str(delta.error))
            self._times += [time.perf_counter()] * bool(delta.token_ids)
            self._arrived.set()


async def _use(client: EngineClient, name: str) -> list[int]:
    """One token through an adapter, which gives it a slot."""
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    tokens: list[int] = []
    async for delta in client.submit(GenerateRequest(name, PROMPT, sampling, name)):
        require(delta.error is None, str(delta.error))
        tokens += delta.token_ids
    return tokens


async def _operate(client: EngineClient, operation: LoRAOperation, name: str, path: Path | None = None) -> None:
    request = LoRARequest(operation, name, None if path is None else str(path))
    response = await client.lora(request, TIMEOUT_S)
    require(response.status is LoRAStatus.SUCCESS, f"{operation.value} of {name}: {response.message}")


async def _measure(client: EngineClient, folder: Path, repeats: int, max_tokens: int) -> dict[str, list[float]]:
    """Gaps, in ms: "usual", while the adapter is "loading", while it gets its "slot", and beside a "rival"."""
    await _operate(client, LoRAOperation.LOAD, "warm", folder)
    expected = await _use(client, "warm")
    await _operate(client, LoRAOperation.UNLOAD, "warm")
    arrivals = Arrivals(client, max_tokens)
    gaps: dict[str, list[float]] = {"usual": [], "loading": [], "slot": []}
    try:
        # The first tokens come with the prompt's own cost.
        await arrivals.wait_for(4)
        for index in range(repeats):
            marks = [time.perf_counter()]
            await arrivals.wait_for(QUIET_TOKENS)
            marks.append(time.perf_counter())
            await _operate(client, LoRAOperation.LOAD, f"a{index}", folder)
            marks.append(time.perf_counter())
            require(await _use(client, f"a{index}") == expected, "an adapter's token depends on the running stream")
            marks.append(time.perf_counter())
            await arrivals.wait_for(1)
            await _operate(client, LoRAOperation.UNLOAD, f"a{index}")
            await arrivals.wait_for(2)
            for phase, (began, ended) in zip(gaps, pairwise(marks), strict=True):
                # The gap in which one phase ends and the next begins belongs to the latter.
                gaps[phase] += arrivals.gaps_ms(began, ended if phase == "slot" else ended - 1e-4)[phase == "usual" :]
        gaps["rival"] = await _beside_rival(arrivals)
    finally:
        await arrivals.close()
    return gaps


async def _beside_rival(arrivals: Arrivals) -> list[float]:
    rival = await asyncio.create_subprocess_exec(sys.executable, "-c", RIVAL, stdout=asyncio.subprocess.PIPE)
    try:
        assert rival.stdout is not None
        await asyncio.wait_for(rival.stdout.readline(), TIMEOUT_S)
        began = time.perf_counter()
        await arrivals.wait_for(QUIET_TOKENS)
        return arrivals.gaps_ms(began, time.perf_counter() - 1e-4)
    finally:
        rival.kill()
        await rival.wait()


async def _run(base: Path, folder: Path, rank: int, repeats: int) -> dict[str, list[float]]:
    max_tokens = 4000
    engine = EngineConfig(
        model=base, dtype="float32", device="cpu", num_threads=1, max_model_len=4096, kv_cache_tokens=6144
    )
    client = EngineClient(engine, LoRAConfig(enable_lora=True, max_lora_rank=rank, max_num_loras=1))
    await client.start(TIMEOUT_S)
    try:
        return await _measure(client, folder, repeats, max_tokens)
    finally:
        await client.close()


def stream_gap(base: Path, label: str, folder: Path, rank: int, repeats: int) -> None:
    """Measure, and report the gaps of each phase."""
    gaps = asyncio.run(_run(base, folder, rank, repeats))
    usual = statistics.median(gaps["usual"])
    figures = {f"{phase}_ms": _summary(values) for phase, values in gaps.items()}
    ratio = max(gaps["loading"] + gaps["slot"]) / usual
    report(
        "stream_gap", base=label, rank=rank, file_mb=weight_bytes(folder) / 1e6, repeats=repeats, **figures,
        ratio=ratio, quiet_ratio=max(gaps["usual"]) / usual, rival_ratio=max(gaps["rival"]) / usual,
        compared="gaps between one stream's tokens, as its reader sees them, with the median gap without any load",
        goal=f"largest gap while loading or given a slot < {GOAL} x median usual gap", met=ratio < GOAL,
    )  # fmt: skip


def _summary(gaps_ms: list[float]) -> dict[str, float]:
    ordered = sorted(gaps_ms)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    figures = {"median": statistics.median(ordered), "p99": p99, "max": ordered[-1]}
    return {"count": len(ordered), **{name: round(value, 1) for name, value in figures.items()}}
