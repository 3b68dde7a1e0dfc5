"""`EngineClient` with a real engine process: tokens, adapters, aborts, and every way either side can end."""

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from deployments.child_process import PROJECT_ROOT
from deployments.engine_client import EngineClient
from deployments.socket_folder import sweep
from deployments.token_stream import TokenStream
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.errors import EngineDead, InvalidRequest, RequestTimeout, UnsupportedModel
from lora_core.messages import GenerateRequest, SamplingParams
from lora_core.types import LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus
from tests.factories import reference_tokens

PROMPT = [5, 17, 99, 3, 42]
LORA = LoRAConfig(enable_lora=True, max_num_loras=2, max_lora_rank=8)
START_S = 60.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


def engine_config(model: Path) -> EngineConfig:
    return EngineConfig(model=model, dtype="float32", device="cpu", kv_cache_tokens=2048, num_threads=1)


def request(request_id: str, n: int, lora_name: str | None = None) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id, PROMPT, sampling, lora_name)


async def tokens_of(stream: TokenStream) -> list[int]:
    return [token_id async for delta in stream for token_id in delta.token_ids]


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def modes(folder: Path) -> list[int]:
    """Access rights of everything in a folder."""
    return [stat.S_IMODE(entry.stat().st_mode) for entry in folder.iterdir()]


def load(name: str, path: Path) -> LoRARequest:
    return LoRARequest(LoRAOperation.LOAD, name, str(path))


