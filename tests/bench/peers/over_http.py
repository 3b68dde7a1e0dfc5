"""Servers compared over HTTP on loopback: all requests of a batch at once, each with a prompt of token ids."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import httpx

from tests.bench.peers.offline import rates
from tests.bench.peers.points import Point, Results
from tests.bench.peers.process import PeerFailed
from tests.bench.peers.servers import BASE_NAME, Server, ServerKind
from tests.bench.peers.systems import START_S, Workplace

BURST_S = 600
"""Longest a batch may take."""

IDLE_S, IDLE_CORES = 10.0, 0.3
"""How long a server may take to come to rest after its turn, and cores it may go on taking: Ray's parts take half."""


async def burst(server: Server, point: Point, num_tokens: int) -> float:
    """Ask for all rows at once; the seconds until the last answer is there. Raises PeerFailed."""
    limits = httpx.Limits(max_connections=point.batch, max_keepalive_connections=point.batch)
    async with httpx.AsyncClient(base_url=server.url, timeout=BURST_S, limits=limits, trust_env=False) as client:

        async def ask(prompt: list[int], name: str | None) -> None:
            body = {
                "model": name or BASE_NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0,
                "ignore_eos": True,
            }  # fmt: skip
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 200:
                raise server.failed(f"status {answer.status_code}: {answer.text[:500]}")
            usage = answer.json()["usage"]
            if (usage["prompt_tokens"], usage["completion_tokens"]) != (len(prompt), num_tokens):
                raise server.failed(f"asked for {num_tokens} tokens after {len(prompt)}, it tells of {usage}")

        began = time.perf_counter()
        try:
            await asyncio.gather(*(ask(*row) for row in zip(point.prompts(), point.names, strict=True)))
        except httpx.HTTPError as error:
            raise server.failed(f"{type(error).__name__}: {error}") from error
        return time.perf_counter() - began


def measure(
    first: ServerKind,
    others: Sequence[ServerKind],
    points: Sequence[Point],
    place: Workplace,
    results: Results,
    *,
    rounds: int,
) -> None:
    """Time every point of the first server and of each other one by turns.

    No more than two servers run at a time: each holds gigabytes. The first is compared anew with each.
    """
    with first.start(place) as mine:
        try:
            mine.wait_until_ready(1 + len(place.adapters), START_S)
        except PeerFailed as failure:
            results.add(system=first.name, transport="http", error=str(failure))
            return
        for kind in others:
            asked = [point for point in points if kind.lora == bool(point.adapters)]
            with kind.start(place) as other:
                try:
                    other.wait_until_ready(1 + (len(place.adapters) if kind.lora else 0), START_S)
                    for point in asked:
                        _compare({first.name: mine, kind.name: other}, point, results, rounds)
                except PeerFailed as failure:
                    results.add(system=kind.name, transport="http", error=str(failure))


def _wait_until_idle(servers: Sequence[Server]) -> None:
    """Until the threads that computed a batch have stopped looking for more, which some do for seconds."""
    deadline, look_s = time.monotonic() + IDLE_S, 0.5
    while time.monotonic() < deadline:
        busy_s = sum(server.busy_s() for server in servers)
        time.sleep(look_s)
        if sum(server.busy_s() for server in servers) - busy_s < IDLE_CORES * look_s:
            return


def _compare(servers: Mapping[str, Server], point: Point, results: Results, rounds: int) -> None:
    first_s = dict.fromkeys(servers, float("inf"))
    wall_s = dict.fromkeys(servers, float("inf"))
    # A server cannot be paused as an engine can: its parts watch each other. So what waiting takes is told.
    beside_s, turns_s = dict.fromkeys(servers, 0.0), dict.fromkeys(servers, 0.0)
    for server in servers.values():
        asyncio.run(burst(server, point, 2))
    for _ in range(rounds):
        for name, server in servers.items():
            others = [other for other in servers.values() if other is not server]
            _wait_until_idle(others)
            busy_s, began = sum(other.busy_s() for other in others), time.perf_counter()
            first_s[name] = min(first_s[name], asyncio.run(burst(server, point, 1)))
            wall_s[name] = min(wall_s[name], asyncio.run(burst(server, point, point.new_tokens)))
            turns_s[name] += time.perf_counter() - began
            beside_s[name] += sum(other.busy_s() for other in others) - busy_s
    *_, last = servers
    for name in servers:
        output = point.batch * point.new_tokens / wall_s[name]
        results.add(
            system=name, transport="http", against=last, **point.figures(), dtype="bfloat16", output_tok_s=output,
            **rates(point, first_s[name], wall_s[name]), other_server_cores=beside_s[name] / turns_s[name],
        )  # fmt: skip
