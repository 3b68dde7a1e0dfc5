"""Adapters that come, go, are replaced, pinned, evicted and lost while the engine decodes: every answer is exact."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lora_core import adapter_reader as reader_module
from lora_core.engine.engine import LLMEngine
from lora_core.model import LoRAModel
from lora_core.slot_write import SlotWrite
from lora_core.types import LoRAStatus
from tests.engine.answers import (
    NUM_TOKENS,
    Answer,
    Answers,
    Names,
    ask,
    assert_nothing_left,
    finish,
    make_engine,
    peft_answers,
    step,
)

Start = Callable[..., LLMEngine]
Reference = Callable[[str | None, int], list[int]]


@pytest.fixture(scope="module")
def reference(tiny_base: Path, tiny_adapters: Names) -> Reference:
    """The answer of PEFT (or of transformers for None) to one of PROMPTS."""
    return peft_answers(tiny_base, tiny_adapters)


@pytest.fixture(scope="module")
def num_bytes(tiny_base: Path, tiny_adapters: Names) -> int:
    """Host memory of the largest adapter."""
    loras = make_engine(tiny_base, tiny_adapters).manager.loras
    return max(record.num_bytes for record in loras.values())


@pytest.fixture
def start(tiny_base: Path, tiny_adapters: Names) -> Iterator[Start]:
    """Start engines, which must be idle, with nothing left behind, when the test ends."""
    engines: list[LLMEngine] = []

    def make(adapters: Names | None = None, **settings: Any) -> LLMEngine:
        engines.append(make_engine(tiny_base, tiny_adapters if adapters is None else adapters, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        assert_nothing_left(engine)


@pytest.fixture
def copies(tiny_adapters: Names, tmp_path: Path) -> Names:
    """The adapters in folders of the test's own."""
    return {name: shutil.copytree(folder, tmp_path / name) for name, folder in tiny_adapters.items()}


# Tiers


def test_hundreds_of_names_pass_through_four_slots_and_little_memory(
    start: Start, tiny_adapters: Names, reference: Reference, num_bytes: int
) -> None:
    sources = list(tiny_adapters)
    engine = start({}, slots=4, max_num_seqs=32, lora_settings={"host_memory_bytes": 6 * num_bytes})
    manager, answers = engine.manager, Answers()
    for index in range(250):
        source = sources[index % len(sources)]
        assert manager.load_adapter(f"n{index}={tiny_adapters[source]}").status is LoRAStatus.SUCCESS
        ask(engine, str(index), f"n{index}", 3, 1)
    while engine.has_work():
        for delta in engine.step():
            answers.setdefault(delta.request_id, Answer()).take(delta)
    engine.check_invariants()
    assert all(answers[str(index)].tokens == reference(sources[index % len(sources)], 3)[:1] for index in range(250)), (
        "an answer is wrong"
    )
    # Read at their load and, all but the last of them, once more.
    assert manager.num_file_reads <= 500
    assert manager.num_slot_writes == 250
    assert sum(status.tier == "host" for status in manager.statuses()) >= 4


