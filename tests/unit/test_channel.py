"""Messages between a replica and its engine, over real sockets: typed links, LoRA operations and their answers."""

import asyncio
import collections
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from lora_core import channel as channel_module
from lora_core.channel import (
    NUM_LOADERS,
    REQUEST_ENDPOINT,
    RESPONSE_ENDPOINT,
    AdapterOperations,
    AsyncMessageReceiver,
    LoRAQueue,
    LoRARequestProcessor,
    MessageReceiver,
    MessageSender,
    endpoint,
)
from lora_core.config import LoRAConfig
from lora_core.errors import ConfigError, EngineDead, RequestTimeout
from lora_core.manager import LoRAManagerV3
from lora_core.messages import (
    AbortRequest,
    EngineEvent,
    EngineRequest,
    GenerateRequest,
    ProtectAdapters,
    ResetAdapter,
    Residency,
    StepOutput,
)
from lora_core.places import Places
from lora_core.targets import LoRATargetModule
from lora_core.types import AdapterRef, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus
from lora_core.workload import AdapterWork, Workload

LONG_S = 20.0


@pytest.fixture
def base() -> Iterator[str]:
    """A ZMQ endpoint base in a private folder."""
    with tempfile.TemporaryDirectory(prefix="lf-") as folder:
        yield f"ipc://{folder}/engine"


def load_of(name: str, path: str | None = "/adapters/x", generation: int | None = None) -> LoRARequest:
    return LoRARequest(LoRAOperation.LOAD, name, path, generation)


def unload_of(name: str) -> LoRARequest:
    return LoRARequest(LoRAOperation.UNLOAD, name)


class Adapters:
    """A manager without tensors: loads wait at a gate, and what happened is written down."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.loaded: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        # Names whose loads wait at the gate; empty is all.
        self.slow: set[str] = set()
        self.started = threading.Event()

    def load_adapter(
        self, spec: str, *, generation: int | None, replace: bool, content_hash: str | None
    ) -> LoRAResponse:
        words = ["load", spec, *(["as", str(generation)] if generation else []), *(["again"] if replace else [])]
        self.calls.append(" ".join([*words, *([content_hash] if content_hash else [])]))
        self.threads.add(threading.current_thread().name)
        self.started.set()
        name = spec.partition("=")[0]
        assert (self.slow and name not in self.slow) or self.gate.wait(LONG_S)
        if name == "broken":
            raise RuntimeError("the disk is on fire")
        self.loaded.add(name)
        return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} loaded successfully")

    def unload_adapter(self, name: str) -> LoRAResponse:
        self.calls.append(f"unload {name}")
        self.threads.add(threading.current_thread().name)
        if name not in self.loaded:
            return LoRAResponse(LoRAStatus.UNLOAD_NAME_NONEXISTENT, f"LoRA adapter {name!r} is not loaded")
        self.loaded.remove(name)
        return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} unloaded successfully")

    def pin_adapter(self, name: str) -> LoRAResponse:
        self.calls.append(f"pin {name}")
        return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} pinned successfully")

    def unpin_adapter(self, name: str) -> LoRAResponse:
        self.calls.append(f"unpin {name}")
        return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} unpinned successfully")

    def warm_adapter(self, name: str) -> LoRAResponse:
        self.calls.append(f"warm {name}")
        return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} is on its way to a slot")


class Engine:
    """The answering side, polled by a thread named "step-loop" as an engine's step loop does."""

    def __init__(self, base: str, manager: AdapterOperations | None = None) -> None:
        self.adapters = Adapters()
        self.processor = LoRARequestProcessor(manager or self.adapters, base)
        self.longest_poll_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._step, name="step-loop")
        self._thread.start()

    def _step(self) -> None:
        while not self._stop.wait(0.001):
            started = time.monotonic()
            self.processor.process_lora_requests()
            self.longest_poll_s = max(self.longest_poll_s, time.monotonic() - started)

    def close(self) -> None:
        self.adapters.gate.set()
        self._stop.set()
        self._thread.join()
        self.processor.close()
        self.processor.close()


@pytest.fixture
def engine(base: str) -> Iterator[Engine]:
    engine = Engine(base)
    yield engine
    engine.close()


@pytest.fixture
async def lora_queue(base: str) -> AsyncIterator[LoRAQueue]:
    queue = LoRAQueue(base)
    yield queue
    await queue.close()
    await queue.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


