"""Section C in one engine: more requests and adapters than it has room for, and adapters that come and go."""

import random
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lora_core.engine.engine import LLMEngine
from lora_core.types import LoRAStatus
from tests.cases.registry import OWN, Got, all_of, case
from tests.cases.serving import (
    PROMPTS,
    Answer,
    Answers,
    alone,
    contains,
    finish,
    load,
    same_tokens,
    step,
    submit,
    unload,
    words,
)
from tests.cases.world import World, start_engine


def some_adapters(world: World, num: int) -> list[Path]:
    """Different adapters, of every rank from 1 to 16 and several targets."""
    targets = (("q_proj", "v_proj"), ("o_proj", "down_proj"), ("gate_proj", "up_proj", "k_proj"))
    return [
        world.adapter(seed=60 + index, r=1 + (5 * index) % 16, targets=targets[index % 3], alpha=16)
        for index in range(num)
    ]


def right_answers(world: World, asked: Mapping[str, tuple[Path | None, list[int]]], answers: Answers) -> Got:
    """Every answer that ended by itself is PEFT's."""
    parts = []
    for request_id, (folder, prompt) in asked.items():
        answer = answers.get(request_id, Answer())
        if answer.reason != "length":
            parts.append(Got(f"{request_id}: {answer.reason} {answer.error}", False))
        else:
            parts.append(same_tokens(world, "llama", folder, prompt, answer.tokens, f"{request_id}: "))
    both = all_of(Got(f"{len(parts)} answers", bool(parts)), *parts)
    return Got(f"{len(parts)} answers, token for token", True) if both.right else both


CROWDS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "12 adapters, 2 slots": (12, 2, {}),
    "12 adapters, 1 slot": (12, 1, {"max_slot_wait_s": 0.0}),
    "8 adapters, 3 slots, 4 seats": (8, 3, {"max_num_seqs": 4}),
    "12 adapters, 2 slots, chunks of 7": (12, 2, {"max_num_batched_tokens": 7, "max_num_seqs": 6}),
}


@case(
    "sglang#23141",
    "in flight, with base requests, random cancels and a small KV cache",
    "queues, never crashes",
    CROWDS,
)
def crowd(world: World, how: tuple[int, int, dict[str, Any]]) -> Got:
    num_adapters, slots, settings = how
    folders, dice = some_adapters(world, num_adapters), random.Random(slots)
    engine = start_engine(world.base(), slots=slots, **{"kv_cache_tokens": 160, "block_size": 8, **settings})
    names: dict[str, Path | None] = {f"a{index}": folder for index, folder in enumerate(folders)}
    for name, folder in names.items():
        load(engine, name, folder or "")
    answers: Answers = {}
    asked: dict[str, tuple[Path | None, list[int]]] = {}
    for number in range(72):
        who = dice.choice([*names, None])
        prompt = PROMPTS[dice.choice((1, 7, 20, 33))]
        submit(engine, str(number), who, prompt, dice.randint(1, 12))
        asked[str(number)] = (None if who is None else names[who], prompt)
        if dice.random() < 0.4:
            step(engine, answers)
        if dice.random() < 0.25:
            victim = dice.choice(list(asked))
            if answers.get(victim, Answer()).reason is None:
                engine.abort(victim)
                del asked[victim]
                answers.pop(victim, None)
    finish(engine, answers)
    unload(engine, *names)
    left = engine.manager.residency()
    return all_of(right_answers(world, asked, answers), Got(f"left: {left}", left == ([], [])))