def unload(name: str) -> LoRARequest:
    return LoRARequest(LoRAOperation.UNLOAD, name)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(tiny_base: Path) -> AsyncIterator[EngineClient]:
    """A started client, shared: each test leaves it without requests and adapters."""
    client = EngineClient(engine_config(tiny_base), LORA, stall_timeout_s=1.5)
    await client.start(START_S)
    yield client
    pid = client.pid
    await client.close()
    assert not is_running(pid)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """An empty folder with room for the names of sockets, which pytest's own folders leave none for."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@contextlib.asynccontextmanager
async def loaded(client: EngineClient, name: str, path: Path) -> AsyncIterator[LoRAResponse]:
    response = await client.lora(load(name, path), 20)
    assert response.status is LoRAStatus.SUCCESS, response.message
    yield response
    await client.lora(unload(name), 20)


async def test_answers_through_base_and_adapters_at_once(
    client: EngineClient, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    names = [None, "linear-r4", "rslora-r8"]
    async with (
        loaded(client, "linear-r4", tiny_adapters["linear-r4"]),
        loaded(client, "rslora-r8", tiny_adapters["rslora-r8"]),
    ):
        streams = [client.submit(request(f"at-once-{name}", 12, name)) for name in names]
        found = await asyncio.gather(*(tokens_of(stream) for stream in streams))
        assert {ref.name for ref in client.residency.resident} == {"linear-r4", "rslora-r8"}
    expected = [reference_tokens(tiny_base, tiny_adapters[name] if name else None, PROMPT, 12) for name in names]
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) == 3


async def test_a_faulty_request_is_answered_in_its_stream(client: EngineClient) -> None:
    last = [delta async for delta in client.submit(request("unknown-adapter", 4, "nobody"))][-1]
    assert (last.finish_reason, last.error_type) == ("error", "AdapterNotFound")
    assert "nobody" in str(last.error)


async def test_requests_of_one_id_are_kept_apart(client: EngineClient) -> None:
    first = client.submit(request("same", 300))
    second = client.submit(request("same", 40))
    await anext(first)
    # Tokens of the first are on their way when the third begins.
    first.close()
    third = client.submit(request("same", 3))
    assert [len(tokens) for tokens in await asyncio.gather(tokens_of(second), tokens_of(third))] == [40, 3]


async def test_numbers_that_cannot_travel_are_refused(client: EngineClient) -> None:
    with pytest.raises(InvalidRequest, match="64 bits"):
        client.submit(GenerateRequest("huge", [2**70]))
    assert len(await tokens_of(client.submit(request("after", 2)))) == 2


@pytest.mark.parametrize("how", ["close", "drop", "cancel"])
async def test_a_stream_nobody_reads_is_forgotten_by_the_engine(client: EngineClient, how: str) -> None:
    first_step = client.status.step
    stream = client.submit(request(f"long-{how}", 500))
    assert (await anext(stream)).token_ids
    other = asyncio.create_task(tokens_of(client.submit(request(f"beside-{how}", 30))))
    if how == "close":
        stream.close()
    elif how == "cancel":
        with pytest.raises(asyncio.TimeoutError):
            # Reads on until it is cancelled inside `__anext__`.
            await asyncio.wait_for(tokens_of(stream), 0.02)
    if how == "drop":
        del stream
    assert len(await other) == 30
    await until(lambda: client.status.num_running == 0, 10)
    assert client.status.step - first_step < 300


async def test_adapter_operations_are_answered_while_idle_and_while_busy(
    client: EngineClient, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    start = time.monotonic()
    missing = await client.lora(load("x", tmp_path / "nothing"), 20)
    assert time.monotonic() - start < 0.4, "an idle engine did not wake up for an adapter operation"
    assert missing.status is LoRAStatus.LOAD_INVALID_PATH
    assert (await client.lora(unload("x"), 20)).status is LoRAStatus.UNLOAD_NAME_NONEXISTENT

    stream = client.submit(request("busy", 200))
    async with loaded(client, "a", tiny_adapters["linear-r4"]):
        await until(lambda: [ref.name for ref in client.residency.loaded or ()] == ["a"], 2)
        assert client.residency.in_memory == client.residency.loaded
        through_adapter = client.submit(request("through-a", 150, "a"))
        first = await anext(through_adapter)
    await until(lambda: not client.residency.loaded, 2)
    # Accepted before the unload: both finish, and in full.
    assert len(await tokens_of(stream)) == 200
    assert len(first.token_ids) + len(await tokens_of(through_adapter)) == 150


async def test_an_idle_engine_is_healthy(client: EngineClient) -> None:
    await asyncio.sleep(2.0)
    client.check_healthy()


async def test_silence_is_noticed_and_forgiven(client: EngineClient) -> None:
    stream = client.submit(request("frozen", 500))
    await anext(stream)
    os.kill(client.pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.raises(EngineDead, match="silent"):
            await tokens_of(stream)
        assert 1.0 < time.monotonic() - start < 4.0
        with pytest.raises(EngineDead, match="silent"):
            client.check_healthy()
        with pytest.raises(EngineDead, match="silent"):
            client.submit(request("too-late", 1))
    finally:
        os.kill(client.pid, signal.SIGCONT)
    await until(lambda: client.status.num_running == 0, 2)
    client.check_healthy()
    assert len(await tokens_of(client.submit(request("thawed", 5)))) == 5


async def test_death_fails_everything_at_once(
    tiny_base: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    client = EngineClient(engine_config(tiny_base), LORA)
    await client.start(START_S)
    try:
        streams = [client.submit(request(f"doomed-{index}", 500)) for index in range(3)]
        await anext(streams[0])
        # Never answered: a path the store waits for cannot be arranged, a stopped process can.
        os.kill(client.pid, signal.SIGSTOP)
        operation = asyncio.create_task(client.lora(unload("x"), 60))
        await asyncio.sleep(0.05)
        os.kill(client.pid, signal.SIGKILL)
        start = time.monotonic()
        results = await asyncio.gather(*(tokens_of(stream) for stream in streams), operation, return_exceptions=True)
        assert time.monotonic() - start < 1.0
        for result in results:
            assert isinstance(result, EngineDead)
            assert "signal 9" in str(result)
        # Not only when the parent closes, which it may have no time for.
        await until(lambda: modes(short_folder) == [], 1)
        with pytest.raises(EngineDead):
            client.check_healthy()
        with pytest.raises(EngineDead):
            client.submit(request("late", 1))
        with pytest.raises(EngineDead):
            await client.lora(unload("x"), 1)
    finally:
        await client.close()


async def test_sockets_are_private_and_removed(
    tiny_base: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    client = EngineClient(engine_config(tiny_base), LoRAConfig())
    start = asyncio.create_task(client.start(START_S))
    await until(lambda: len(modes(short_folder)) == 1, 5)
    assert modes(short_folder) == [0o700]
    ready = await start
    assert (ready.num_slots, ready.vocab_size, ready.max_model_len) == (0, 128, 512)
    last = [delta async for delta in client.submit(request("lora-off", 1, "a"))][-1]
    assert last.error_type == "LoRADisabled"
    pid = client.pid
    stream = client.submit(request("under-way", 400))
    await client.close()
    await client.close()
    assert not is_running(pid)
    assert modes(short_folder) == []
    with pytest.raises(EngineDead, match="shut down"):
        await tokens_of(stream)


async def test_a_model_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}')
    client = EngineClient(engine_config(tmp_path), LORA)
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration"):
        await client.start(START_S)
    assert not is_running(client.pid)


async def test_a_start_that_takes_too_long_is_given_up(tiny_base: Path) -> None:
    client = EngineClient(engine_config(tiny_base), LORA)
    with pytest.raises(EngineDead, match="start_timeout_s"):
        await client.start(0.3)
    assert not is_running(client.pid)


async def test_a_process_that_ends_without_a_word_is_described(tiny_base: Path) -> None:
    client = EngineClient(engine_config(tiny_base), LORA, module="tests.engine.no_such_module")
    with pytest.raises(EngineDead, match=r"status 1.*No module named tests.engine.no_such_module"):
        await client.start(START_S)


async def test_a_fault_in_a_step_is_told_with_its_reason(tiny_base: Path) -> None:
    client = EngineClient(engine_config(tiny_base), LORA, module="tests.engine.faulty_process")
    await client.start(START_S)
    try:
        stream = client.submit(request("unlucky", 100))
        with pytest.raises(EngineDead, match="RuntimeError: step 5 went wrong"):
            await tokens_of(stream)
        await until(lambda: not is_running(client.pid), 5)
    finally:
        await client.close()


async def test_what_an_engine_has_lost_is_found_when_it_rests(tiny_base: Path) -> None:
    client = EngineClient(engine_config(tiny_base), LORA, module="tests.engine.leaky_process")
    await client.start(START_S)
    try:
        assert len(await tokens_of(client.submit(request("sound", 5)))) == 5
        # Longer than it takes an engine to look.
        await asyncio.sleep(1.5)
        client.check_healthy()
        assert len(await tokens_of(client.submit(request("leak", 5)))) == 5
        await until(lambda: not is_running(client.pid), 10)
        with pytest.raises(EngineDead, match=r"AssertionError: .* blocks do not partition"):
            client.check_healthy()
    finally:
        await client.close()


PARENT = """
import asyncio, sys
from deployments.engine_client import EngineClient
from lora_core.config import EngineConfig, LoRAConfig