def receive(receiver: MessageReceiver[EngineRequest], count: int) -> list[EngineRequest]:
    """Poll until `count` messages have come."""
    messages: list[EngineRequest] = []
    deadline = time.monotonic() + LONG_S
    while len(messages) < count and time.monotonic() < deadline:
        messages += receiver.poll(50)
    return messages


# Links


@pytest.mark.parametrize("sender_binds", [True, False])
@pytest.mark.parametrize("sender_is_first", [True, False])
def test_no_message_is_lost_whoever_comes_first(base: str, sender_binds: bool, sender_is_first: bool) -> None:
    address = endpoint(base, REQUEST_ENDPOINT)
    sent = [GenerateRequest(f"r{n}", [n]) for n in range(3000)]
    receiver: MessageReceiver[EngineRequest] | None = None
    if not sender_is_first:
        receiver = MessageReceiver(address, EngineRequest, bind=not sender_binds)
    sender = MessageSender(address, bind=sender_binds)
    started = time.monotonic()
    for message in sent[:2000]:
        sender.send(message)
    assert time.monotonic() - started < 5  # it never waits for the peer
    if receiver is None:
        receiver = MessageReceiver(address, EngineRequest, bind=not sender_binds)
    for message in sent[2000:]:
        sender.send(message)
    assert receive(receiver, 3000) == sent
    assert receiver.poll() == []
    sender.close()
    receiver.close()


def test_messages_keep_their_type(base: str) -> None:
    sender = MessageSender(endpoint(base, REQUEST_ENDPOINT), bind=True)
    receiver: MessageReceiver[EngineRequest] = MessageReceiver(
        endpoint(base, REQUEST_ENDPOINT), EngineRequest, bind=False
    )
    sent: list[EngineRequest] = [
        GenerateRequest("a", [1, 2], lora_name="x"),
        AbortRequest("a"),
        ProtectAdapters(["x"]),
        ResetAdapter("x", "it hangs"),
    ]
    for message in sent:
        sender.send(message)
    assert receive(receiver, len(sent)) == sent
    sender.close()
    receiver.close()


def test_poll_waits_no_longer_than_asked(base: str) -> None:
    receiver: MessageReceiver[EngineRequest] = MessageReceiver(
        endpoint(base, REQUEST_ENDPOINT), EngineRequest, bind=False
    )
    started = time.monotonic()
    assert receiver.poll(50) == []
    assert 0.04 < time.monotonic() - started < 5
    receiver.close()


async def test_async_receiver(base: str) -> None:
    receiver: AsyncMessageReceiver[EngineEvent] = AsyncMessageReceiver(
        endpoint(base, RESPONSE_ENDPOINT), EngineEvent, bind=True
    )
    sender = MessageSender(endpoint(base, RESPONSE_ENDPOINT), bind=False)
    waiting = asyncio.create_task(receiver.recv())
    await asyncio.sleep(0.01)
    x = AdapterRef("x", 7)
    adapters = [AdapterWork(name="x", num_tokens=3), AdapterWork(num_running=1)]
    work = Workload(seconds=0.5, adapters=adapters, service_ms=2.0)
    sent: list[EngineEvent] = [Residency(1, [x], [x]), Residency(2, [x], None, None, [x], 2), StepOutput(1), work]
    for event in sent:
        sender.send(event)
    assert [await waiting, *[await receiver.recv() for _ in sent[1:]]] == sent
    assert isinstance(sent[0], Residency)
    sender.close()
    receiver.close()


def test_a_message_not_understood_is_dropped_and_the_next_arrives(base: str, caplog: pytest.LogCaptureFixture) -> None:
    receiver: MessageReceiver[EngineRequest] = MessageReceiver(
        endpoint(base, REQUEST_ENDPOINT), EngineRequest, bind=True
    )
    sender = MessageSender(endpoint(base, REQUEST_ENDPOINT), bind=False)
    sender.send({"type": "nonsense"})
    sender.send(AbortRequest("a"))
    assert receive(receiver, 1) == [AbortRequest("a")]
    assert "was not understood and is dropped" in caplog.text
    sender.close()
    receiver.close()


def test_messages_sent_before_close_arrive(base: str) -> None:
    receiver: MessageReceiver[EngineRequest] = MessageReceiver(
        endpoint(base, REQUEST_ENDPOINT), EngineRequest, bind=True
    )
    sender = MessageSender(endpoint(base, REQUEST_ENDPOINT), bind=False)
    for n in range(500):
        sender.send(AbortRequest(str(n)))
    sender.close()
    assert len(receive(receiver, 500)) == 500
    receiver.close()


