"""Section C across the channel: what happens between a replica and its engine process."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from deployments.engine_client import EngineClient
from lora_core.config import LoRAConfig
from lora_core.errors import ConfigError, RequestTimeout
from lora_core.messages import GenerateRequest, SamplingParams
from lora_core.types import LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus
from tests.cases.registry import OWN, Got, all_of, case
from tests.cases.serving import PROMPTS, contains, same_tokens, words
from tests.cases.world import World, engine_config


def load(name: str, folder: Path | str, **fields: Any) -> LoRARequest:
    return LoRARequest(LoRAOperation.LOAD, name, str(folder), **fields)


def unload(name: str) -> LoRARequest:
    return LoRARequest(LoRAOperation.UNLOAD, name)


async def until_running(client: EngineClient) -> None:
    """Wait until the engine has told that it runs a request."""
    while client.status.num_running == 0:  # noqa: ASYNC110  # the client has no event for it
        await asyncio.sleep(0.01)


async def ask(client: EngineClient, request: LoRARequest, timeout_s: float = 30) -> LoRAResponse:
    return await client.lora(request, timeout_s)


async def tokens_of(client: EngineClient, name: str | None, prompt: list[int], num_tokens: int) -> list[int]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    tokens: list[int] = []
    async for delta in client.submit(GenerateRequest("r", prompt, sampling, name)):
        assert delta.error is None, delta.error
        tokens += delta.token_ids
    return tokens


@case("MAX 26.7", "a client times out on a load, then asks about another name", "its own answer, never the late one")
def late_answer(world: World) -> Got:
    first, second = world.adapter(seed=44), world.adapter(seed=46, r=2)

    async def run(client: EngineClient) -> tuple[str, list[LoRAResponse]]:
        os.kill(client.pid, signal.SIGSTOP)
        try:
            await ask(client, load("late", first), 0.2)
            timed_out = "answered"
        except RequestTimeout as error:
            timed_out = str(error)
        finally:
            os.kill(client.pid, signal.SIGCONT)
        responses = [
            await ask(client, load("next", second)),
            await ask(client, load("bad", "/nowhere")),
            await ask(client, load("late", first)),
        ]
        responses += [await ask(client, unload(name)) for name in ("late", "next")]
        return timed_out, responses

    timed_out, responses = world.run(run(world.client))
    expected = ("next", "bad", "late", "late", "next")
    own = all(f"'{name}'" in words(response) for name, response in zip(expected, responses, strict=True))
    statuses = [response.status.value for response in responses]
    right = statuses == ["success", "load_invalid_path", "success", "success", "success"] and own
    return all_of(contains(timed_out, "late", "0.2"), Got(f"{statuses}, each its own: {own}", right))


@case("MAX 26.7", "a client times out on an answer, then asks again", "gets its own tokens, never the late ones")
def late_tokens(world: World) -> Got:
    async def run(client: EngineClient) -> tuple[bool, list[int]]:
        os.kill(client.pid, signal.SIGSTOP)
        late = asyncio.ensure_future(tokens_of(client, None, PROMPTS[7], 30))
        _, pending = await asyncio.wait({late}, timeout=0.2)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        os.kill(client.pid, signal.SIGCONT)
        return bool(pending), await tokens_of(client, None, PROMPTS[20], 12)

    timed_out, tokens = world.run(run(world.client))
    return all_of(Got("timed out", timed_out), same_tokens(world, "llama", None, PROMPTS[20], tokens))


@case("vllm#13698", "loads, refusals and unloads while 6 streams run in the process", "safe: every token right")
def load_while_streaming(world: World) -> Got:
    folders = [world.adapter(seed=44), world.adapter(seed=46, r=2)]

    async def run(client: EngineClient) -> tuple[list[list[int]], list[LoRAStatus]]:
        statuses = []
        for index, folder in enumerate(folders):
            await ask(client, load(f"s{index}", folder))
        streams = [
            asyncio.ensure_future(tokens_of(client, (None, "s0", "s1")[index % 3], PROMPTS[20], 150))
            for index in range(6)
        ]
        turn = 0
        while not all(stream.done() for stream in streams):
            turn += 1
            statuses += [
                (await ask(client, load("passing", world.adapter(seed=47)))).status,
                (await ask(client, load("bad", world.adapter(seed=31, r=64)))).status,
                (await ask(client, unload("passing"))).status,
            ]
        answers = [await stream for stream in streams]
        for index in range(2):
            await ask(client, unload(f"s{index}"))
        return answers, statuses

    world.adapter(seed=31, r=64), world.adapter(seed=47)
    answers, statuses = world.run(run(world.client))
    three = [LoRAStatus.SUCCESS, LoRAStatus.LOAD_INVALID_ADAPTER, LoRAStatus.SUCCESS]
    right = len(statuses) >= 3 and statuses == three * (len(statuses) // 3)
    parts = [
        same_tokens(world, "llama", (None, *folders)[index % 3], PROMPTS[20], answer)
        for index, answer in enumerate(answers)
    ]
    return all_of(Got(f"{len(statuses)} operations meanwhile", right), *parts)


@case("vllm#13698", "the longest pause of a running stream while adapters are loaded", "no step waits for a load")
def pauses(world: World) -> Got:
    async def run(client: EngineClient) -> tuple[float, int]:
        sampling = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
        stream = client.submit(GenerateRequest("r", PROMPTS[7], sampling, None))
        num_loads, stop = 0, asyncio.Event()

        async def churn() -> None:
            nonlocal num_loads
            while not stop.is_set():
                await ask(client, load("passing", world.adapter(seed=40, r=16)))
                await ask(client, unload("passing"))
                num_loads += 1

        churning = asyncio.ensure_future(churn())
        longest, last = 0.0, time.monotonic()
        async for _ in stream:
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        stop.set()
        await churning
        return longest, num_loads

    longest, num_loads = world.run(run(world.client))
    return Got(f"{longest * 1000:.0f} ms over {num_loads} loads", longest < 1.0 and num_loads > 0)


@case("sglang#36894", "16 streams, then unload across the channel", "answered at once; the streams complete")
def unload_behind_streams(world: World) -> Got:
    folder = world.adapter(seed=44)

    async def run(client: EngineClient) -> tuple[float, LoRAResponse, list[list[int]]]:
        await ask(client, load("n16", folder))
        streams = [asyncio.ensure_future(tokens_of(client, "n16", PROMPTS[7], 60)) for _ in range(16)]
        await until_running(client)
        start = time.monotonic()
        response = await ask(client, unload("n16"), 5)
        return time.monotonic() - start, response, await asyncio.gather(*streams)

    took_s, response, answers = world.run(run(world.client))
    parts = [same_tokens(world, "llama", folder, PROMPTS[7], answer) for answer in answers[::5]]
    lengths = {len(answer) for answer in answers}
    right = response.status is LoRAStatus.SUCCESS and took_s < 2 and lengths == {60}
    return all_of(Got(f"unload took {took_s * 1000:.0f} ms, answers of {lengths} tokens", right), *parts)


@case("ai-dynamo PR#5184", "20 parallel loads of one name across the channel", "all succeed; one entry")
def parallel_loads(world: World) -> Got:
    async def run(client: EngineClient) -> tuple[list[LoRAResponse], list[str]]:
        responses = await asyncio.gather(*(ask(client, load("one", world.adapter(seed=44))) for _ in range(20)))
        # The engine tells what it holds after a step, beside its answers.
        for _ in range(100):
            loaded = [ref.name for ref in client.residency.loaded or ()]
            if loaded:
                break
            await asyncio.sleep(0.05)
        await ask(client, unload("one"))
        return list(responses), loaded

    responses, loaded = world.run(run(world.client))
    statuses = {response.status for response in responses}
    right = statuses == {LoRAStatus.SUCCESS} and len(responses) == 20 and loaded.count("one") == 1
    return Got(f"{[s.value for s in statuses]}, held: {loaded}", right)


@case("vllm PR#20636", "two parallel unloads across the channel, ten times", "one succeeds, one knows no such name")
def parallel_unloads(world: World) -> Got:
    async def run(client: EngineClient) -> list[set[str]]:
        found = []
        for _ in range(10):
            await ask(client, load("two", world.adapter(seed=44)))
            responses = await asyncio.gather(*(ask(client, unload("two")) for _ in range(2)))
            found.append({response.status.value for response in responses})
        return found

    found = world.run(run(world.client))
    return Got(f"{sorted(found[0])} ten times", found == [{"success", "unload_name_nonexistent"}] * 10)


@case("vllm#42125", "replace across the channel while a stream runs", "the stream keeps the old weights")
def replace_in_process(world: World) -> Got:
    old, new = world.adapter(seed=44), world.adapter(seed=46, r=2)

    async def run(client: EngineClient) -> tuple[LoRAResponse, list[int], list[int]]:
        await ask(client, load("x", old))
        stream = asyncio.ensure_future(tokens_of(client, "x", PROMPTS[20], 80))
        await until_running(client)
        response = await ask(client, load("x", new, replace=True))
        after = await tokens_of(client, "x", PROMPTS[20], 12)
        before = await stream
        await ask(client, unload("x"))
        return response, before, after

    response, before, after = world.run(run(world.client))
    return all_of(
        Got(words(response), response.status is LoRAStatus.SUCCESS and response.report is not None),
        same_tokens(world, "llama", old, PROMPTS[20], before, "old: "),
        same_tokens(world, "llama", new, PROMPTS[20], after, "new: "),
    )


PINS = {"pin": LoRAOperation.PIN, "unpin": LoRAOperation.UNPIN}


@case(OWN, "operations across the channel", "SUCCESS for a loaded name, PIN_NAME_NONEXISTENT for another", PINS)
def pins(world: World, operation: LoRAOperation) -> Got:
    async def run(client: EngineClient) -> tuple[LoRAResponse, LoRAResponse]:
        await ask(client, load("p", world.adapter(seed=44)))
        if operation is LoRAOperation.UNPIN:
            await ask(client, LoRARequest(LoRAOperation.PIN, "p"))
        known = await ask(client, LoRARequest(operation, "p"))
        unknown = await ask(client, LoRARequest(operation, "nobody"))
        await ask(client, unload("p"))
        return known, unknown

    known, unknown = world.run(run(world.client))
    right = (known.status, unknown.status) == (LoRAStatus.SUCCESS, LoRAStatus.PIN_NAME_NONEXISTENT)
    return all_of(Got(f"{known.status.value}, {unknown.status.value}", right), contains(words(unknown), "nobody"))


@case(
    "sglang#30168",
    "a process whose lora_paths name a path that does not exist",
    "its start fails, with name and reason",
)
def start_of_process(world: World) -> Got:
    async def run() -> str:
        lora = LoRAConfig(enable_lora=True, lora_paths=("startup=/nowhere/at/all",))
        client = EngineClient(engine_config(world.base(), num_threads=1), lora)
        try:
            await client.start(60)
        except ConfigError as error:
            return str(error)
        finally:
            await client.close()
        return "started"

    return contains(world.run(run()), "startup", "/nowhere/at/all")


@case(OWN, "names no adapter can have across the channel", "refused, and the channel goes on")
def odd_names(world: World) -> Got:
    async def run(client: EngineClient) -> list[LoRAResponse]:
        folder = world.adapter(seed=44)
        return [
            await ask(client, load("", folder)),
            await ask(client, load("a=b", folder)),
            await ask(client, unload("a=b")),
            await ask(client, load("fine", folder)),
            await ask(client, unload("fine")),
        ]

    statuses = [response.status.value for response in world.run(run(world.client))]
    expected = ["load_invalid_adapter", "load_invalid_adapter", "unload_name_nonexistent", "success", "success"]
    return Got(f"{statuses}", statuses == expected)