def test_deleted_folders_fail_only_requests_that_need_them(
    start: Start, copies: Names, reference: Reference, num_bytes: int
) -> None:
    engine = start(copies, slots=1, lora_settings={"host_memory_bytes": num_bytes + num_bytes // 2})
    answers = Answers()
    ask(engine, "slotted", "linear-r4", 12)
    while engine.manager.status("linear-r4").tier != "slot":
        step(engine, answers)
    for folder in copies.values():
        shutil.rmtree(folder)
    in_host = [status.name for status in engine.manager.statuses() if status.tier == "host"]
    on_disk = [status.name for status in engine.manager.statuses() if status.tier == "disk"]
    assert in_host
    assert on_disk
    for name in (*in_host, *on_disk, None):
        for index in range(2):
            ask(engine, f"{name} {index}", name, 12)
    ask(engine, "slotted too", "linear-r4", 12)
    finish(engine, answers)
    assert answers["slotted"].tokens == answers["slotted too"].tokens == reference("linear-r4", 12)
    for index in range(2):
        assert answers[f"None {index}"].tokens == reference(None, 12)
        for name in on_disk:
            lost = answers[f"{name} {index}"]
            assert (lost.reason, lost.error_type, lost.tokens) == ("error", "AdapterLost", [])
            assert all(word in str(lost.error) for word in (repr(name), str(copies[name]), "load it again"))


def test_base_and_resident_requests_go_on_while_files_are_read(
    start: Start, tiny_adapters: Names, reference: Reference, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(slots=2, lora_settings={"host_memory_bytes": num_bytes})
    gate = threading.Event()

    class SlowModel(LoRAModel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            assert gate.wait(30)
            super().__init__(*args, **kwargs)

    cold = next(status.name for status in engine.manager.statuses() if status.tier == "disk")
    warm = next(status.name for status in engine.manager.statuses() if status.tier == "host")
    answers = Answers()
    ask(engine, "first", warm, 12)
    step(engine, answers)
    monkeypatch.setattr(reader_module, "LoRAModel", SlowModel)
    ask(engine, "cold", cold, 12)
    ask(engine, "warm", warm, 7)
    ask(engine, "base", None, 7)
    while not all(name in answers and answers[name].reason for name in ("first", "warm", "base")):
        step(engine, answers)
    assert "cold" not in answers
    # Nothing to run: the step waits a moment instead of spinning, and returns.
    started = time.perf_counter()
    for _ in range(5):
        assert step(engine, answers) == []
    assert 0.02 < time.perf_counter() - started < 5
    gate.set()
    finish(engine, answers)
    for name, adapter, size in (("first", warm, 12), ("cold", cold, 12), ("warm", warm, 7), ("base", None, 7)):
        assert answers[name] == Answer(reference(adapter, size), "length")


def test_a_large_adapter_is_written_while_a_stream_goes_on(
    start: Start, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[float | None] = []
    advance = SlotWrite.advance

    def slow(write: SlotWrite, budget_s: float | None) -> bool:
        # As one that needs six times what a step may spend, however fast this machine is.
        calls.append(budget_s)
        return (budget_s is None or len(calls) % 6 == 0) and advance(write, None)

    engine = start(slots=2)
    answers = Answers()
    ask(engine, "stream", "linear-r4", 12)
    step(engine, answers)
    monkeypatch.setattr(SlotWrite, "advance", slow)
    ask(engine, "large", "rslora-r8", 12)
    num_before = len(answers["stream"].tokens)
    num_steps = 0
    while "large" not in answers:
        step(engine, answers)
        num_steps += 1
        assert len(answers["stream"].tokens) == num_before + num_steps, "the stream stopped"
    assert len(calls) == 6
    # A step or two may find their time over before the write's turn.
    assert 6 <= num_steps <= 9
    assert all(budget is not None and budget < 10 for budget in calls)
    finish(engine, answers)
    assert answers["stream"].tokens == reference("linear-r4", 12)
    assert answers["large"].tokens == reference("rslora-r8", 12)
    # With nothing else to run it is written in one go.
    calls.clear()
    ask(engine, "alone", "attention-r2", 12)
    step(engine, answers)
    assert answers["alone"].tokens == reference("attention-r2", 12)[:1]
    finish(engine, answers)


def test_a_write_that_fails_ends_the_requests_that_wait_for_it_and_no_other(
    start: Start, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, answers = start(slots=2), Answers()
    ask(engine, "stream", "linear-r4", 12)
    step(engine, answers)
    advance = SlotWrite.advance

    def fail(write: SlotWrite, budget_s: float | None) -> bool:
        raise MemoryError

    # At once, and at a later step after it has begun well.
    for first in (fail, lambda *_: False):
        monkeypatch.setattr(SlotWrite, "advance", first)
        for index in range(2):
            ask(engine, f"{first.__name__} {index}", "rslora-r8", 7)
        ask(engine, f"{first.__name__} base", None, 7)
        step(engine, answers)
        monkeypatch.setattr(SlotWrite, "advance", fail)
        for _ in range(3):
            step(engine, answers)
        for index in range(2):
            lost = answers[f"{first.__name__} {index}"]
            assert (lost.reason, lost.error_type, lost.tokens) == ("error", "AdapterLost", [])
            assert "'rslora-r8' could not be written into a slot: MemoryError;" in str(lost.error)
    monkeypatch.setattr(SlotWrite, "advance", advance)
    ask(engine, "after", "rslora-r8", 7)
    finish(engine, answers)
    assert answers["stream"].tokens == reference("linear-r4", 12)
    assert answers["after"].tokens == reference("rslora-r8", 7)
    assert all(answers[name].tokens == reference(None, 7) for name in answers if name.endswith("base"))


def test_abandoned_requests_leave_nothing_in_memory_or_slots(
    start: Start, tiny_adapters: Names, num_bytes: int
) -> None:
    """Their adapters were waiting, being read, being written or in slots when they left."""
    engine = start(slots=1, max_num_seqs=4, lora_settings={"host_memory_bytes": num_bytes})
    random, names, live = Random(3), list(tiny_adapters), list[str]()
    for index in range(1000):
        ask(engine, str(index), random.choice(names), 7, 3)
        live.append(str(index))
        if random.random() < 0.6:
            engine.step()
        while len(live) > random.choice((0, 0, 2, 5)):
            engine.abort(live.pop(random.randrange(len(live))))
        if index % 50 == 0:
            engine.check_invariants()
    for request_id in live:
        engine.abort(request_id)
    ask(engine, "last", names[0], 7)
    assert finish(engine)["last"].reason == "length"


# Unloading and replacing


def test_requests_of_an_unloaded_adapter_end_at_the_deadline(start: Start, reference: Reference) -> None:
    now_s = 0.0
    engine = start(slots=2, max_num_seqs=2, clock=lambda: now_s, lora_settings={"drain_timeout_s": 10.0})
    answers = Answers()
    for name in ("running", "quick", "waiting"):
        ask(engine, name, "linear-r4", 7, max_tokens=4 if name == "quick" else NUM_TOKENS)
    step(engine, answers)
    assert engine.manager.unload_adapter("linear-r4").status is LoRAStatus.SUCCESS
    (ref,) = engine.manager.retired()
    step(engine, answers)
    for _ in range(5):
        now_s += 1.9
        step(engine, answers)
    assert answers["quick"].reason == "length"
    assert engine.manager.retired() == [ref]
    ask(engine, "base", None, 7)
    now_s += 0.6
    step(engine, answers)
    for name in ("running", "waiting"):
        assert (answers[name].reason, answers[name].error_type) == ("error", "AdapterUnloaded")
        assert all(word in str(answers[name].error) for word in ("'linear-r4'", "10 s", "drain_timeout_s"))
    assert answers["running"].tokens == reference("linear-r4", 7)[: len(answers["running"].tokens)]
    assert engine.manager.retired() == []
    assert engine.manager.slot_of(ref) is None
    finish(engine, answers)
    assert answers["base"].tokens == reference(None, 7)


def test_a_deadline_of_zero_ends_requests_at_once(start: Start) -> None:
    engine = start(lora_settings={"drain_timeout_s": 0})
    answers = Answers()
    ask(engine, "r", "linear-r4", 12)
    step(engine, answers)
    engine.manager.unload_adapter("linear-r4")
    step(engine, answers)
    assert answers["r"].error_type == "AdapterUnloaded"
    assert not engine.has_work()


def test_requests_in_progress_finish_on_the_weights_that_were_replaced(
    start: Start, copies: Names, tiny_adapters: Names, reference: Reference
) -> None:
    now_s = 0.0
    folder = copies["linear-r4"]
    engine = start({"x": folder}, slots=2, max_num_seqs=3, clock=lambda: now_s, lora_settings={"drain_timeout_s": 10.0})
    answers = Answers()
    ask(engine, "old", "x", 12)
    step(engine, answers)
    ask(engine, "old-queued", "x", 7)
    # In the same folder: what was there is nowhere but in this process.
    shutil.copytree(tiny_adapters["rslora-r8"], folder, dirs_exist_ok=True)
    response = engine.manager.load_adapter(f"x={folder}", replace=True)
    assert response.status is LoRAStatus.SUCCESS, response.message
    ask(engine, "new", "x", 12)
    assert engine.manager.status("x").draining == [1]
    finish(engine, answers)
    assert answers["old"].tokens == reference("linear-r4", 12)
    assert answers["old-queued"].tokens == reference("linear-r4", 7)
    assert answers["new"].tokens == reference("rslora-r8", 12)
    assert engine.manager.status("x").draining == []
    # The old one has its deadline too.
    ask(engine, "late", "x", 12)
    step(engine, answers)
    assert engine.manager.load_adapter(f"x={tiny_adapters['linear-r4']}", replace=True).status is LoRAStatus.SUCCESS
    step(engine, answers)
    now_s += 11.0
    step(engine, answers)
    assert answers["late"].error_type == "AdapterUnloaded"


# Pins


def test_a_pinned_adapter_gets_its_slot_without_any_request_and_keeps_it(start: Start, reference: Reference) -> None:
    engine = start(slots=2)
    assert engine.manager.pin_adapter("rslora-r8").status is LoRAStatus.SUCCESS
    assert engine.has_work()
    assert engine.step() == []
    assert not engine.has_work()
    assert engine.manager.is_active_lora("rslora-r8")
    answers = Answers()
    for name in ("linear-r4", "attention-r2", "query-value-r8", "linear-r4"):
        ask(engine, f"{name} {len(answers)}", name, 7)
        finish(engine, answers)
    assert engine.manager.is_active_lora("rslora-r8")
    assert all(answer.tokens == reference(name.split()[0], 7) for name, answer in answers.items())
    num_writes = engine.manager.num_slot_writes
    ask(engine, "r", "rslora-r8", 7)
    assert finish(engine)["r"].tokens == reference("rslora-r8", 7)
    assert engine.manager.num_slot_writes == num_writes


# Everything at once


def test_any_change_from_any_thread_leaves_every_answer_exact(
    start: Start, tiny_adapters: Names, reference: Reference, num_bytes: int
) -> None:
    engine = start(slots=2, max_num_seqs=6, lora_settings={"host_memory_bytes": 2 * num_bytes})
    manager, stop = engine.manager, threading.Event()

    def churn(seed: int) -> int:
        random, count = Random(seed), 0
        while not stop.is_set():
            name = random.choice(list(tiny_adapters))
            action = random.choice(["load", "load", "replace", "unload", "pin", "unpin"])
            if action == "unload":
                response = manager.unload_adapter(name)
            elif action in ("pin", "unpin"):
                response = (manager.pin_adapter if action == "pin" else manager.unpin_adapter)(name)
            else:
                response = manager.load_adapter(f"{name}={tiny_adapters[name]}", replace=action == "replace")
                assert response.status is LoRAStatus.SUCCESS, response.message
            count += 1
            time.sleep(0.002)
        return count

    cases = [(name, size) for name in (None, *tiny_adapters) for size in (1, 7, 12)]
    right = {case: reference(*case) for case in cases}
    answers, expected, random = Answers(), dict[str, list[int]](), Random(7)
    with ThreadPoolExecutor(3) as pool:
        churning = [pool.submit(churn, seed) for seed in range(3)]
        while len(expected) < 80:
            if len(expected) - sum(answer.reason is not None for answer in answers.values()) < 8:
                name, size = random.choice(cases)
                request_id = f"{len(expected)} {name}"
                expected[request_id] = right[name, size][: random.randint(1, NUM_TOKENS)]
                ask(engine, request_id, name, size, len(expected[request_id]))
            step(engine, answers)
        stop.set()
        assert all(future.result(60) > 0 for future in churning)
    finish(engine, answers)
    assert answers.keys() == expected.keys()
    refused = [request_id for request_id, answer in answers.items() if answer.error_type == "AdapterNotFound"]
    for request_id in expected.keys() - refused:
        assert answers[request_id] == Answer(expected[request_id], "length"), request_id
    assert len(expected) - len(refused) > 20