def test_closing_without_a_peer_returns_and_says_what_is_lost(base: str, caplog: pytest.LogCaptureFixture) -> None:
    sender = MessageSender(endpoint(base, REQUEST_ENDPOINT), bind=True)
    sender.send(AbortRequest("a"))
    started = time.monotonic()
    sender.close()
    sender.close()
    assert time.monotonic() - started < 3
    assert "1 messages were never taken by a peer" in caplog.text
    with pytest.raises(EngineDead, match="closed channel"):
        sender.send(AbortRequest("b"))


def test_many_threads_may_send(base: str) -> None:
    receiver: MessageReceiver[EngineRequest] = MessageReceiver(
        endpoint(base, REQUEST_ENDPOINT), EngineRequest, bind=False
    )
    sender = MessageSender(endpoint(base, REQUEST_ENDPOINT), bind=True)

    def send(thread: int) -> None:
        for n in range(200):
            sender.send(GenerateRequest(f"{thread}", [n]))

    threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_thread: dict[str, list[int]] = collections.defaultdict(list)
    for message in receive(receiver, 800):
        assert isinstance(message, GenerateRequest)
        by_thread[message.request_id] += message.prompt_token_ids
    assert by_thread == {str(n): list(range(200)) for n in range(4)}
    sender.close()
    receiver.close()


