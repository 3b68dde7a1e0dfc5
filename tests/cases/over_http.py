"""Sections A to C as clients see them: statuses, words and tokens of the application on Ray Serve."""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.cases.adapter_files import good, with_bias, with_pairs
from tests.cases.adapters import CONFIG, WEIGHTS, edit_config, edit_weights
from tests.cases.application import BASE, NUM_REPLICAS, App, Reply
from tests.cases.queueing import some_adapters
from tests.cases.registry import OWN, Got, all_of, case
from tests.cases.serving import PROMPTS, contains, same_tokens
from tests.cases.world import World

NO_LEAKS = ("Traceback", 'File "', "site-packages", "lora_core", "RayTaskError")


def judge(app: App, reply: Reply, status: int, *needles: str) -> Got:
    """Whether an answer has the status, the words and (an error) OpenAI's envelope, and the server is unharmed."""
    parts = [Got(f"{reply.status}", reply.status == status), contains(reply.message, *needles)]
    if status != 200:
        envelope = set(reply.body.get("error", {})) == {"message", "type", "param", "code"}
        leaks = [leak for leak in NO_LEAKS if leak in str(reply.body)]
        parts.append(Got("in the envelope" if envelope else f"not the envelope: {reply.body}", envelope))
        parts.append(Got(f"shows {leaks}" if leaks else "no trace", not leaks))
    parts.append(Got("healthy" if app.healthy() else "not healthy", app.healthy()))
    return all_of(*parts)


def checked(world: World, reply: Reply, folder: Path | None, prompt: list[int], label: str = "") -> Got:
    """Whether a completion has the tokens of PEFT."""
    if reply.status != 200:
        return Got(f"{label}{reply.status}: {reply.message}", False)
    return same_tokens(world, "llama", folder, prompt, reply.tokens, label)


Make = Callable[[World], Any]
BAD_LOADS: dict[str, tuple[str, Make, tuple[str, ...]]] = {
    "modules outside": ("vllm#55193", lambda w: with_pairs(w, "base_model.model.score", alone=True), ("score",)),
    "experts": ("vllm#41754", lambda w: with_pairs(w, "base_model.model.model.layers.0.mlp.experts"), ("experts",)),
    "r 0": ("vllm PR#48437", lambda w: edit_config(good(w), r=0), ("r is 0",)),
    "rank 64, maximum 16": ("gpustack#5438", lambda w: w.adapter(seed=31, r=64), ("64", "16")),
    "bias lora_only": ("vllm PR#5733", lambda w: with_bias(w, bias="lora_only"), ("lora_only",)),
    "no such path": ("vllm#30690", lambda w: "/nowhere/at/all", ("/nowhere/at/all",)),
    "a folder without files": ("vllm#11702", lambda w: w.new_folder(), (CONFIG,)),
    "an empty weights file": ("vllm#11702", lambda w: emptied(good(w)), (WEIGHTS, "empty")),
    "DoRA vectors, use_dora false": (
        "vllm#6983", lambda w: edit_config(w.copy(w.adapter(seed=13, use_dora=True)), use_dora=False),
        ("lora_magnitude_vector",),
    ),
    "NaN": (
        "vllm#11702", lambda w: edit_weights(good(w), lambda t: {k: v * float("nan") for k, v in t.items()}), ("NaN",),
    ),
    "a Hub id, remote sources off": ("vllm#30690", lambda w: "org/name", ("allow_remote",)),
}  # fmt: skip


def emptied(folder: Path) -> Path:
    (folder / WEIGHTS).write_bytes(b"")
    return folder


def bad_load(world: World, how: tuple[str, Make, tuple[str, ...]]) -> Got:
    _, make, needles = how
    app, name = world.app, world.new_name()
    refused = judge(app, app.load(name, make(world)), 400, *needles)
    absent = app.unload(name).status == 404 and app.complete(name, PROMPTS[7]).status == 404
    corrected = app.load(name, world.adapter(seed=44)).status
    answer = checked(world, app.complete(name, PROMPTS[20]), world.adapter(seed=44), PROMPTS[20], "corrected: ")
    gone = app.unload(name).status
    rest = Got("nothing was left", absent and (corrected, gone) == (200, 200))
    return all_of(refused, rest, answer)


for _label, _how in BAD_LOADS.items():
    case(_how[0], "over HTTP", "400 with the reason; corrected under its name at once", {_label: _how})(bad_load)