async def main():
    client = EngineClient(EngineConfig(model=sys.argv[1], device="cpu", num_threads=1), LoRAConfig())
    await client.start(60)
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL])
async def test_a_killed_parent_leaves_nothing_whatever_befalls_its_process(
    tiny_base: Path, short_folder: Path, blow: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(tiny_base)),
        cwd=PROJECT_ROOT,
        env={**os.environ, "TMPDIR": str(short_folder)},
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    try:
        pid = int(await parent.stdout.readline())
        assert is_running(pid)
        assert len(modes(short_folder)) == 1
        # Both at the same time, as when their process group is killed.
        if blow is not signal.SIGSTOP:
            parent.send_signal(signal.SIGSTOP)
        os.kill(pid, blow)
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: not is_running(pid), 5)
    if blow is signal.SIGKILL:
        monkeypatch.setattr("tempfile.tempdir", str(short_folder))
        sweep()
    assert modes(short_folder) == []


async def test_an_operation_without_an_answer_times_out(client: EngineClient) -> None:
    os.kill(client.pid, signal.SIGSTOP)
    try:
        with pytest.raises(RequestTimeout):
            await client.lora(unload("x"), 0.2)
    finally:
        os.kill(client.pid, signal.SIGCONT)
    # Its late answer is dropped: the next caller gets its own.
    assert (await client.lora(unload("y"), 5)).message != (await client.lora(unload("x"), 5)).message
