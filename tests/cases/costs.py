"""Section C, what adapters cost: memory over many cycles, scratch, first steps, and base requests beside them."""

import gc
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lora_core.engine.engine import LLMEngine
from lora_core.types import LoRAStatus
from tests.cases.queueing import right_answers, some_adapters
from tests.cases.registry import Got, all_of, case
from tests.cases.serving import (
    PROMPTS,
    Answers,
    alone,
    contains,
    finish,
    load,
    same_tokens,
    submit,
    unload,
)
from tests.cases.world import World, start_engine


def rss_mib() -> float:
    """Resident memory of this process."""
    gc.collect()
    return float(psutil.Process().memory_info().rss) / 2**20


CYCLES: dict[str, Callable[[World, LLMEngine, int], None]] = {}


def cycle(label: str) -> Callable[[Callable[[World, LLMEngine, int], None]], Callable[[World, LLMEngine, int], None]]:
    def register(function: Callable[[World, LLMEngine, int], None]) -> Callable[[World, LLMEngine, int], None]:
        CYCLES[label] = function
        return function

    return register


@cycle("load, use, unload")
def cycle_use(world: World, engine: LLMEngine, turn: int) -> None:
    load(engine, f"n{turn}", some_adapters(world, 2)[turn % 2])
    submit(engine, "r", f"n{turn}", PROMPTS[7], 1)
    finish(engine)
    unload(engine, f"n{turn}")


@cycle("load, unload")
def cycle_plain(world: World, engine: LLMEngine, turn: int) -> None:
    load(engine, "n", world.adapter(seed=40))
    unload(engine, "n")


@cycle("load in place of itself")
def cycle_replace(world: World, engine: LLMEngine, turn: int) -> None:
    load(engine, "n", some_adapters(world, 2)[turn % 2], replace=True)
    if turn % 5 == 0:
        submit(engine, "r", "n", PROMPTS[7], 1)
        finish(engine)


@cycle("refused")
def cycle_refused(world: World, engine: LLMEngine, turn: int) -> None:
    response = engine.manager.load_adapter(f"n={world.adapter(seed=31, r=64)}")
    assert response.status is LoRAStatus.LOAD_INVALID_ADAPTER


@case("vllm#54839", "500 cycles", "host memory and slots flat", CYCLES)
def flat(world: World, one: Callable[[World, LLMEngine, int], None]) -> Got:
    engine = start_engine(world.base(), slots=2)
    for turn in range(50):
        one(world, engine, turn)
    before = rss_mib()
    for turn in range(50, 550):
        one(world, engine, turn)
    grown = rss_mib() - before
    resident, held = engine.manager.residency()
    num_threads = threading.active_count()
    # A leak of the adapter's 60 KB a cycle would be 30 MiB.
    flat_ = grown < 8 and len(held) <= 1 and len(resident) <= 1 and num_threads < 24
    return Got(f"{grown:+.1f} MiB on {before:.0f}, {len(held)} held, {num_threads} threads", flat_)


@case("vllm#15039", "a prompt that fills the KV cache, with an adapter", "answered; no scratch beyond the base's")
def long_prompt(world: World) -> Got:
    folder = world.adapter(seed=40, r=16)
    engine = start_engine(world.base(), slots=2, kv_cache_tokens=512, max_num_batched_tokens=512)
    prompt = [(place * 29 + 3) % 128 for place in range(500)]
    load(engine, "a", folder)
    engine.warm_up()

    def peak(name: str | None) -> tuple[float, list[int]]:
        with torch.profiler.profile(profile_memory=True) as profile:
            tokens, _ = alone(engine, name, prompt, 8)
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages()) / 2**20, tokens

    base_mib, _ = peak(None)
    lora_mib, tokens = peak("a")
    fits = lora_mib < 2 * base_mib
    return all_of(
        Got(f"allocated {lora_mib:.0f} MiB, base {base_mib:.0f} MiB", fits),
        same_tokens(world, "llama", folder, prompt, tokens),
    )


@case("vllm#15039", "a prompt longer than the KV cache, with an adapter", "refused with both numbers; the next served")
def too_long_prompt(world: World) -> Got:
    folder = world.adapter(seed=40, r=16)
    engine, answers = start_engine(world.base(), slots=2, kv_cache_tokens=64), Answers()
    load(engine, "a", folder)
    submit(engine, "long", "a", PROMPTS[70], 10)
    submit(engine, "short", "a", PROMPTS[33], 10)
    finish(engine, answers)
    return all_of(
        contains(answers["long"].error, "80", "64"),
        Got(f"{answers['long'].error_type}", answers["long"].error_type == "InvalidRequest"),
        right_answers(world, {"short": (folder, PROMPTS[33])}, answers),
    )