def test_endpoints_must_be_short_private_and_in_a_folder(base: str) -> None:
    long = "ipc:///tmp/" + "x" * 120
    folder = base.removeprefix("ipc://")
    for address, reason in [
        (f"{long}/engine-request", "a Unix socket's at most 107; set TMPDIR to a shorter folder"),
        ("tcp://127.0.0.1:5555", "not private to this host, expected ipc://"),
        (f"ipc://{folder}/absent/request", "cannot be opened.*does its folder exist"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            MessageSender(address, bind=True)
        with pytest.raises(ConfigError, match=reason):
            MessageReceiver[EngineRequest](address, EngineRequest, bind=True)
        with pytest.raises(ConfigError, match=reason):
            AsyncMessageReceiver[EngineRequest](address, EngineRequest, bind=True)
    with pytest.raises(ConfigError, match="at most 107"):
        LoRARequestProcessor(Adapters(), long)
    # The suffix counts: a base that fits for one link may not for another.
    edge = "ipc:///" + "x" * (107 - 1 - len("-lora_request"))
    assert endpoint(edge, "lora_request")
    with pytest.raises(ConfigError, match="has 108 bytes"):
        endpoint(edge, "lora_response")


async def test_a_queue_that_cannot_bind_leaves_nothing_behind(base: str) -> None:
    edge = base + "x" * (107 - len(os.fsencode(base.removeprefix("ipc://"))) - len("-lora_request"))
    with pytest.raises(ConfigError, match="has 108 bytes"):
        LoRAQueue(edge)


# LoRA operations


async def test_load_then_unload(engine: Engine, lora_queue: LoRAQueue) -> None:
    loaded = await lora_queue.submit(load_of("x", "/adapters/x", 12), LONG_S)
    assert loaded == LoRAResponse(LoRAStatus.SUCCESS, "LoRA adapter 'x' loaded successfully")
    unloaded = await lora_queue.submit(unload_of("x"), LONG_S)
    assert unloaded == LoRAResponse(LoRAStatus.SUCCESS, "LoRA adapter 'x' unloaded successfully")
    again = await lora_queue.submit(unload_of("x"), LONG_S)
    assert again.status is LoRAStatus.UNLOAD_NAME_NONEXISTENT
    await lora_queue.submit(load_of("alone", None), LONG_S)
    assert engine.adapters.calls == ["load x=/adapters/x as 12", "unload x", "unload x", "load alone"]
    assert "step-loop" in engine.adapters.threads
    assert all(name.startswith("lora-loader") for name in engine.adapters.threads - {"step-loop"})


async def test_a_queue_may_ask_before_the_engine_is_there(base: str, lora_queue: LoRAQueue) -> None:
    asking = asyncio.create_task(lora_queue.submit(load_of("x"), LONG_S))
    await asyncio.sleep(0.1)
    engine = Engine(base)
    assert (await asking).status is LoRAStatus.SUCCESS
    engine.close()


async def test_the_step_loop_goes_on_while_an_adapter_loads(engine: Engine, lora_queue: LoRAQueue) -> None:
    engine.adapters.loaded.add("other")
    engine.adapters.gate.clear()
    loading = asyncio.create_task(lora_queue.submit(load_of("x"), LONG_S))
    await until(engine.adapters.started.is_set)
    assert (await lora_queue.submit(unload_of("other"), LONG_S)).status is LoRAStatus.SUCCESS
    assert not loading.done()
    assert engine.longest_poll_s < 1
    engine.adapters.gate.set()
    assert (await loading).status is LoRAStatus.SUCCESS


async def test_operations_on_one_name_run_in_order(engine: Engine, lora_queue: LoRAQueue) -> None:
    """An unload that comes while its adapter is loading waits for the load, and the next load waits for both."""
    engine.adapters.gate.clear()
    operations = [load_of("x", "/a"), unload_of("x"), load_of("x", "/a"), unload_of("x"), unload_of("x")]
    asking = [asyncio.create_task(lora_queue.submit(operation, LONG_S)) for operation in operations]
    await until(engine.adapters.started.is_set)
    await asyncio.sleep(0.05)
    assert engine.adapters.calls == ["load x=/a"]
    engine.adapters.gate.set()
    answers = [answer.status for answer in await asyncio.gather(*asking)]
    assert engine.adapters.calls == ["load x=/a", "unload x", "load x=/a", "unload x", "unload x"]
    assert answers == [LoRAStatus.SUCCESS] * 4 + [LoRAStatus.UNLOAD_NAME_NONEXISTENT]


async def test_parallel_loads_of_one_name_are_one_read(engine: Engine, lora_queue: LoRAQueue) -> None:
    engine.adapters.gate.clear()
    asking = [asyncio.create_task(lora_queue.submit(load_of("x"), LONG_S)) for _ in range(20)]
    await until(engine.adapters.started.is_set)
    asking += [asyncio.create_task(lora_queue.submit(load_of("x", "/elsewhere"), LONG_S))]
    await asyncio.sleep(0.05)
    engine.adapters.gate.set()
    assert {answer.status for answer in await asyncio.gather(*asking)} == {LoRAStatus.SUCCESS}
    assert engine.adapters.calls == ["load x=/adapters/x", "load x=/elsewhere"]


async def test_a_slow_load_holds_up_no_other_adapter(engine: Engine, lora_queue: LoRAQueue) -> None:
    engine.adapters.slow = {"x"}
    engine.adapters.gate.clear()
    slow = asyncio.create_task(lora_queue.submit(load_of("x"), LONG_S))
    await until(engine.adapters.started.is_set)
    for name in "abcd":
        assert (await lora_queue.submit(load_of(name), LONG_S)).status is LoRAStatus.SUCCESS
    assert not slow.done()
    engine.adapters.gate.set()
    assert (await slow).status is LoRAStatus.SUCCESS


async def test_loads_that_block_for_ever_hold_up_no_other_adapter(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "Places", partial(Places, patience_s=0.05))
    engine, lora_queue = Engine(base), LoRAQueue(base)
    engine.adapters.gate.clear()
    engine.adapters.slow = {f"far{index}" for index in range(2 * NUM_LOADERS)}
    slow = [asyncio.create_task(lora_queue.submit(load_of(name), LONG_S)) for name in sorted(engine.adapters.slow)]
    await until(lambda: len(engine.adapters.calls) >= NUM_LOADERS)
    responses = await asyncio.gather(*(lora_queue.submit(load_of(f"near{index}"), LONG_S) for index in range(20)))
    assert all(response.status is LoRAStatus.SUCCESS for response in responses)
    assert not any(task.done() for task in slow)
    assert (await lora_queue.submit(unload_of("near1"), LONG_S)).status is LoRAStatus.SUCCESS
    engine.adapters.gate.set()
    assert all(response.status is LoRAStatus.SUCCESS for response in await asyncio.gather(*slow))
    await lora_queue.close()
    engine.close()


async def test_only_loads_that_ask_for_the_same_share_one(engine: Engine, lora_queue: LoRAQueue) -> None:
    engine.adapters.gate.clear()
    same = load_of("x", "/x", 7)
    others = [
        load_of("x", "/x", 8),
        LoRARequest(LoRAOperation.LOAD, "x", "/x", 7, replace=True),
        LoRARequest(LoRAOperation.LOAD, "x", "/x", 7, content_hash="beef"),
    ]
    asking = [asyncio.create_task(lora_queue.submit(request, LONG_S)) for request in (same, same, *others)]
    await until(engine.adapters.started.is_set)
    await asyncio.sleep(0.05)
    engine.adapters.gate.set()
    await asyncio.gather(*asking)
    assert engine.adapters.calls == ["load x=/x as 7", "load x=/x as 8", "load x=/x as 7 again", "load x=/x as 7 beef"]


async def test_pins_and_warm_ups_wait_for_the_load_before_them(engine: Engine, lora_queue: LoRAQueue) -> None:
    engine.adapters.gate.clear()
    operations = (LoRAOperation.PIN, LoRAOperation.UNPIN, LoRAOperation.WARM)
    requests = [load_of("x"), *(LoRARequest(operation, "x") for operation in operations)]
    asking = [asyncio.create_task(lora_queue.submit(request, LONG_S)) for request in requests]
    await until(engine.adapters.started.is_set)
    engine.adapters.gate.set()
    answers = await asyncio.gather(*asking)
    assert [answer.message for answer in answers[1:]] == [
        "LoRA adapter 'x' pinned successfully",
        "LoRA adapter 'x' unpinned successfully",
        "LoRA adapter 'x' is on its way to a slot",
    ]
    assert engine.adapters.calls == ["load x=/adapters/x", "pin x", "unpin x", "warm x"]


async def test_concurrent_callers_get_their_own_answers(engine: Engine, lora_queue: LoRAQueue) -> None:
    names = [f"adapter-{n}" for n in range(50)]
    answers = await asyncio.gather(*(lora_queue.submit(load_of(name), LONG_S) for name in names))
    assert [answer.message for answer in answers] == [f"LoRA adapter {name!r} loaded successfully" for name in names]


async def test_a_late_answer_goes_to_nobody(
    engine: Engine, lora_queue: LoRAQueue, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lora_core.channel")
    engine.adapters.gate.clear()
    with pytest.raises(RequestTimeout, match=r"did not answer the load of LoRA adapter 'x' within 0.1 s"):
        await lora_queue.submit(load_of("x"), 0.1)
    asking = asyncio.create_task(lora_queue.submit(unload_of("y"), LONG_S))
    engine.adapters.gate.set()
    assert (await asking).message == "LoRA adapter 'y' is not loaded"
    await until(lambda: "A late answer is dropped: LoRA adapter 'x' loaded successfully" in caplog.text)
    assert (await lora_queue.submit(unload_of("x"), LONG_S)).message == "LoRA adapter 'x' unloaded successfully"


async def test_a_caller_that_gives_up_is_forgotten(engine: Engine, lora_queue: LoRAQueue) -> None:
    engine.adapters.gate.clear()
    asking = asyncio.create_task(lora_queue.submit(load_of("x"), LONG_S))
    await until(engine.adapters.started.is_set)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    engine.adapters.gate.set()
    assert (await lora_queue.submit(unload_of("x"), LONG_S)).status is LoRAStatus.SUCCESS


async def test_an_engine_that_never_answers(lora_queue: LoRAQueue) -> None:
    with pytest.raises(RequestTimeout, match="it may still take effect"):
        await lora_queue.submit(unload_of("x"), 0.05)


async def test_closing_the_queue_frees_its_callers(base: str) -> None:
    queue = LoRAQueue(base)
    asking = [asyncio.create_task(queue.submit(load_of(name), LONG_S)) for name in "ab"]
    await asyncio.sleep(0.02)
    await queue.close()
    for answer in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(answer, EngineDead)
    with pytest.raises(EngineDead, match="closed"):
        await queue.submit(load_of("c"), LONG_S)


async def test_an_unforeseen_failure_is_an_answer(
    engine: Engine, lora_queue: LoRAQueue, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await lora_queue.submit(load_of("broken"), LONG_S)
    assert answer.status is LoRAStatus.UNSPECIFIED_ERROR
    assert "the load of LoRA adapter 'broken' failed unexpectedly: RuntimeError" in answer.message
    assert "the disk is on fire" in caplog.text
    assert (await lora_queue.submit(load_of("x"), LONG_S)).status is LoRAStatus.SUCCESS


@pytest.mark.parametrize("name", ["", "a=b"])
async def test_a_name_that_is_none(engine: Engine, lora_queue: LoRAQueue, name: str) -> None:
    loaded = await lora_queue.submit(load_of(name), LONG_S)
    unloaded = await lora_queue.submit(unload_of(name), LONG_S)
    for operation in (LoRAOperation.PIN, LoRAOperation.WARM):
        answer = await lora_queue.submit(LoRARequest(operation, name), LONG_S)
        assert answer.status is LoRAStatus.PIN_NAME_NONEXISTENT
    assert (loaded.status, unloaded.status) == (LoRAStatus.LOAD_INVALID_ADAPTER, LoRAStatus.UNLOAD_NAME_NONEXISTENT)
    assert engine.adapters.calls == []


def test_polling_says_whether_it_did_something(base: str) -> None:
    adapters = Adapters()
    processor = LoRARequestProcessor(adapters, base)
    assert not processor.process_lora_requests()
    sender = MessageSender(endpoint(base, "lora_request"), bind=True)
    receiver: MessageReceiver[tuple[str, LoRAResponse]] = MessageReceiver(
        endpoint(base, "lora_response"), tuple[str, LoRAResponse], bind=True
    )
    sender.send(("1", load_of("x")))
    polls = []
    answers: list[tuple[str, LoRAResponse]] = []
    deadline = time.monotonic() + LONG_S
    while not answers and time.monotonic() < deadline:
        polls.append(processor.process_lora_requests())
        answers += receiver.poll(10)
    assert [request_id for request_id, _ in answers] == ["1"]
    assert 1 <= sum(polls) <= 2  # the request was taken in one poll, and answered in that or a later one
    assert not processor.process_lora_requests()
    processor.close()
    sender.close()
    receiver.close()


async def test_the_wire_format(base: str, lora_queue: LoRAQueue) -> None:
    """(request id, LoRARequest) one way and (request id, LoRAResponse) back, as plain msgpack."""
    context = zmq.Context()
    requests, responses = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    requests.connect(f"{base}-lora_request")
    responses.connect(f"{base}-lora_response")
    asking = asyncio.create_task(lora_queue.submit(LoRARequest(LoRAOperation.UNLOAD, "x"), LONG_S))
    await until(lambda: bool(requests.poll(0)))
    request_id, request = msgspec.msgpack.decode(requests.recv())
    assert request == {"operation": "unload", "lora_name": "x"}
    responses.send(msgspec.msgpack.encode((request_id, {"status": "success", "message": ["one", "two"]})))
    assert (await asking) == LoRAResponse(LoRAStatus.SUCCESS, ["one", "two"])
    requests.close(0)
    responses.close(0)
    context.term()


async def test_between_processes(base: str, lora_queue: LoRAQueue) -> None:
    """The engine's side in a process of its own, which is then killed."""
    code = "import sys, time; from tests.unit.test_channel import Engine; engine = Engine(sys.argv[1]); time.sleep(60)"
    root = Path(__file__).parents[2]
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, base, cwd=root)
    try:
        answers = await asyncio.gather(*(lora_queue.submit(load_of(name), LONG_S) for name in ("x", "y")))
        assert [answer.message for answer in answers] == [
            "LoRA adapter 'x' loaded successfully",
            "LoRA adapter 'y' loaded successfully",
        ]
    finally:
        child.kill()
        await child.wait()
    with pytest.raises(RequestTimeout):
        await lora_queue.submit(unload_of("x"), 0.1)


async def test_with_a_real_manager(base: str, lora_queue: LoRAQueue, tiny_adapters: dict[str, Path]) -> None:
    projections = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    manager = LoRAManagerV3(
        LoRAConfig(enable_lora=True, max_num_loras=2),
        "base",
        torch.float32,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        max_lora_seq_len=64,
        targets=(
            LoRATargetModule("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"), stacked=True),
            LoRATargetModule("self_attn.o_proj", ("o_proj",)),
        ),
        projections=projections,
        num_layers=2,
    )
    engine = Engine(base, manager)
    good, bad = load_of("good", str(tiny_adapters["attention-r2"])), load_of("bad", str(tiny_adapters["linear-r4"]))
    answers = await asyncio.gather(*(lora_queue.submit(request, LONG_S) for request in (good, bad, good, good)))
    assert [answer.status for answer in answers] == [
        LoRAStatus.SUCCESS,
        LoRAStatus.LOAD_INVALID_ADAPTER,
        LoRAStatus.SUCCESS,
        LoRAStatus.SUCCESS,
    ]
    assert "gate_proj" in answers[1].message
    assert manager.loras.keys() == {"good"}
    missing = await lora_queue.submit(load_of("missing", "/no/such/adapter"), LONG_S)
    assert missing.status is LoRAStatus.LOAD_INVALID_PATH
    unloaded = await asyncio.gather(*(lora_queue.submit(unload_of("good"), LONG_S) for _ in range(2)))
    assert [answer.status for answer in unloaded] == [LoRAStatus.SUCCESS, LoRAStatus.UNLOAD_NAME_NONEXISTENT]
    assert manager.loras == {}
    engine.close()