@case("gpustack#5438", "over HTTP: a refused load while another adapter streams", "the stream is untouched")
def refused_beside_stream(world: World) -> Got:
    app, folder, name = world.app, world.adapter(seed=44), world.new_name()
    assert app.load(name, folder).status == 200
    tokens, refused = [], []
    for number, piece in enumerate(app.stream(name, PROMPTS[20], 60)):
        tokens += piece
        if number < 3:
            refused.append(app.load(world.new_name(), world.adapter(seed=31, r=64)).status)
    app.unload(name)
    right = set(refused) == {400} and len(tokens) == 60
    return all_of(Got(f"{refused}", right), same_tokens(world, "llama", folder, PROMPTS[20], tokens))


BODIES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "not JSON": (b"{", ("JSON",)),
    "a list": (b"[]", ("object",)),
    "no name": (b'{"lora_path": "/x"}', ("lora_name",)),
    "no path": (b'{"lora_name": "x"}', ("lora_path",)),
    "an empty name": (b'{"lora_name": "", "lora_path": "/x"}', ("lora_name",)),
    "a number for a name": (b'{"lora_name": 3, "lora_path": "/x"}', ("lora_name",)),
    "null for a path": (b'{"lora_name": "x", "lora_path": null}', ("lora_path",)),
    "an unknown field": (b'{"lora_name": "x", "lora_path": "/x", "frob": 1}', ("frob",)),
    "a name with =": (b'{"lora_name": "a=b", "lora_path": "/x"}', ("a=b",)),
    "load_inplace of another type": (b'{"lora_name": "x", "lora_path": "/x", "load_inplace": "y"}', ("load_inplace",)),
}


@case(OWN, "a malformed body of a load", "400 in the envelope, naming the field", BODIES)
def malformed(world: World, how: tuple[bytes, tuple[str, ...]]) -> Got:
    content, needles = how
    return judge(world.app, world.app.post("/v1/load_lora_adapter", content), 400, *needles)


@case(OWN, "statuses of a life: load, again, other path, use, unload, again, use", "200 200 409 200 200 404 404")
def life(world: World) -> Got:
    app, folder, name = world.app, world.adapter(seed=44), world.new_name()
    replies = [
        app.load(name, folder),
        app.load(name, folder),
        app.load(name, world.adapter(seed=46, r=2)),
        app.complete(name, PROMPTS[20]),
        app.unload(name),
        app.unload(name),
        app.complete(name, PROMPTS[20]),
    ]
    statuses = [reply.status for reply in replies]
    loaded = f"LoRA adapter '{name}' loaded successfully"
    return all_of(
        Got(f"{statuses}", statuses == [200, 200, 409, 200, 200, 404, 404]),
        contains(str(replies[0].body), loaded),
        judge(app, replies[2], 409, name),
        judge(app, replies[5], 404, name),
        judge(app, replies[6], 404, name),
        checked(world, replies[3], folder, PROMPTS[20]),
    )


@case(OWN, "the base model's name for an adapter", "409")
def base_name(world: World) -> Got:
    return judge(world.app, world.app.load(BASE, world.adapter(seed=44)), 409, BASE)


@case(OWN, "a model nobody loaded", "404 naming those there are, never base output")
def unknown_model(world: World) -> Got:
    return judge(world.app, world.app.complete("nobody", PROMPTS[7]), 404, "nobody", BASE)


@case(OWN, "a loaded adapter among the models", "listed with root and parent")
def listed(world: World) -> Got:
    app, folder, name = world.app, world.adapter(seed=44), world.new_name()
    app.load(name, folder)
    card, one = app.models().get(name, {}), app.http.get(f"/v1/models/{name}").json()
    app.unload(name)
    right = card.get("root") == str(folder) and card.get("parent") == BASE and one.get("id") == name
    return Got(f"root {card.get('root')}, parent {card.get('parent')}", right and name not in app.models())


@case(OWN, "what a load answers", "each replica's own outcome and report")
def load_outcome(world: World) -> Got:
    app, name = world.app, world.new_name()
    reply = app.load(name, world.adapter(seed=35, r=8, rank_pattern={"q_proj": 1, "up_proj": 3}))
    app.unload(name)
    replicas, text = reply.body.get("replicas", {}), str(reply.body)
    right = reply.status == 200 and len(replicas) == NUM_REPLICAS and "ranks" in text and "num_modules" in text
    return Got(f"{len(replicas)} replicas: {text[:200]}", right)


