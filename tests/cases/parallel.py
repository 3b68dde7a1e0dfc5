"""Section C from many threads at once, and adapters that fail beside good ones."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lora_core.engine.engine import LLMEngine
from lora_core.types import LoRAResponse, LoRAStatus
from tests.cases.queueing import right_answers, some_adapters
from tests.cases.registry import OWN, Got, all_of, case
from tests.cases.serving import (
    PROMPTS,
    Answer,
    Answers,
    OpenedFiles,
    alone,
    contains,
    finish,
    load,
    loaded,
    recorded,
    ref_of,
    same_tokens,
    submit,
    unload,
    words,
)
from tests.cases.world import World, start_engine


def at_once(num: int, ask: Callable[[int], LoRAResponse]) -> list[LoRAResponse]:
    """Call from as many threads, all released together."""
    barrier = threading.Barrier(num)

    def call(number: int) -> LoRAResponse:
        barrier.wait()
        return ask(number)

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(call, range(num)))


PARALLEL = {"of one path": False, "of one path, named differently": True}


@case("ai-dynamo PR#5184", "20 parallel loads of one name", "one load, one entry, others succeed", PARALLEL)
def parallel_loads(world: World, through_links: bool) -> Got:
    folder, engine, name = world.copy(world.adapter(seed=40)), world.engine(), world.new_name()
    link = world.new_folder() / "link"
    link.symlink_to(folder)
    paths = [folder, link] if through_links else [folder]
    before = len(engine.manager.loras)
    first = load_and_unload(world, engine)
    # Files this young prove nothing by their times: a load that came after the first had ended would read them again.
    time.sleep(2.1)
    with OpenedFiles(folder) as files:
        responses = at_once(20, lambda number: engine.manager.load_adapter(f"{name}={paths[number % len(paths)]}"))
    entries, tokens = len(engine.manager.loras) - before, alone(engine, name, PROMPTS[20])[0]
    unload(engine, name)
    # Generations are given one by one: two between ours are one load.
    num_loads = load_and_unload(world, engine) - first - 1
    statuses = {response.status for response in responses}
    reads = files.count(".safetensors")
    right = statuses == {LoRAStatus.SUCCESS} and entries == num_loads == reads == 1
    return all_of(
        Got(f"{[s.value for s in statuses]}, {entries} entry, {num_loads} load, weights opened {reads} times", right),
        same_tokens(world, "llama", folder, PROMPTS[20], tokens),
    )


def load_and_unload(world: World, engine: LLMEngine) -> int:
    """The generation that a load gets now."""
    name = world.new_name()
    load(engine, name, world.adapter(seed=40))
    generation = ref_of(engine, name).generation
    unload(engine, name)
    return generation


@case("ai-dynamo PR#5184", "20 parallel loads of one name from two different adapters", "one wins; the others conflict")
def parallel_conflict(world: World) -> Got:
    folders, engine, name = some_adapters(world, 2), world.engine(), world.new_name()
    responses = at_once(20, lambda number: engine.manager.load_adapter(f"{name}={folders[number % 2]}"))
    tokens, _ = alone(engine, name, PROMPTS[20])
    winner = Path(engine.manager.loras[name].path)
    unload(engine, name)
    won = [r.status for i, r in enumerate(responses) if folders[i % 2] == winner]
    lost = [r.status for i, r in enumerate(responses) if folders[i % 2] != winner]
    right = set(won) == {LoRAStatus.SUCCESS} and set(lost) == {LoRAStatus.LOAD_NAME_EXISTS} and len(won) == 10
    found = sorted({status.value for status in (*won, *lost)})
    return all_of(Got(f"{found}", right), same_tokens(world, "llama", winner, PROMPTS[20], tokens))


@case("ai-dynamo PR#5184", "20 parallel loads of 20 names, 5 of them bad", "15 succeed, 5 are refused, nothing else")
def parallel_names(world: World) -> Got:
    engine, names = world.engine(), [world.new_name() for _ in range(20)]
    bad, good = world.adapter(seed=31, r=64), some_adapters(world, 3)
    responses = at_once(20, lambda n: engine.manager.load_adapter(f"{names[n]}={bad if n % 4 == 0 else good[n % 3]}"))
    expected = [LoRAStatus.LOAD_INVALID_ADAPTER if n % 4 == 0 else LoRAStatus.SUCCESS for n in range(20)]
    right = [response.status for response in responses] == expected
    parts = [
        same_tokens(world, "llama", good[n % 3], PROMPTS[20], alone(engine, names[n], PROMPTS[20])[0], f"{n}: ")
        for n in (1, 6, 11, 19)
    ]
    unload(engine, *(name for n, name in enumerate(names) if n % 4))
    return all_of(Got(f"as expected: {right}", right), *parts)


def unload_one(engine: LLMEngine, name: str, _: int) -> LoRAResponse:
    return engine.manager.unload_adapter(name)


NUM_UNLOADS = {"two": 2, "twelve": 12}


@case("vllm PR#20636", "parallel unloads", "one succeeds, the others know no such name", NUM_UNLOADS)
def parallel_unloads(world: World, num: int) -> Got:
    engine, tallies = world.engine(), []
    for _ in range(10):
        name = world.new_name()
        load(engine, name, world.adapter(seed=44))
        found = [response.status for response in at_once(num, partial(unload_one, engine, name))]
        tallies.append((found.count(LoRAStatus.SUCCESS), found.count(LoRAStatus.UNLOAD_NAME_NONEXISTENT)))
    engine.check_invariants()
    return Got(f"{tallies[0]} ten times", tallies == [(1, num - 1)] * 10)


@case(
    "vllm PR#20636",
    "loads and unloads of one name from 8 threads at once, 200 times",
    "invariants hold; the last one stands",
)
def storm(world: World) -> Got:
    folders, engine, name = some_adapters(world, 2), start_engine(world.base(), slots=2), "s"
    allowed = {LoRAStatus.SUCCESS, LoRAStatus.LOAD_NAME_EXISTS, LoRAStatus.UNLOAD_NAME_NONEXISTENT}

    def one(number: int) -> LoRAResponse:
        if number % 2:
            return engine.manager.unload_adapter(name)
        return engine.manager.load_adapter(f"{name}={folders[number % 4 // 2]}")

    statuses = set()
    for _ in range(25):
        statuses |= {response.status for response in at_once(8, one)}
        engine.check_invariants()
    engine.manager.unload_adapter(name)
    load(engine, name, folders[1])
    tokens, _ = alone(engine, name, PROMPTS[20])
    return all_of(
        Got(f"{sorted(s.value for s in statuses)}", statuses <= allowed),
        same_tokens(world, "llama", folders[1], PROMPTS[20], tokens),
    )


@contextmanager
def threads_busy(engine: LLMEngine, folder: Path) -> Iterator[list[str]]:
    """Loads and unloads by another thread inside the block."""
    stop, faults = threading.Event(), list[str]()

    def churn() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            responses = (
                engine.manager.load_adapter(f"busy-{number}={folder}"),
                engine.manager.unload_adapter(f"busy-{number}"),
            )
            faults.extend(words(response) for response in responses if response.status is not LoRAStatus.SUCCESS)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        yield faults
    finally:
        stop.set()
        thread.join()


@case("LoRAX #779", "400 requests over 8 adapters on 3 slots, cancels, loads and unloads beside them", "none wedges")
def no_wedge(world: World) -> Got:
    folders, dice = some_adapters(world, 8), random.Random(7)
    engine = start_engine(world.base(), slots=3, kv_cache_tokens=512, max_slot_wait_s=0.05)
    for index, folder in enumerate(folders):
        load(engine, f"a{index}", folder)
    answers: Answers = {}
    asked: dict[str, tuple[Path | None, list[int]]] = {}
    with threads_busy(engine, folders[0]) as faults:
        for number in range(400):
            which = min(int(dice.paretovariate(1)) - 1, 7)
            submit(engine, str(number), f"a{which}", PROMPTS[7], 3)
            asked[str(number)] = (folders[which], PROMPTS[7])
            if number % 3 == 0:
                for delta in engine.step():
                    answers.setdefault(delta.request_id, Answer()).take(delta)
            if number % 10 == 9:
                victim = str(number)
                engine.abort(victim)
                del asked[victim]
        while engine.has_work():
            for delta in engine.step():
                answers.setdefault(delta.request_id, Answer()).take(delta)
    engine.check_invariants()
    distinct: dict[Path | None, set[tuple[int, ...]]] = {}
    for key, (truth, _) in asked.items():
        distinct.setdefault(truth, set()).add(tuple(answers[key].tokens))
    one_each = all(len(tokens) == 1 for tokens in distinct.values())
    sample = {key: asked[key] for key in list(asked)[::12]}
    return all_of(
        Got(f"{len(asked)} answered, one output each: {one_each}, faults {faults[:1]}", one_each and not faults),
        right_answers(world, sample, answers),
    )


@case(OWN, "pinned adapters on 2 slots, 4 others in a loop", "the pinned one never leaves its slot")
def pinned(world: World) -> Got:
    folders, engine = some_adapters(world, 5), start_engine(world.base(), slots=2)
    for index, folder in enumerate(folders):
        load(engine, f"a{index}", folder)
    alone(engine, "a0", PROMPTS[7], 1)
    response = engine.manager.pin_adapter("a0")
    assert response.status is LoRAStatus.SUCCESS, words(response)
    slot, kept = engine.manager.slot_of(ref_of(engine, "a0")), True
    for turn in range(8):
        alone(engine, f"a{1 + turn % 4}", PROMPTS[7], 1)
        kept &= slot is not None and engine.manager.slot_of(ref_of(engine, "a0")) == slot
    too_many = engine.manager.pin_adapter("a1")
    unknown = engine.manager.pin_adapter("nobody")
    released = engine.manager.unpin_adapter("a0")
    for turn in range(4):
        alone(engine, f"a{1 + turn % 4}", PROMPTS[7], 1)
    left = engine.manager.slot_of(ref_of(engine, "a0")) is None
    statuses = (too_many.status, unknown.status, released.status)
    expected = (LoRAStatus.PIN_ERROR, LoRAStatus.PIN_NAME_NONEXISTENT, LoRAStatus.SUCCESS)
    return all_of(
        Got(f"kept {kept}, left after unpin {left}", kept and left),
        Got(f"{[s.value for s in statuses]}", statuses == expected),
        contains(words(too_many), "a1"),
        contains(words(unknown), "nobody"),
    )


@case(OWN, "a pinned adapter is unloaded, and loaded again", "unload succeeds; the new one is not pinned")
def pinned_unloaded(world: World) -> Got:
    folders, engine = some_adapters(world, 3), start_engine(world.base(), slots=2)
    for index, folder in enumerate(folders):
        load(engine, f"a{index}", folder)
    assert engine.manager.pin_adapter("a0").status is LoRAStatus.SUCCESS
    alone(engine, "a0", PROMPTS[7], 1)
    unload(engine, "a0")
    load(engine, "a0", folders[0])
    alone(engine, "a0", PROMPTS[7], 1)
    for index in (1, 2):
        alone(engine, f"a{index}", PROMPTS[7], 1)
    gone = engine.manager.slot_of(ref_of(engine, "a0")) is None
    tokens, _ = alone(engine, "a0", PROMPTS[20])
    return all_of(
        Got(f"evicted like any other: {gone}", gone), same_tokens(world, "llama", folders[0], PROMPTS[20], tokens)
    )


@case(OWN, "an adapter whose logits overflow, beside good ones", "fails alone, by name")
def overflowing(world: World) -> Got:
    from tests.cases.adapters import edit_weights

    broken = edit_weights(world.copy(world.adapter(seed=40)), lambda t: {k: v * 1e25 for k, v in t.items()})
    good = some_adapters(world, 1)[0]
    engine, answers = start_engine(world.base(), slots=2, kv_cache_tokens=96, block_size=8), Answers()
    with loaded(world, engine, broken, good) as (bad, name):
        for number in range(3):
            submit(engine, f"bad-{number}", bad, PROMPTS[20])
            submit(engine, f"good-{number}", name, PROMPTS[20])
            submit(engine, f"base-{number}", None, PROMPTS[7])
        finish(engine, answers)
    asked: dict[str, tuple[Path | None, list[int]]] = {}
    for number in range(3):
        asked |= {f"good-{number}": (good, PROMPTS[20]), f"base-{number}": (None, PROMPTS[7])}
    failed = all(answers[f"bad-{n}"].reason == "error" and bad in answers[f"bad-{n}"].error for n in range(3))
    return all_of(Got(answers["bad-0"].error, failed), right_answers(world, asked, answers))


@case(OWN, "a request that names an adapter nobody loaded", "an error for that request, never base output")
def unknown_adapter(world: World) -> Got:
    engine, answers = world.engine(), Answers()
    with recorded(engine) as steps:
        submit(engine, "unknown", "nobody", PROMPTS[7])
        finish(engine, answers)
    answer = answers["unknown"]
    return all_of(
        Got(
            f"{answer.error_type}, {len(steps)} steps run", answer.error_type == "AdapterNotFound" and not answer.tokens
        ),
        contains(answer.error, "nobody"),
    )