@case("vllm PR#15422", "requests behind one that lacks a slot", "base and resident requests pass it")
def passed_by(world: World) -> Got:
    a, b = some_adapters(world, 2)
    engine, answers = start_engine(world.base(), slots=1, max_slot_wait_s=60), Answers()
    load(engine, "a", a)
    load(engine, "b", b)
    submit(engine, "resident", "a", PROMPTS[7], 40)
    step(engine, answers)
    submit(engine, "behind", "b", PROMPTS[7], 4)
    submit(engine, "base", None, PROMPTS[7], 4)
    submit(engine, "resident too", "a", PROMPTS[20], 4)
    for _ in range(8):
        step(engine, answers)
    early = {key for key, answer in answers.items() if answer.reason is not None}
    waited = answers.get("behind", Answer()).tokens == []
    finish(engine, answers)
    asked = {"resident": (a, PROMPTS[7]), "behind": (b, PROMPTS[7]), "base": (None, PROMPTS[7])}
    passed = early == {"base", "resident too"} and waited
    return all_of(Got(f"done while b waits: {sorted(early)}", passed), right_answers(world, asked, answers))


@case("vllm PR#15422", "requests that must wait for a slot, among themselves", "first in, first out")
def first_in_first_out(world: World) -> Got:
    folders = some_adapters(world, 5)
    engine, answers, order = start_engine(world.base(), slots=1, max_slot_wait_s=0), Answers(), []
    for index, folder in enumerate(folders):
        load(engine, f"a{index}", folder)
    for index in (3, 0, 4, 1, 2):
        submit(engine, f"a{index}", f"a{index}", PROMPTS[7], 3)
    while engine.has_work():
        order += [delta.request_id for delta in step(engine, answers) if delta.finish_reason]
    return Got(" ".join(order), order == ["a3", "a0", "a4", "a1", "a2"])


