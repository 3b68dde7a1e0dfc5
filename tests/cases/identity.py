"""Section B: a name is never answered with other weights than its own, whatever was there before or is beside it."""

import itertools
import os
import random
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_core.engine.engine import LLMEngine
from lora_core.types import LoRAStatus
from tests.cases.adapters import WEIGHTS, Q, edit_weights
from tests.cases.registry import OWN, Got, all_of, case
from tests.cases.serving import (
    PROMPTS,
    Answers,
    OpenedFiles,
    alone,
    contains,
    differs_from_base,
    finish,
    load,
    loaded,
    recorded,
    ref_of,
    same_tokens,
    step,
    submit,
    unload,
    words,
)
from tests.cases.world import World, start_engine

LONG = PROMPTS[70]
"""Fills several blocks of the KV cache."""


def check(world: World, folder: Path | None, prompt: list[int], tokens: list[int], label: str = "") -> Got:
    """The tokens are PEFT's for this folder and, with an adapter, not the base's."""
    same = same_tokens(world, "llama", folder, prompt, tokens, label)
    return same if folder is None else all_of(same, differs_from_base(world, "llama", prompt, tokens))


X_THEN_Y: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all-linear, then q only": ({"seed": 40}, {"seed": 41, "targets": ("q_proj",), "alpha": 32}),
    "rank 16, then rank 1": ({"seed": 40, "r": 16}, {"seed": 41, "r": 1, "alpha": 4}),
    "the same shapes": ({"seed": 40}, {"seed": 42}),
    "both layers, then one": ({"seed": 40}, {"seed": 42, "layers_to_transform": [1], "alpha": 16}),
    "LoRA, then DoRA": ({"seed": 40}, {"seed": 42, "use_dora": True}),
    "DoRA, then LoRA of k": ({"seed": 42, "use_dora": True}, {"seed": 41, "targets": ("k_proj",), "alpha": 32}),
    "embedding and head, then q": (
        {"seed": 43, "targets": ("embed_tokens", "lm_head", "q_proj")},
        {"seed": 41, "targets": ("q_proj",), "alpha": 32},
    ),
    "q, then embedding and head": (
        {"seed": 41, "targets": ("q_proj",), "alpha": 32},
        {"seed": 43, "targets": ("embed_tokens", "lm_head", "q_proj")},
    ),
}  # fmt: skip


@case("vllm#30931", "X as a, P, unload, Y as a, P, on one slot", "equals a cold run of Y", X_THEN_Y)
def x_then_y(world: World, how: tuple[dict[str, Any], dict[str, Any]]) -> Got:
    x, y = (world.adapter(**settings) for settings in how)
    engine, parts = start_engine(world.base(), slots=1), []
    for label, folder in (("X: ", x), ("Y: ", y), ("X again: ", x)):
        load(engine, "a", folder)
        parts.append(check(world, folder, LONG, alone(engine, "a", LONG)[0], label))
        unload(engine, "a")
    cold = start_engine(world.base(), slots=1)
    load(cold, "a", y)
    load(engine, "a", y)
    equal = torch.equal(alone(cold, "a", LONG)[1], alone(engine, "a", LONG)[1])
    return all_of(*parts, Got("bits of a cold run" if equal else "other bits than a cold run", equal))