def step_times(
    engine: LLMEngine,
    name: str | None,
    prompt: list[int],
    num_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each step of one request, by a clock."""
    submit(engine, "timed", name, prompt, num_tokens)
    times = []
    while engine.has_work():
        start = clock()
        engine.step()
        times.append(clock() - start)
    return times


@case("vllm#8559", "the first request of each rank, after warm-up", "no multi-second compile")
def first_of_each_rank(world: World) -> Got:
    engine = start_engine(world.base(), slots=4)
    engine.warm_up()
    firsts, seconds = [], []
    for rank in (1, 2, 3, 4, 7, 8, 16):
        name = f"r{rank}"
        load(engine, name, world.adapter(seed=70 + rank, r=rank))
        firsts.append(max(step_times(engine, name, PROMPTS[20], 4)))
        seconds.append(max(step_times(engine, name, PROMPTS[20], 4)))
    worst, usual = max(firsts), statistics.median(seconds)
    return Got(f"slowest first step {worst * 1000:.0f} ms, later ones {usual * 1000:.0f} ms", worst < 2.0)


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that torch dispatches, and those of them inside the decoder."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0
        self.num_inside = 0
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        self.num_inside += self._depth > 0
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> "Calls":
        def enter(module: torch.nn.Module, _: Any) -> None:
            self._depth += type(module).__name__ == "Decoder"

        def leave(module: torch.nn.Module, *_: Any) -> None:
            self._depth -= type(module).__name__ == "Decoder"

        self._hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            torch.nn.modules.module.register_module_forward_hook(leave),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *fault: Any) -> None:
        super().__exit__(*fault)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()


def operations(engine: LLMEngine, name: str | None) -> Calls:
    """Operations of one decode step."""
    submit(engine, "counted", name, PROMPTS[7], 3)
    engine.step()
    engine.step()
    with Calls() as calls:
        engine.step()
    assert not engine.has_work()
    assert calls.num_inside > 0, "no decoder was seen"
    return calls


@case(
    "vllm#10898",
    "base requests on a LoRA server with full slots",
    "no operation more in the model, same bits, no slower",
)
def base_no_slower(world: World) -> Got:
    off, on = start_engine(world.base("deep"), slots=0), start_engine(world.base("deep"), slots=4)
    for index in range(4):
        load(on, f"a{index}", world.adapter("deep", seed=40 + index))
        alone(on, f"a{index}", PROMPTS[7], 1)
    plain, base, adapted = operations(off, None), operations(on, None), operations(on, "a0")
    extra, outside = base.num_inside - plain.num_inside, base.num - plain.num
    lora = adapted.num_inside - plain.num_inside
    same = torch.equal(alone(off, None, PROMPTS[33])[1], alone(on, None, PROMPTS[33])[1])
    ratios = []
    for _ in range(9):
        without = statistics.median(step_times(off, None, PROMPTS[7], 24, time.thread_time)[1:])
        ratios.append(statistics.median(step_times(on, None, PROMPTS[7], 24, time.thread_time)[1:]) / without)
    ratio = statistics.median(ratios)
    return Got(
        f"{extra} more operations in the model (adapter rows: {lora}), {outside} in all, bits equal: {same}, "
        f"CPU time of a step x{ratio:.2f}",
        extra == 0 and outside <= 20 and lora > 0 and same and ratio < 1.4,
    )


@case("vllm#10898", "an adapter of attention only, against all-linear", "nothing runs in the MLP for it")
def attention_only_cost(world: World) -> Got:
    engine = start_engine(world.base("deep"), slots=2)
    load(engine, "attention", world.adapter("deep", seed=48, targets=("q_proj", "k_proj", "v_proj", "o_proj")))
    load(engine, "all", world.adapter("deep", seed=49))
    base, attention, every = (operations(engine, name).num_inside for name in (None, "attention", "all"))
    # Half of the four fused sites of a layer: half of what all of them cost.
    share = (attention - base) / (every - base)
    return Got(f"operations: base {base}, attention {attention}, all-linear {every}", 0.3 < share < 0.62)
