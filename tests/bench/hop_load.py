"""Calls to the applications of `bench_hop`, and the processor time that they cost."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import httpx
import psutil
import ray
from ray import serve

from tests.bench.hop_apps import ADAPTER, Hop
from tests.bench.hop_engine import TOKEN_ID
from tests.bench.result import require

PROMPT = [1, 2, 3, 4]


class Cost(NamedTuple):
    """What a number of calls took."""

    cpu_s: float
    """Of the proxy, ingress, replica, router actor and calling actor, over what they take while idle."""
    median_s: float
    """From a call to the end of its answer."""
    num_chunks: int
    """Of all streamed answers."""


class Ends(NamedTuple):
    """How one call ended."""

    seconds: float
    num_chunks: int


def body(num_tokens: int, *, stream: bool) -> dict[str, Any]:
    """A completion of token ids through the adapter."""
    return {
        "model": ADAPTER, "prompt": PROMPT, "max_tokens": num_tokens, "stream": stream, "return_token_ids": True,
    }  # fmt: skip


class Front:
    """One way to an application: `ask` sends one call and reads its answer."""

    def __init__(self, hop: Hop, name: str, idle_rate: float) -> None:
        self._hop, self._name, self._idle_rate = hop, name, idle_rate

    def over_http(self, num_calls: int, concurrency: int, num_tokens: int, *, stream: bool) -> Cost:
        """Calls of one client on so many connections."""
        url = f"{self._hop.urls[self._name]}/v1/completions"

        async def run() -> list[Ends]:
            limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
            async with httpx.AsyncClient(limits=limits, timeout=120) as client:
                return await spread(num_calls, concurrency, lambda: _http_call(client, url, num_tokens, stream=stream))

        return self._measured(lambda: asyncio.run(run()))

    def by_handle(self, num_calls: int, concurrency: int, num_tokens: int, *, stream: bool) -> Cost:
        """Calls of one actor of the same cluster."""
        caller = Caller.options(name="hop-caller", get_if_exists=True).remote()  # type: ignore[attr-defined]
        ray.get(caller.calls.remote(self._name, 1, 1, num_tokens, stream=stream), timeout=60)
        work = caller.calls.remote
        return self._measured(
            lambda: ray.get(work(self._name, num_calls, concurrency, num_tokens, stream=stream), timeout=300)
        )

    def _measured(self, run: Callable[[], list[Ends]]) -> Cost:
        before, began_s = cpu_s(self._hop), time.perf_counter()
        ends = run()
        idle_s = self._idle_rate * (time.perf_counter() - began_s)
        spent_s = _spent_s(self._hop, before) - idle_s
        seconds = sorted(end.seconds for end in ends)
        return Cost(spent_s, seconds[len(seconds) // 2], sum(end.num_chunks for end in ends))


@ray.remote(num_cpus=0)
class Caller:
    """An actor that uses an application through its handle."""

    async def calls(self, app: str, num_calls: int, concurrency: int, num_tokens: int, *, stream: bool) -> list[Ends]:
        """So many calls, so many at a time."""
        handle = serve.get_app_handle(app)
        return await spread(num_calls, concurrency, lambda: _handle_call(handle, num_tokens, stream=stream))


async def spread(num_calls: int, concurrency: int, call: Callable[[], Awaitable[Ends]]) -> list[Ends]:
    """Make calls, so many at a time; each worker makes its next when its last has ended."""
    ends: list[Ends] = []

    async def work() -> None:
        while len(ends) + concurrency <= num_calls:
            ends.append(await call())

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return ends


async def _http_call(client: httpx.AsyncClient, url: str, num_tokens: int, *, stream: bool) -> Ends:
    began = time.perf_counter()
    request = body(num_tokens, stream=stream)
    if not stream:
        answer = await client.post(url, json=request)
        require(answer.status_code == 200, answer.text)
        _check(answer.json()["choices"][0]["token_ids"], num_tokens)
        return Ends(time.perf_counter() - began, 1)
    found, num_chunks = 0, 0
    async with client.stream("POST", url, json=request) as answer:
        require(answer.status_code == 200, f"status {answer.status_code}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                # Not read as JSON: that would cost this machine what is to be measured.
                token_ids = line.partition('"token_ids": [')[2].partition("]")[0]
                found += token_ids.split(", ").count(str(TOKEN_ID))
                num_chunks += 1
    require(found == num_tokens, f"{found} tokens, expected {num_tokens}")
    return Ends(time.perf_counter() - began, num_chunks)


async def _handle_call(handle: Any, num_tokens: int, *, stream: bool) -> Ends:
    began = time.perf_counter()
    if not stream:
        answer = await handle.complete.remote(body(num_tokens, stream=False))
        _check(answer["choices"][0]["token_ids"], num_tokens)
        return Ends(time.perf_counter() - began, 1)
    found: list[int] = []
    num_chunks = 0
    async for chunk in handle.options(stream=True).stream.remote(body(num_tokens, stream=True)):
        found += chunk["choices"][0]["token_ids"]
        num_chunks += 1
    _check(found, num_tokens)
    return Ends(time.perf_counter() - began, num_chunks)


def _check(tokens: list[int], num_tokens: int) -> None:
    require(tokens == [TOKEN_ID] * num_tokens, f"expected {num_tokens} tokens, found {tokens}")


def idle_rate(hop: Hop, seconds: float = 5.0) -> float:
    """Processor seconds a second that Ray's workers take while nobody calls: heartbeats, reports, metrics."""
    before, began_s = cpu_s(hop), time.perf_counter()
    time.sleep(seconds)
    return _spent_s(hop, before) / (time.perf_counter() - began_s)


def _spent_s(hop: Hop, before: dict[int, float]) -> float:
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in cpu_s(hop).items())


def cpu_s(hop: Hop) -> dict[int, float]:
    """Processor seconds so far of Ray's workers that calls pass through, by process."""
    found = {}
    for process in psutil.Process(hop.cluster.pid).children(recursive=True):
        # One that ends in the meantime has no part in this.
        with contextlib.suppress(psutil.Error):
            name = "".join(process.cmdline()[:1])
            if name.startswith("ray::") and "Controller" not in name:
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
    return found