def rewrite(folder: Path, other: Path) -> None:
    """New weights under the same path: the same size, and the time of the old file."""
    old = (folder / WEIGHTS).stat()
    (folder / WEIGHTS).write_bytes((other / WEIGHTS).read_bytes())
    os.utime(folder / WEIGHTS, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert (folder / WEIGHTS).stat().st_size == old.st_size


REPLACED = {"unload and load": False, "load with replace": True}


@case("vllm#42125", "same name, same path, new bytes of the old size and time", "new generation, new tokens", REPLACED)
def new_bytes(world: World, replace: bool) -> Got:
    old, new = world.adapter(seed=40), world.adapter(seed=42)
    folder, engine, name = world.copy(old), world.engine(), world.new_name()
    load(engine, name, folder)
    first, before = alone(engine, name, LONG)[0], ref_of(engine, name)
    rewrite(folder, new)
    if replace:
        load(engine, name, folder, replace=True)
    else:
        unload(engine, name)
        load(engine, name, folder)
    second, after = alone(engine, name, LONG)[0], ref_of(engine, name)
    unload(engine, name)
    engine.check_invariants()
    return all_of(
        check(world, old, LONG, first),
        check(world, new, LONG, second),
        Got(f"generation {before.generation} then {after.generation}", after.generation > before.generation),
    )


@case(
    "vllm#42125", "new bytes at the path, loaded again without replace", "409, said to have changed; the old serve on"
)
def new_bytes_conflict(world: World) -> Got:
    old, new = world.adapter(seed=40), world.adapter(seed=42)
    folder, engine, name = world.copy(old), world.engine(), world.new_name()
    load(engine, name, folder)
    before = ref_of(engine, name)
    rewrite(folder, new)
    response = engine.manager.load_adapter(f"{name}={folder}")
    tokens, after = alone(engine, name, LONG)[0], ref_of(engine, name)
    unload(engine, name)
    return all_of(
        Got(response.status.value, response.status is LoRAStatus.LOAD_NAME_EXISTS),
        contains(words(response), name, "changed"),
        check(world, old, LONG, tokens),
        Got("same generation", before == after),
    )


@case("vllm#42125", "replace while a request decodes and others wait", "old requests the old weights, new ones the new")
def replace_in_flight(world: World) -> Got:
    old, new = world.adapter(seed=40), world.adapter(seed=42, use_rslora=True)
    engine, name, answers = start_engine(world.base(), slots=2, max_num_seqs=3), world.new_name(), Answers()
    load(engine, name, old)
    for index in range(5):
        submit(engine, f"old-{index}", name, PROMPTS[20], 16)
    for _ in range(3):
        step(engine, answers)
    load(engine, name, new, replace=True)
    for index in range(4):
        submit(engine, f"new-{index}", name, PROMPTS[20], 16)
    finish(engine, answers)
    parts = [
        check(world, old if key.startswith("old") else new, PROMPTS[20], a.tokens, key) for key, a in answers.items()
    ]
    left = len(engine.manager.residency()[1])
    return all_of(*parts, Got(f"{len(answers)} answers, {left} adapter", len(answers) == 9 and left == 1))


@case("vllm#42125", "a replacement that is refused", "refused; the old weights serve on, same generation")
def replace_refused(world: World) -> Got:
    old, engine, name = world.adapter(seed=40), world.engine(), world.new_name()
    load(engine, name, old)
    before = ref_of(engine, name)
    response = engine.manager.load_adapter(f"{name}={world.adapter(seed=31, r=64)}", replace=True)
    tokens, after = alone(engine, name, LONG)[0], ref_of(engine, name)
    unload(engine, name)
    return all_of(
        contains(words(response), "64", "16"),
        Got(response.status.value, response.status is LoRAStatus.LOAD_INVALID_ADAPTER and before == after),
        check(world, old, LONG, tokens),
    )


@case("vllm#42125", "replace by another path, and of a name that is not loaded", "both succeed")
def replace_elsewhere(world: World) -> Got:
    old, new = world.adapter(seed=40), world.adapter(seed=42)
    engine, name, parts = world.engine(), world.new_name(), []
    for folder in (old, new, old):
        load(engine, name, folder, replace=True)
        parts.append(check(world, folder, LONG, alone(engine, name, LONG)[0]))
    unload(engine, name)
    return all_of(*parts)


ORDERS = {" ".join(order): order for order in itertools.permutations(("A", "B", "base"))}


@case("llama.cpp#26207", "one prompt through", "no cached block crosses", ORDERS)
def no_block_crosses(world: World, order: tuple[str, ...]) -> Got:
    folders = {"A": world.adapter(seed=40), "B": world.adapter(seed=42), "base": None}
    engine = world.engine()
    with loaded(world, engine, world.adapter(seed=40), world.adapter(seed=42)) as (a, b):
        names = {"A": a, "B": b, "base": None}
        answers = [(label, alone(engine, names[label], LONG)[0]) for label in (*order, *order)]
    return all_of(*(check(world, folders[label], LONG, tokens, f"{label}: ") for label, tokens in answers))


@case("llama.cpp#26207", "one prompt through A, B and base at once, and its extensions", "no cached block crosses")
def no_block_crosses_at_once(world: World) -> Got:
    folders: dict[str, Path | None] = {"A": world.adapter(seed=40), "B": world.adapter(seed=42), "base": None}
    engine, parts = world.engine(), []
    with loaded(world, engine, world.adapter(seed=40), world.adapter(seed=42)) as (a, b):
        names = {"A": a, "B": b, "base": None}
        for longer in ([], [5, 9], list(range(30))):
            for index in range(6):
                label = ("A", "B", "base")[index % 3]
                submit(engine, f"{index} {label}", names[label], [*LONG, *longer])
            for key, answer in finish(engine).items():
                parts.append(check(world, folders[key.split()[1]], [*LONG, *longer], answer.tokens, f"{key}: "))
    return all_of(*parts)


WAITS = {"patient": 60.0, "put back at once": 0.0}
"""`max_slot_wait_s`: within it slots in use stay with their adapters, past it those that run make room."""


@case(
    "vllm#47724",
    "2 slots, A1 and A2 decoding, A3 and A4 loaded and used in a loop",
    "every request as in a quiet run",
    WAITS,
)
def slots_in_use(world: World, max_slot_wait_s: float) -> Got:
    steady = [world.adapter(seed=44), world.adapter(seed=45, targets=("q_proj", "v_proj", "down_proj"), alpha=16)]
    passing = [world.adapter(seed=46, r=2), world.adapter(seed=47, r=8)]
    engine, answers, prompts = (
        start_engine(world.base(), slots=2, max_slot_wait_s=max_slot_wait_s),
        Answers(),
        dict[str, list[int]](),
    )
    folders: dict[str, Path] = {}
    for index, folder in enumerate(steady):
        load(engine, f"A{index + 1}", folder)
        submit(engine, f"steady-{index}", f"A{index + 1}", PROMPTS[20], 60)
        folders[f"steady-{index}"], prompts[f"steady-{index}"] = folder, PROMPTS[20]
    while len(answers) < 2:
        step(engine, answers)
    refs = [ref_of(engine, f"A{index + 1}") for index in range(2)]
    slots = [engine.manager.slot_of(ref) for ref in refs]
    moved = False
    for turn in range(16):
        name = f"A{3 + turn % 2}"
        load(engine, name, passing[turn % 2])
        submit(engine, f"passing-{turn}", name, PROMPTS[7], 3)
        folders[f"passing-{turn}"], prompts[f"passing-{turn}"] = passing[turn % 2], PROMPTS[7]
        step(engine, answers)
        unload(engine, name)
        in_use = all(answers[f"steady-{index}"].reason is None for index in range(2))
        moved |= in_use and [engine.manager.slot_of(ref) for ref in refs] != slots
    finish(engine, answers)
    parts = [check(world, folders[key], prompts[key], answer.tokens, f"{key}: ") for key, answer in answers.items()]
    may_move = max_slot_wait_s == 0
    stayed = Got(f"slots in use moved: {moved}, {len(answers)} answers", moved <= may_move and len(answers) == 18)
    return all_of(stayed, *parts)


@case(
    "sglang#8263", "a name reused for other weights, 12 times, on 2 slots with others in them", "never the old content"
)
def name_reused(world: World) -> Got:
    folders = [world.adapter(seed=seed) for seed in (44, 46, 47)]
    engine, parts = start_engine(world.base(), slots=2), []
    load(engine, "other", world.adapter(seed=45, targets=("q_proj", "v_proj", "down_proj"), alpha=16))
    for turn in range(12):
        folder = folders[turn % 3]
        load(engine, "a", folder)
        submit(engine, "a", "a", PROMPTS[20])
        if turn % 2:
            submit(engine, "other", "other", PROMPTS[20])
        parts.append(check(world, folder, PROMPTS[20], finish(engine)["a"].tokens, f"{turn}: "))
        unload(engine, "a")
    return all_of(*parts)


@case("sglang#8263", "two names of one folder, one unloaded", "the other goes on; generations differ")
def two_names(world: World) -> Got:
    folder, engine = world.adapter(seed=44), world.engine()
    with loaded(world, engine, folder) as (one,):
        with loaded(world, engine, folder) as (two,):
            refs = ref_of(engine, one), ref_of(engine, two)
            parts = [check(world, folder, PROMPTS[20], alone(engine, name, PROMPTS[20])[0]) for name in (one, two)]
        parts.append(check(world, folder, PROMPTS[20], alone(engine, one, PROMPTS[20])[0]))
    return all_of(*parts, Got(f"{refs[0].generation}, {refs[1].generation}", refs[0].generation != refs[1].generation))


@case("vllm#8681", "2 adapters, same prompt, 50 concurrent repeats of each", "two stable, distinct outputs")
def two_stable_outputs(world: World) -> Got:
    folders = [world.adapter(seed=44), world.adapter(seed=46, r=2)]
    engine = start_engine(world.base(), slots=2, kv_cache_tokens=4096)
    with loaded(world, engine, *folders) as names:
        for repeat in range(50):
            for index, name in enumerate(names):
                submit(engine, f"{index} {repeat}", name, PROMPTS[20], 8)
        answers = finish(engine)
    outputs = [{tuple(a.tokens) for key, a in answers.items() if key.startswith(f"{i} ")} for i in range(2)]
    parts = [check(world, folders[i], PROMPTS[20], list(next(iter(outputs[i])))) for i in range(2)]
    stable = [len(found) for found in outputs] == [1, 1] and outputs[0] != outputs[1] and len(answers) == 100
    return all_of(Got(f"{[len(found) for found in outputs]} outputs of {len(answers)} answers", stable), *parts)


MIXES = {
    "default chunks": {},
    "5 tokens a step": {"max_num_batched_tokens": 5},
    "a small cache": {"kv_cache_tokens": 192},
}


@case("TensorRT-LLM#2096", "LoRA and base rows in one batch", "equals separate runs", MIXES)
def mixed_batch(world: World, settings: dict[str, Any]) -> Got:
    folders = [None, world.adapter(seed=44), world.adapter(seed=46, r=2), world.adapter(seed=45, targets=("o_proj",))]
    engine = start_engine(world.base(), slots=3, **settings)
    sizes = (1, 7, 20, 33)
    with loaded(world, engine, *(folder for folder in folders if folder)) as names:
        asked = list(itertools.product((None, *names), sizes))
        random.Random(1).shuffle(asked)
        for index, (name, size) in enumerate(asked):
            submit(engine, str(index), name, PROMPTS[size])
        answers = finish(engine)
        by_name = dict(zip((None, *names), folders, strict=True))
    parts = [
        same_tokens(world, "llama", by_name[name], PROMPTS[size], answers[str(index)].tokens, f"{index}: ")
        for index, (name, size) in enumerate(asked)
    ]
    return all_of(Got(f"{len(asked)} requests", len(answers) == len(asked) == 16), *parts)


def base_logits(engine: LLMEngine, prompts: list[list[int]]) -> list[Tensor]:
    """Logits of every step of a batch of base requests."""
    with recorded(engine) as found:
        for index, prompt in enumerate(prompts):
            submit(engine, str(index), None, prompt)
        finish(engine)
    return found


BASES = {"tied": "llama", "untied": "untied", "with biases": "biased", "8 heads, 4 layers": "deep"}


@case("vllm#14392", "LoRA enabled with full slots, only base requests", "bit-identical to LoRA off", BASES)
def base_only(world: World, family: str) -> Got:
    prompts = [PROMPTS[size] for size in (1, 7, 33, 70)]
    # The prompts come three times, with LoRA off too: what is found in the prefix cache makes their steps others.
    without = start_engine(world.base(family), slots=0)
    off = [base_logits(without, prompts) for _ in range(3)]
    engine = start_engine(world.base(family), slots=2)
    never = base_logits(engine, prompts)
    with loaded(world, engine, world.adapter(family, seed=44), world.adapter(family, seed=46, r=2)) as names:
        for name in names:
            alone(engine, name, PROMPTS[7])
        full = base_logits(engine, prompts)
    after = base_logits(engine, prompts)
    same = [
        len(expected) == len(on) and all(torch.equal(a, b) for a, b in zip(expected, on, strict=True))
        for expected, on in zip(off, (never, full, after), strict=True)
    ]
    return Got(f"{len(off[0])} steps; never used, slots full, unloaded: {same}", all(same))


@case("vllm#14392", "base rows beside adapter rows", "bit-identical to the same batch with LoRA off")
def base_rows_bits(world: World) -> Got:
    def run(engine: LLMEngine, name: str | None) -> Tensor:
        # Adapter rows come first in a step, so that base rows stand where they do with LoRA off.
        with recorded(engine) as found:
            for index in range(6):
                submit(engine, str(index), name if index < 3 else None, PROMPTS[20], 1)
            finish(engine)
        return found[0]

    off = run(start_engine(world.base(), slots=0), None)
    engine = start_engine(world.base(), slots=2)
    with loaded(world, engine, world.adapter(seed=44)) as (name,):
        # In a slot: all six are then in the first step.
        alone(engine, name, PROMPTS[7])
        on = run(engine, name)
    base, adapted = torch.equal(off[3:], on[3:]), not torch.equal(off[:3], on[:3])
    return Got(f"base rows equal: {base}; adapter rows differ: {adapted}", base and adapted)


@case("SkyRL PR#1606", "reload in place, then decode", "files read once per load, never while decoding")
def read_once(world: World) -> Got:
    folder, engine, name = world.copy(world.adapter(seed=40)), world.engine(), world.new_name()
    counts = []
    with OpenedFiles(folder) as files:
        for action in ("load", "use", "replace", "use", "use again"):
            files.opened.clear()
            if action in ("load", "replace"):
                load(engine, name, folder, replace=action == "replace")
            else:
                alone(engine, name, PROMPTS[20])
            counts.append((action, files.count(".safetensors"), files.count("adapter_config.json")))
            if action == "use":
                edit_weights(folder, lambda t: t.update({f"{Q}.lora_B.weight": torch.randn(64, 4)}))
    unload(engine, name)
    expected = [("load", 1, 1), ("use", 0, 0), ("replace", 1, 1), ("use", 0, 0), ("use again", 0, 0)]
    return Got(f"(action, weights, config) {counts}", counts == expected)


@case("SkyRL PR#1606", "a slot is written once per assignment", "no write while the batch changes")
def written_once(world: World) -> Got:
    engine, names = start_engine(world.base(), slots=2), ("a", "b")
    for name, seed in zip(names, (44, 46), strict=True):
        load(engine, name, world.adapter(seed=seed))
        alone(engine, name, PROMPTS[7])
    versions = [tensor._version for tensor in engine.manager.input_buffers()[3:]]
    for turn in range(6):
        for who in (*names, None)[turn % 3 :]:
            submit(engine, f"{turn} {who}", who, PROMPTS[7 if turn % 2 else 20])
        finish(engine)
    later = [tensor._version for tensor in engine.manager.input_buffers()[3:]]
    return Got(f"{len(versions)} stacks, written again: {versions != later}", versions == later)


UNLOADED = {"running": 0, "queued behind others": 6}


@case("MAX 26.7", "unload while a request is", "it finishes with its own weights", UNLOADED)
def unload_in_flight(world: World, num_others: int) -> Got:
    folder, engine, answers = world.adapter(seed=44), start_engine(world.base(), slots=1, max_num_seqs=2), Answers()
    load(engine, "a", folder)
    load(engine, "b", world.adapter(seed=46, r=2))
    for index in range(num_others):
        submit(engine, f"b-{index}", "b", PROMPTS[7], 6)
    for index in range(3):
        submit(engine, f"a-{index}", "a", PROMPTS[20], 24)
    for _ in range(3):
        step(engine, answers)
    unload(engine, "a")
    submit(engine, "late", "a", PROMPTS[7])
    load(engine, "a", world.adapter(seed=47))
    submit(engine, "new", "a", PROMPTS[20])
    finish(engine, answers)
    parts = [check(world, folder, PROMPTS[20], answers[f"a-{index}"].tokens, f"a-{index}: ") for index in range(3)]
    return all_of(
        *parts,
        check(world, world.adapter(seed=47), PROMPTS[20], answers["new"].tokens, "new: "),
        Got(f"late: {answers['late'].error_type}", answers["late"].error_type == "AdapterNotFound"),
    )


@case("MAX 26.7", "unload and load again in a thread while two requests decode", "both finish with their own weights")
def unload_in_thread(world: World) -> Got:
    folder, engine, answers = world.adapter(seed=44), start_engine(world.base(), slots=2), Answers()
    load(engine, "a", folder)
    for index in range(2):
        submit(engine, str(index), "a", PROMPTS[20], 80)
    step(engine, answers)
    faults: list[str] = []

    def churn() -> None:
        for turn in range(10):
            responses = (engine.manager.unload_adapter("a"), engine.manager.load_adapter(f"a={others[turn % 2]}"))
            faults.extend(words(response) for response in responses if response.status is not LoRAStatus.SUCCESS)

    others = [world.adapter(seed=46, r=2), world.adapter(seed=47, r=8)]
    thread = threading.Thread(target=churn)
    thread.start()
    finish(engine, answers)
    thread.join()
    parts = [check(world, folder, PROMPTS[20], answers[str(index)].tokens) for index in range(2)]
    return all_of(*parts, Got(f"faults {faults}", not faults))


@case(OWN, "generation ids over 20 loads of one name, one refused in between", "rise, and never repeat")
def generations(world: World) -> Got:
    engine, name, seen = world.engine(), world.new_name(), []
    for turn in range(20):
        if turn == 10:
            engine.manager.load_adapter(f"{name}=/nowhere")
        load(engine, name, world.adapter(seed=44))
        seen.append(ref_of(engine, name).generation)
        unload(engine, name)
    return Got(f"{seen[0]} to {seen[-1]}", sorted(set(seen)) == seen)


@case(OWN, "a generation given by the caller, then given again", "kept; the second time refused")
def given_generation(world: World) -> Got:
    engine, name, other = world.engine(), world.new_name(), world.new_name()
    load(engine, name, world.adapter(seed=44), generation=7_000_001)
    ref = ref_of(engine, name)
    again = engine.manager.load_adapter(f"{other}={world.adapter(seed=44)}", generation=7_000_001)
    unload(engine, name)
    right = ref.generation == 7_000_001 and again.status is not LoRAStatus.SUCCESS and other not in engine.manager.loras
    return Got(f"{ref.generation}; {again.status.value}: {words(again)}", right)


HASHES = {"of the files": True, "of other files": False}


@case(OWN, "a load that must have the content hash", "loads, or is refused with both hashes", HASHES)
def content_hash(world: World, is_right: bool) -> Got:
    folder, engine, name = world.adapter(seed=44), world.engine(), world.new_name()
    report = load(engine, name, folder).report
    unload(engine, name)
    assert report is not None, "no report"
    wanted = report.content_hash if is_right else report.content_hash[::-1]
    response = engine.manager.load_adapter(f"{name}={folder}", content_hash=wanted)
    if is_right:
        unload(engine, name)
        return Got(response.status.value, response.status is LoRAStatus.SUCCESS)
    named = contains(words(response), wanted[:8], report.content_hash[:8])
    return all_of(named, Got(response.status.value, response.status is not LoRAStatus.SUCCESS))