@case("sglang PR#9084", "a long stream, the adapter unloaded in the middle", "the stream completes; new requests 404")
def unload_in_stream(world: World) -> Got:
    app, folder, name = world.app, world.adapter(seed=44), world.new_name()
    app.load(name, folder)
    tokens: list[int] = []
    statuses: list[int] = []
    at = 0
    for piece in app.stream(name, PROMPTS[20], 400):
        tokens += piece
        if len(statuses) < 2:
            statuses.append(app.unload(name).status if not statuses else app.complete(name, PROMPTS[7]).status)
            at = len(tokens)
    right = statuses == [200, 404] and len(tokens) == 400 and at < 400 and name not in app.models()
    return all_of(
        Got(f"{statuses} after {at} of {len(tokens)} tokens", right),
        same_tokens(world, "llama", folder, PROMPTS[20], tokens),
    )


@case("MAX 26.7", "unload in the middle of a stream, then other weights under the name", "each has its own weights")
def reuse_in_stream(world: World) -> Got:
    app, old, new, name = world.app, world.adapter(seed=44), world.adapter(seed=46, r=2), world.new_name()
    app.load(name, old)
    tokens: list[int] = []
    replies: list[Reply] = []
    for piece in app.stream(name, PROMPTS[20], 300):
        tokens += piece
        if not replies:
            replies = [app.unload(name), app.load(name, new), app.complete(name, PROMPTS[20])]
    app.unload(name)
    return all_of(
        Got(f"{[r.status for r in replies]}", [r.status for r in replies] == [200, 200, 200]),
        same_tokens(world, "llama", old, PROMPTS[20], tokens, "stream: "),
        checked(world, replies[2], new, PROMPTS[20], "new: "),
    )


@case("vllm#42125", "load_inplace in the middle of a stream", "the stream keeps the old weights, others get the new")
def inplace_in_stream(world: World) -> Got:
    app, old, new, name = world.app, world.adapter(seed=44), world.adapter(seed=46, r=2), world.new_name()
    app.load(name, old)
    tokens: list[int] = []
    replies: list[Reply] = []
    for piece in app.stream(name, PROMPTS[20], 300):
        tokens += piece
        if not replies:
            replies = [app.load(name, new, load_inplace=True)]
            replies += [app.complete(name, PROMPTS[20]) for _ in range(4)]
    app.unload(name)
    parts = [checked(world, reply, new, PROMPTS[20], "new: ") for reply in replies[1:]]
    return all_of(
        Got(f"{replies[0].status}", replies[0].status == 200),
        same_tokens(world, "llama", old, PROMPTS[20], tokens, "stream: "),
        *parts,
    )


@case("ai-dynamo PR#5184", "20 parallel loads of one name over HTTP", "all 200; one entry")
def parallel_loads(world: World) -> Got:
    app, folder, name = world.app, world.adapter(seed=44), world.new_name()
    replies = app.at_once(20, lambda _: app.load(name, folder))
    entries = list(app.models()).count(name)
    answer = app.complete(name, PROMPTS[20])
    gone = (app.unload(name).status, app.unload(name).status)
    statuses = sorted({reply.status for reply in replies})
    right = statuses == [200] and entries == 1 and gone == (200, 404)
    same = checked(world, answer, folder, PROMPTS[20])
    return all_of(Got(f"{statuses} x{len(replies)}, {entries} entry, unloads {gone}", right), same)


@case(
    "ai-dynamo PR#5184",
    "20 parallel loads of one name, of two adapters, over HTTP",
    "one wins on every replica, the others 409",
)
def parallel_conflict(world: World) -> Got:
    app, parts = world.app, []
    folders = [world.adapter(seed=44), world.adapter(seed=46, r=2)]
    for _ in range(4):
        name = world.new_name()
        replies = app.at_once(20, partial(load_either, app, name, folders))
        winner = Path(app.models()[name]["root"])
        answers = app.at_once(4, partial(answer_of, app, name))
        app.unload(name)
        won = {reply.status for number, reply in enumerate(replies) if folders[number % 2] == winner}
        lost = {reply.status for number, reply in enumerate(replies) if folders[number % 2] != winner}
        odd = next((r.message for n, r in enumerate(replies) if (r.status == 200) != (folders[n % 2] == winner)), "")
        parts.append(Got(f"winner {sorted(won)}, others {sorted(lost)} {odd}", won == {200} and lost == {409}))
        parts += [checked(world, answer, winner, PROMPTS[20]) for answer in answers]
    return all_of(*parts)


def load_either(app: App, name: str, folders: list[Path], number: int) -> Reply:
    return app.load(name, folders[number % 2])


