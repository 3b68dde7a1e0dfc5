"""Many clients, few slots, and replicas that die: nothing is lost but what was streaming on the dead one."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psutil
import pytest

from cluster.demo.base_model import prepare
from deployments.launcher import Served
from tests.factories import make_adapter
from tests.serve.app.replicas import replica_processes, wait_until_healed

NUM_ADAPTERS = 12
NUM_REQUESTS = 64

SUBJECT = 6
"""What the requests ask about. No greedy choice of the twelve adapters is a near tie there (the closest one is decided
by 0.011 in fp32), so that tokens may be compared whatever shares their batch."""


@pytest.fixture(scope="module")
def adapters(served: Served, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Twelve adapters, three times the slots of a replica."""
    folder = tmp_path_factory.mktemp("adapters")
    names = []
    for index in range(NUM_ADAPTERS):
        path = make_adapter(prepare(), folder / f"a{index}", r=2 + index, targets=("q_proj", "v_proj"), seed=index)
        body = {"lora_name": f"a{index}", "lora_path": str(path)}
        answer = httpx.post(f"{served.url}/v1/load_lora_adapter", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        names.append(f"a{index}")
    return names


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as client:
        yield client


def body(model: str, index: int, **fields: Any) -> dict[str, Any]:
    question = [{"role": "user", "content": f"Tell me about the number {index}."}]
    return {
        "model": model,
        "messages": question,
        "temperature": 0,
        "max_tokens": 12,
        "return_token_ids": True,
        **fields,
    }


async def whole(http: httpx.AsyncClient, model: str, index: int, **fields: Any) -> list[int]:
    answer = await http.post("/v1/chat/completions", json=body(model, index, **fields))
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


async def streamed(http: httpx.AsyncClient, model: str, index: int, **fields: Any) -> tuple[list[int], str]:
    """Tokens, and how the stream ended: "done", "error" or "cut"."""
    tokens: list[int] = []
    async with http.stream("POST", "/v1/chat/completions", json=body(model, index, stream=True, **fields)) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return tokens, "done"
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return tokens, "error"
                tokens += event["choices"][0].get("token_ids", [])
    return tokens, "cut"


async def test_many_requests_over_more_adapters_than_slots(http: httpx.AsyncClient, adapters: list[str]) -> None:
    quiet = {name: await whole(http, name, SUBJECT) for name in adapters}
    answers = await asyncio.gather(*(whole(http, adapters[i % NUM_ADAPTERS], SUBJECT) for i in range(NUM_REQUESTS)))
    for index, tokens in enumerate(answers):
        assert tokens == quiet[adapters[index % NUM_ADAPTERS]], adapters[index % NUM_ADAPTERS]


async def test_a_killed_replica_costs_only_what_streamed_on_it(
    http: httpx.AsyncClient, served: Served, adapters: list[str]
) -> None:
    right_tokens = await asyncio.gather(*(whole(http, name, SUBJECT, max_tokens=48) for name in adapters))
    half = NUM_REQUESTS // 2
    unary = [asyncio.create_task(whole(http, adapters[i % NUM_ADAPTERS], SUBJECT, max_tokens=48)) for i in range(half)]
    streams = [
        asyncio.create_task(streamed(http, adapters[i % NUM_ADAPTERS], SUBJECT, max_tokens=48)) for i in range(half)
    ]
    await asyncio.sleep(3)
    victim = replica_processes(served)[0].pid
    os.kill(victim, signal.SIGKILL)
    for index, tokens in enumerate(await asyncio.gather(*unary)):
        assert tokens == right_tokens[index % NUM_ADAPTERS]
    endings = []
    for index, (tokens, ending) in enumerate(await asyncio.gather(*streams)):
        right = right_tokens[index % NUM_ADAPTERS]
        endings.append(ending)
        assert ending in ("done", "error"), "a stream never just stops"
        assert tokens == right if ending == "done" else tokens == right[: len(tokens)]
    assert "done" in endings
    await wait_until_healed(http, served, victim)
    healed = await asyncio.gather(*(whole(http, name, SUBJECT, max_tokens=48) for name in adapters))
    assert healed == right_tokens, "the replacement serves every adapter"


async def test_a_dead_engine_is_replaced(http: httpx.AsyncClient, served: Served) -> None:
    replica = replica_processes(served)[0]
    [engine] = [child for child in replica.children() if "deployments.engine_process" in child.cmdline()]
    engine.kill()
    await wait_until_healed(http, served, replica.pid)
    assert not psutil.pid_exists(engine.pid)
    assert len(await whole(http, "pirate", 3)) > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_place(http: httpx.AsyncClient, served: Served, stream: bool) -> None:
    """The engines fall idle long before the answer, more than a minute of work, could have ended."""
    # An engine that the test before had replaced may still be starting.
    await wait_until_idle(served, timeout_s=120)
    long = body("pirate", 4, stream=stream, max_tokens=1900, ignore_eos=True)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(leave_after_the_first_token(http, long), timeout=3)
    await wait_until_idle(served, timeout_s=20)


async def leave_after_the_first_token(http: httpx.AsyncClient, request: dict[str, Any]) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=request) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                return


async def wait_until_idle(served: Served, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (used_s := await busiest_engine_s(served, seconds=2)) > 0.2:
        assert time.monotonic() < deadline, f"an engine still uses {used_s} s of 2 s"


async def busiest_engine_s(served: Served, *, seconds: float) -> float:
    """CPU seconds of the busiest engine process over so many seconds."""
    engines = [child for replica in replica_processes(served) for child in replica.children()]
    before = [sum(engine.cpu_times()[:2]) for engine in engines]
    await asyncio.sleep(seconds)
    after = [sum(engine.cpu_times()[:2]) for engine in engines]
    return max(new - old for new, old in zip(after, before, strict=True))