class Clock:
    """A clock that a case moves by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


BOUNDS = {"a bound of 2 s": 2.0, "a bound of 0 s": 0.0}


@case("MAX 26.7", "one slot, steady traffic on A, one request for B", "B is served within its bound", BOUNDS)
def bounded_wait(world: World, bound_s: float) -> Got:
    from lora_core.config import LoRAConfig
    from tests.cases.world import engine_config

    a, b = some_adapters(world, 2)
    clock, answers, step_s, tokens = Clock(), Answers(), 0.1, 6
    config = engine_config(world.base(), max_slot_wait_s=bound_s)
    engine = LLMEngine(config, LoRAConfig(enable_lora=True, max_num_loras=1), clock=clock)
    load(engine, "a", a)
    load(engine, "b", b)
    asked_at = served_at = None
    for number in range(120):
        # Two new requests for A in every step: A never runs dry.
        for twin in "xy":
            submit(engine, f"{number}{twin}", "a", PROMPTS[7], tokens)
        if number == 10:
            submit(engine, "b", "b", PROMPTS[20], 4)
            asked_at = clock.now_s
        clock.now_s += step_s
        deltas = engine.step()
        for delta in deltas:
            answers.setdefault(delta.request_id, Answer()).take(delta)
            if delta.request_id == "b" and served_at is None:
                served_at = clock.now_s
        if served_at is not None and answers["b"].reason is not None:
            break
    waited = None if served_at is None or asked_at is None else served_at - asked_at
    # A request of A that has just begun computes its prompt and a token, and B its prompt.
    limit = max(bound_s, 3 * step_s)
    for request_id in [str(n) + t for n in range(120) for t in "xy"]:
        engine.abort(request_id)
    finish(engine, answers)
    right = waited is not None and waited <= limit
    served = right_answers(world, {"b": (b, PROMPTS[20])}, answers)
    return all_of(Got(f"waited {waited} s of at most {limit:.1f} s", right), served)


@case("vllm#13698", "20 loads and unloads in a thread while 12 requests generate", "safe: every token right")
def load_while_generating(world: World) -> Got:
    folders = some_adapters(world, 6)
    engine, answers, statuses = start_engine(world.base(), slots=3), Answers(), []
    for index in range(3):
        load(engine, f"a{index}", folders[index])
    asked = {}
    for number in range(12):
        name, folder = (None, None) if number % 4 == 3 else (f"a{number % 4}", folders[number % 4])
        submit(engine, str(number), name, PROMPTS[20], 40)
        asked[str(number)] = (folder, PROMPTS[20])

    def churn() -> None:
        for turn in range(20):
            name = f"passing-{turn % 3}"
            statuses.append(engine.manager.load_adapter(f"{name}={folders[3 + turn % 3]}").status)
            statuses.append(engine.manager.unload_adapter(name).status)

    thread = threading.Thread(target=churn)
    thread.start()
    finish(engine, answers)
    thread.join()
    done = set(statuses) == {LoRAStatus.SUCCESS} and len(statuses) == 40
    return all_of(Got(f"{len(statuses)} operations", done), right_answers(world, asked, answers))


@case("sglang#36894", "n=16 requests, then unload", "returns in bounded time; all 16 finish with its weights")
def unload_behind_sixteen(world: World) -> Got:
    folder, engine, answers = some_adapters(world, 1)[0], start_engine(world.base(), slots=2), Answers()
    load(engine, "a", folder)
    asked = {str(number): (folder, PROMPTS[7]) for number in range(16)}
    for request_id in asked:
        submit(engine, request_id, "a", PROMPTS[7], 20)
    step(engine, answers)
    start = time.monotonic()
    response = engine.manager.unload_adapter("a")
    took_s = time.monotonic() - start
    finish(engine, answers)
    gone = engine.manager.residency() == ([], [])
    named = contains(words(response), "16") if response.status is LoRAStatus.SUCCESS else Got(words(response), False)
    return all_of(
        Got(f"unload took {took_s * 1000:.0f} ms", took_s < 2 and gone), named, right_answers(world, asked, answers)
    )


@case("sglang#36894", "unload with a drain's deadline that passes", "requests end by name; slot and memory are free")
def drain_deadline(world: World) -> Got:
    folder = some_adapters(world, 1)[0]
    engine, answers = start_engine(world.base(), slots=1, lora={"drain_timeout_s": 0.2}), Answers()
    load(engine, "a", folder)
    for number in range(4):
        submit(engine, str(number), "a", PROMPTS[7], 400)
    submit(engine, "base", None, PROMPTS[7], 12)
    step(engine, answers)
    unload(engine, "a")
    start = time.monotonic()
    while any(answers.get(str(number), Answer()).reason is None for number in range(4)):
        assert time.monotonic() - start < 20, "requests outlive the deadline"
        step(engine, answers)
    took_s = time.monotonic() - start
    finish(engine, answers)
    kinds = {answers[str(number)].error_type for number in range(4)}
    gone = engine.manager.residency() == ([], []) and not engine.manager.retired()
    load(engine, "a", folder)
    tokens, _ = alone(engine, "a", PROMPTS[20])
    return all_of(
        Got(f"ended after {took_s:.1f} s as {kinds}", kinds == {"AdapterUnloaded"} and took_s < 5 and gone),
        contains(answers["0"].error, "'a'"),
        right_answers(world, {"base": (None, PROMPTS[7])}, answers),
        same_tokens(world, "llama", folder, PROMPTS[20], tokens, "loaded again: "),
    )


@case("vllm#34119", "0 to 4 active adapters, another number in every step", "equals each request alone")
def varying(world: World) -> Got:
    folders = some_adapters(world, 4)
    engine, answers = start_engine(world.base(), slots=4), Answers()
    asked: dict[str, tuple[Path | None, list[int]]] = {}
    for index, folder in enumerate(folders):
        load(engine, f"a{index}", folder)
        submit(engine, f"first-{index}", f"a{index}", PROMPTS[7], 1)
        asked[f"first-{index}"] = (folder, PROMPTS[7])
    # From here on all are in slots, and how many are active in a step is not up to how long their files take.
    finish(engine, answers)
    active_seen = set()
    for turn, num in enumerate((0, 4, 1, 3, 0, 2, 4, 0, 1, 4, 3, 2, 0)):
        for index in range(num):
            key = f"{turn}-{index}"
            submit(engine, key, f"a{(index + turn) % 4}", PROMPTS[7], 1 + (turn + index) % 3)
            asked[key] = (folders[(index + turn) % 4], PROMPTS[7])
        submit(engine, f"{turn}-base", None, PROMPTS[5], 2)
        asked[f"{turn}-base"] = (None, PROMPTS[5])
        deltas = step(engine, answers)
        active_seen.add(len({asked[d.request_id][0] for d in deltas} - {None}))
    finish(engine, answers)
    enough = Got(f"active in a step: {sorted(active_seen)}", active_seen >= {0, 1, 2, 3, 4})
    return all_of(enough, right_answers(world, asked, answers))


@case("vllm#11077", "1000 names, 4 slots, each used once", "all answered, each with its own weights")
def thousand(world: World) -> Got:
    folders = some_adapters(world, 4)
    engine, answers = start_engine(world.base(), slots=4), Answers()
    for number in range(1000):
        load(engine, f"n{number}", folders[number % 4])
    for number in range(1000):
        submit(engine, str(number), f"n{number}", PROMPTS[7], 2)
    while engine.has_work():
        for delta in engine.step():
            answers.setdefault(delta.request_id, Answer()).take(delta)
    engine.check_invariants()
    known = [
        [int(t) for t in world.truth.model(world.base(), folder)(torch.tensor([PROMPTS[7]])).logits[0, -1:].argmax(-1)]
        for folder in folders
    ]
    wrong = [n for n in range(1000) if answers[str(n)].tokens[:1] != known[n % 4] or len(answers[str(n)].tokens) != 2]
    return Got(f"{len(answers)} answered, {len(wrong)} wrong, {len({*map(tuple, known)})} distinct", not wrong)


@case("vllm#11077", "200 names on little host memory, 4 slots, twice each", "all answered; memory within its bound")
def little_host_memory(world: World) -> Got:
    folders = some_adapters(world, 4)
    bytes_each = max(load_bytes(world, folder) for folder in folders)
    engine = start_engine(world.base(), slots=4, lora={"host_memory_bytes": 12 * bytes_each})
    answers: Answers = {}
    for number in range(200):
        load(engine, f"n{number}", folders[number % 4])
    asked = {}
    for number in range(400):
        submit(engine, str(number), f"n{number % 200}", PROMPTS[7], 3)
        asked[str(number)] = (folders[number % 4], PROMPTS[7])
    finish(engine, answers)
    held = sum(1 for ref in engine.manager.residency()[1])
    return all_of(right_answers(world, asked, answers), Got(f"{held} names admitted", held == 200))


def load_bytes(world: World, folder: Path) -> int:
    """Host memory an adapter takes."""
    engine, name = world.engine(), world.new_name()
    report = load(engine, name, folder).report
    unload(engine, name)
    assert report is not None, "no report"
    return report.num_bytes


@case(OWN, "the folder of an adapter that left host memory is deleted", "its own requests fail by name, others go on")
def lost(world: World) -> Got:
    folders = some_adapters(world, 3)
    gone = world.copy(folders[0])
    bound = 2 * max(load_bytes(world, folder) for folder in folders)
    engine = start_engine(world.base(), slots=1, lora={"host_memory_bytes": bound})
    load(engine, "gone", gone)
    for index in range(1, 3):
        load(engine, f"a{index}", folders[index])
        alone(engine, f"a{index}", PROMPTS[7], 1)
    for turn in range(4):
        load(engine, f"more-{turn}", folders[1 + turn % 2])
        alone(engine, f"more-{turn}", PROMPTS[7], 1)
    shutil.rmtree(gone)
    answers: Answers = {}
    submit(engine, "gone", "gone", PROMPTS[7])
    submit(engine, "a1", "a1", PROMPTS[20])
    submit(engine, "base", None, PROMPTS[20])
    finish(engine, answers)
    return all_of(
        Got(f"{answers['gone'].error_type}", answers["gone"].error_type == "AdapterLost"),
        contains(answers["gone"].error, "gone", str(gone)),
        right_answers(world, {"a1": (folders[1], PROMPTS[20]), "base": (None, PROMPTS[20])}, answers),
    )