def answer_of(app: App, name: str, _: int) -> Reply:
    return app.complete(name, PROMPTS[20])


@case("vllm PR#20636", "two parallel unloads over HTTP, five times", "one 200, one 404")
def parallel_unloads(world: World) -> Got:
    app, tallies = world.app, []
    for _ in range(5):
        name = world.new_name()
        app.load(name, world.adapter(seed=44))
        tallies.append(sorted(reply.status for reply in app.at_once(2, lambda _, name=name: app.unload(name))))
    return Got(f"{tallies}", tallies == [[200, 404]] * 5)


@case("sglang#36894", "16 requests at once, then unload over HTTP", "answered in bounded time; all 16 complete")
def unload_behind_sixteen(world: World) -> Got:
    app, folder, name = world.app, world.adapter(seed=44), world.new_name()
    app.load(name, folder)
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(app.complete, name, PROMPTS[7], 120) for _ in range(16)]
        # Until all of them are in: the first token of one more, which waits behind them.
        next(app.stream(name, PROMPTS[7], 2))
        start = time.monotonic()
        status = app.unload(name).status
        took_s = time.monotonic() - start
        replies = [answer.result() for answer in answers]
    parts = [checked(world, reply, folder, PROMPTS[7]) for reply in replies]
    lengths = {len(reply.tokens) for reply in replies if reply.status == 200}
    return all_of(Got(f"{status} in {took_s:.2f} s, {lengths} tokens", status == 200 and took_s < 10), *parts)


@case("MAX 26.7", "a client times out, then asks again", "gets its own answer, never the late one")
def timed_out(world: World) -> Got:
    app, folder, name = world.app, world.adapter(seed=44), world.new_name()
    app.load(name, folder)
    num_late = 0
    for _ in range(5):
        with contextlib.suppress(httpx.TimeoutException):
            app.complete(name, PROMPTS[7], 400, timeout_s=0.05)
            continue
        num_late += 1
    replies = [app.complete(name, PROMPTS[20]), app.complete(BASE, PROMPTS[33])]
    app.unload(name)
    return all_of(
        Got(f"{num_late} timed out", num_late == 5),
        checked(world, replies[0], folder, PROMPTS[20]),
        checked(world, replies[1], None, PROMPTS[33]),
    )


@case("MAX 26.7", "every slot of every replica busy, one request for another adapter", "served within its bound")
def bounded(world: World) -> Got:
    app, folders = world.app, some_adapters(world, 5)
    names = [world.new_name() for _ in folders]
    for name, folder in zip(names, folders, strict=True):
        assert app.load(name, folder).status == 200
    answered = threading.Event()
    give_up = time.monotonic() + 60

    def traffic(number: int) -> int:
        num = 0
        while not answered.is_set() and time.monotonic() < give_up:
            assert app.complete(names[number % 4], PROMPTS[7], 30).status == 200
            num += 1
        return num

    with ThreadPoolExecutor(12) as pool:
        busy = [pool.submit(traffic, number) for number in range(12)]
        time.sleep(1)
        start = time.monotonic()
        reply = app.complete(names[4], PROMPTS[20])
        waited_s = time.monotonic() - start
        answered.set()
        num_others = sum(future.result() for future in busy)
    for name in names:
        app.unload(name)
    # max_slot_wait_s is 2, and the rest is what a busy machine needs. The traffic alone would go on for 60 s.
    in_time = Got(f"{waited_s:.1f} s beside {num_others} requests", waited_s < 15 and num_others > 12)
    return all_of(in_time, checked(world, reply, folders[4], PROMPTS[20]))


@case("LoRAX #779", "300 requests over 8 adapters and base, clients that leave", "all answered; /health stays green")
def crowd(world: World) -> Got:
    app, folders = world.app, some_adapters(world, 8)
    names = {world.new_name(): folder for folder in folders}
    for name, folder in names.items():
        assert app.load(name, folder).status == 200
    models: list[tuple[str, Path | None]] = [*names.items(), (BASE, None)]
    health: list[bool] = []

    def ask(number: int) -> Reply | None:
        model, _ = models[number % 9]
        if number % 10 == 7:
            with contextlib.suppress(httpx.TimeoutException):
                app.complete(model, PROMPTS[33], 200, timeout_s=random.Random(number).uniform(0.01, 0.2))
            return None
        if number % 50 == 0:
            health.append(app.healthy())
        reply: Reply = app.complete(model, PROMPTS[7], 6)
        return reply

    with ThreadPoolExecutor(48) as pool:
        replies = list(pool.map(ask, range(300)))
    for name in names:
        app.unload(name)
    left = set(app.models())
    first: dict[int, Reply] = {}
    stable = True
    for number, reply in enumerate(replies):
        if reply is not None:
            same = first.setdefault(number % 9, reply)
            stable &= reply.status == 200 and reply.tokens == same.tokens
    parts = [checked(world, reply, models[which][1], PROMPTS[7], f"{which}: ") for which, reply in first.items()]
    num = sum(reply is not None for reply in replies)
    green = Got(f"{num} answered, one output each: {stable}, health {health}", stable and all(health) and num == 270)
    return all_of(green, Got(f"left {left}", left == {BASE}), *parts)


