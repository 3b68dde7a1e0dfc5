"""Ranks that die, hang, fail or cannot start: the engine ends with a reason, and nothing of it is left."""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.engine.runner import ModelRunner
from lora_core.errors import ConfigError, EngineDead
from tests.engine.answers import Names, ask, finish, make_engine, peft_answers

Start = Callable[..., LLMEngine]


@pytest.fixture
def start(tiny_base: Path) -> Iterator[Start]:
    """Start engines of two ranks; none of their processes may be left."""
    engines: list[LLMEngine] = []

    def make(adapters: Names, **settings: Any) -> LLMEngine:
        engines.append(make_engine(tiny_base, adapters, tensor_parallel_size=2, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    assert ranks() == []
    # Connections that go after their ranks: torch looks once more for the file by which they were made.
    engines.clear()
    gc.collect()


def ranks() -> list[psutil.Process]:
    """Processes of other ranks that this one has started."""
    return [child for child in psutil.Process().children() if child.name() == "lora-rank"]


def watch(engine: LLMEngine, timeout_s: float) -> None:
    """Look after an idle engine's ranks for a while, as its process does."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        engine.check_ranks()
        time.sleep(0.01)


def test_what_ranks_listen_on_is_not_to_be_seen_from_elsewhere(start: Start, tiny_base: Path) -> None:
    engine = start({}, slots=0)
    ask(engine, "without adapters", None, 12)
    assert finish(engine)["without adapters"].tokens == peft_answers(tiny_base, {})(None, 12)
    (rank,) = ranks()
    for process in (psutil.Process(), rank):
        listening = [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        assert {one.laddr.ip for one in listening} <= {"127.0.0.1"}
    assert not [file for file in rank.open_files() if file.path.endswith(".sock")]


def test_an_idle_engine_ends_when_a_rank_is_killed(start: Start, tiny_base: Path, tiny_adapters: Names) -> None:
    engine = start(tiny_adapters)
    ask(engine, "before", "linear-r4", 7)
    assert finish(engine)["before"].tokens == peft_answers(tiny_base, tiny_adapters)("linear-r4", 7)
    (rank,) = ranks()
    rank.kill()
    reason = rf"rank 1 \(process {rank.pid}\) was killed by signal 9, Killed"
    with pytest.raises(EngineDead, match=reason):
        watch(engine, 20)
    ask(engine, "after", None, 7)
    with pytest.raises(EngineDead, match=reason):
        engine.step()


def test_a_step_ends_when_a_rank_hangs(start: Start) -> None:
    engine = start({}, rank_timeout_s=0.7)
    (rank,) = ranks()
    os.kill(rank.pid, signal.SIGSTOP)
    ask(engine, "stuck", None, 7)
    with pytest.raises(EngineDead, match=r"another rank took no part in a step within 0.7 s.*engine.rank_timeout_s"):
        engine.step()
    assert ranks() == []
    with pytest.raises(EngineDead, match="took no part"):
        engine.step()


def test_a_rank_that_fails_is_named_with_its_reason(start: Start) -> None:
    engine = start({}, dtype="bfloat16")
    ask(engine, "before", None, 7)
    assert finish(engine)["before"].reason == "length"
    (rank,) = ranks()
    message = rf"rank 1 \(process {rank.pid}\) failed: AttributeError: .*no_such_method"
    with pytest.raises(EngineDead, match=message):
        engine.runner.call_ranks("no_such_method")


def test_heads_that_do_not_divide_are_refused_before_anything_starts(tiny_base: Path) -> None:
    config = EngineConfig(model=tiny_base, device="cpu", tensor_parallel_size=4)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 4, which .* num_key_value_heads 2;"):
        ModelRunner(config, LoRAConfig())
    assert ranks() == []


def test_a_rank_that_cannot_load_is_the_engines_own_fault(tiny_base: Path, tmp_path: Path) -> None:
    """The ranks find the same fault; whichever tells of it first."""
    config = EngineConfig(model=tiny_base, device="cpu", tensor_parallel_size=2, max_model_len=100_000)
    with pytest.raises(ConfigError, match="max_model_len is 100000, and the model is made for 512 tokens"):
        ModelRunner(config, LoRAConfig())
