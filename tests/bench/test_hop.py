"""The parts of `bench_hop` that its figures rest on; the whole of it needs a quiet machine."""

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from deployments.generation import GenerateCall, GenerateChunk, Refusal
from lora_core.messages import GenerateRequest, SamplingParams
from tests.bench.bench_hop import Rounds
from tests.bench.hop_apps import KINDS, HopReplica, OneTokenReplica
from tests.bench.hop_engine import TOKEN_ID, HopEngine
from tests.bench.hop_load import Cost, Ends, spread


def test_the_engine_gives_each_request_a_token_a_tick_until_its_last() -> None:
    engine = HopEngine.__new__(HopEngine)
    engine.warm_up()
    for name, num_tokens in (("a", 3), ("b", 1), ("gone", 9)):
        engine.add_request(GenerateRequest(name, [1], SamplingParams(max_tokens=num_tokens)))
    engine.abort("gone")
    told: dict[str, list[int]] = {"a": [], "b": []}
    ended = []
    while engine.has_work():
        for delta in engine.step():
            told[delta.request_id] += delta.token_ids
            ended += [delta.request_id] if delta.finish_reason == "length" else []
    assert told == {"a": [TOKEN_ID] * 3, "b": [TOKEN_ID]}
    assert ended == ["b", "a"]


async def test_one_token_replicas_send_each_token_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def grouped(_: HopReplica, call: GenerateCall) -> AsyncGenerator[GenerateChunk | Refusal, None]:
        yield GenerateChunk(text="", token_ids=[1])
        yield GenerateChunk(text="", token_ids=[2, 3, 4], finish_reason="length")

    monkeypatch.setattr(HopReplica, "generate", grouped)
    replica = OneTokenReplica.__new__(OneTokenReplica)
    chunks = [chunk async for chunk in replica.generate(GenerateCall(request_id="r"))]
    told = [(chunk.token_ids, chunk.finish_reason) for chunk in chunks if isinstance(chunk, GenerateChunk)]
    assert told == [([1], None), ([2], None), ([3], None), ([4], "length")]


@pytest.mark.parametrize(("num_calls", "concurrency"), [(1, 1), (16, 16), (40, 8)])
async def test_calls_are_as_many_as_asked_for_and_so_many_at_a_time(num_calls: int, concurrency: int) -> None:
    at_once, most = 0, 0

    async def call() -> Ends:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.001)
        at_once -= 1
        return Ends(0.001, 1)

    assert len(await spread(num_calls, concurrency, call)) == num_calls
    assert most == concurrency


def test_points_compare_rounds_with_those_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = Rounds("token_http", "default", 1000)
    for weight in (1.0, 2.0, 4.0):
        # The machine's other work makes whole rounds slower, and not their ratio another one.
        for kind, cpu_s, num_chunks in (("ours", 0.2, 100), ("one_token", 1.0, 1000), ("plain", 1.0, 1000)):
            rounds.add(kind, Cost(weight * cpu_s, 0.5, num_chunks))
    rounds.tell()
    routing, grouping = map(json.loads, capsys.readouterr().out.splitlines())
    assert (routing["measure"], routing["ratio"], routing["met"]) == ("routing token_http default", 1.0, True)
    assert (grouping["ratio"], grouping["half_width"], grouping["met"]) == (0.2, 0.0, True)
    assert (grouping["ours_tokens_per_chunk"], grouping["one_token_tokens_per_chunk"]) == (10.0, 1.0)
    assert set(KINDS) == {"ours", "one_token", "plain"}