@case("sglang#23141", "12 adapters on 2 slots a replica, and base, over HTTP", "queues; all as in a quiet run")
def over_subscribed(world: World) -> Got:
    app, folders = world.app, some_adapters(world, 12)
    models: list[tuple[str, Path | None]] = [(world.new_name(), folder) for folder in folders]
    for name, folder in models:
        assert app.load(name, folder or "").status == 200
    models.append((BASE, None))
    replies = app.at_once(78, lambda number: app.complete(models[number % 13][0], PROMPTS[20], 10))
    for name, _ in models[:-1]:
        app.unload(name)
    parts = [checked(world, r, models[n % 13][1], PROMPTS[20], f"{n}: ") for n, r in enumerate(replies)]
    both = all_of(*parts)
    return Got(f"{len(replies)} answers, token for token", True) if both.right else both


PIN_STEPS = "pin, again, unknown, unpin, unpin unknown"


@case(OWN, f"statuses of {PIN_STEPS}", "200 200 404 200 404")
def pins(world: World) -> Got:
    app, name = world.app, world.new_name()
    app.load(name, world.adapter(seed=44))
    replies = [
        app.post(f"/v1/{path}_lora_adapter", {"lora_name": who})
        for path, who in (("pin", name), ("pin", name), ("pin", "nobody"), ("unpin", name), ("unpin", "nobody"))
    ]
    app.unload(name)
    statuses = [reply.status for reply in replies]
    named = judge(app, replies[2], 404, "nobody")
    return all_of(Got(f"{statuses}", statuses == [200, 200, 404, 200, 404]), named)


@case(OWN, "more adapters pinned than all but one slot", "refused with the number allowed; the first stays pinned")
def too_many_pins(world: World) -> Got:
    app, names = world.app, [world.new_name(), world.new_name()]
    for name, folder in zip(names, some_adapters(world, 2), strict=True):
        app.load(name, folder)
    replies = [app.post("/v1/pin_lora_adapter", {"lora_name": name}) for name in names]
    for name in names:
        app.unload(name)
    statuses = [reply.status for reply in replies]
    return all_of(Got(f"{statuses}", statuses == [200, 400]), contains(replies[1].message, names[1], "1"))


@case("vllm#11077", "60 names over HTTP, each used once", "all answered, each with its own weights")
def many_names(world: World) -> Got:
    app, folders = world.app, some_adapters(world, 4)
    names = [world.new_name() for _ in range(60)]
    with ThreadPoolExecutor(8) as pool:
        loads = list(pool.map(lambda n: app.load(names[n], folders[n % 4]).status, range(60)))
        replies = list(pool.map(lambda n: app.complete(names[n], PROMPTS[7], 6), range(60)))
        list(pool.map(app.unload, names))
    parts = [checked(world, reply, folders[n % 4], PROMPTS[7], f"{n}: ") for n, reply in enumerate(replies)]
    both = all_of(Got(f"loads {set(loads)}", set(loads) == {200}), *parts)
    return Got("60 loaded, 60 answers, token for token", True) if both.right else both


@case("llama.cpp#26207", "one prompt through A, B and base over HTTP, three times", "no cached block crosses")
def no_block_crosses(world: World) -> Got:
    app, folders = world.app, some_adapters(world, 2)
    models: list[tuple[str, Path | None]] = [(world.new_name(), folder) for folder in folders]
    for name, folder in models:
        app.load(name, folder or "")
    models.append((BASE, None))
    parts = [
        checked(world, app.complete(name, PROMPTS[70]), folder, PROMPTS[70])
        for _ in range(3)
        for name, folder in models
    ]
    for name, _ in models[:-1]:
        app.unload(name)
    return all_of(*parts)
