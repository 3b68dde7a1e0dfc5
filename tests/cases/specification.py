"""Sentences of the specification that no report stands behind: names, the routing triple, slots, statuses, inputs."""

import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from deployments.http_errors import STATUS_ERRORS, fault_of
from lora_core import types as lora_types
from lora_core.config import LoRAConfig
from lora_core.errors import AdapterLost, AdapterUnloaded, InvalidRequest, LoRADisabled
from lora_core.inputs import NUM_ROUTING_INPUTS
from lora_core.layers import lora_parameters
from lora_core.models.weights import load_decoder, read_checkpoint
from lora_core.slots import NoFreeSlot, _LoRALRUCache
from lora_core.targets import LoRATargetModule
from lora_core.types import AdapterRef, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus, LoRAType
from tests.cases.adapters import WEIGHTS, Q, edit_weights
from tests.cases.registry import OWN, Got, all_of, case
from tests.cases.serving import (
    PROMPTS,
    Answers,
    alone,
    contains,
    finish,
    load,
    loaded,
    manager_of,
    read,
    ref_of,
    same_tokens,
    submit,
    unload,
    words,
)
from tests.cases.world import MAX_RANK, World, start_engine

# Section 1

NAMES: dict[str, tuple[Any, Any]] = {
    "LoRAType": ({t.name: t.value for t in LoRAType}, {"A": "lora_A", "B": "lora_B", "BIAS": "lora.bias"}),
    "LoRAOperation": ({o.name: o.value for o in LoRAOperation}, {"LOAD": "load", "UNLOAD": "unload"}),
    "LoRAStatus": (
        {s.name: s.value for s in LoRAStatus},
        {name: name.lower() for name in (
            "SUCCESS", "LOAD_NAME_EXISTS", "UNLOAD_NAME_NONEXISTENT", "LOAD_ERROR", "UNLOAD_ERROR",
            "LOAD_INVALID_PATH", "LOAD_INVALID_ADAPTER", "UNSPECIFIED_ERROR",
        )},
    ),
    "constants": (
        {name: getattr(lora_types, name) for name in dir(lora_types) if name.isupper()},
        {"ADAPTER_CONFIG_FILE": "adapter_config.json", "LORA_REQUEST_ENDPOINT": "lora_request",
         "LORA_RESPONSE_ENDPOINT": "lora_response"},
    ),
}  # fmt: skip


@case(OWN, "names and values of the protocol", "as specified", NAMES)
def names(world: World, what: tuple[dict[str, str], dict[str, str]]) -> Got:
    found, expected = what
    wrong = {name: found.get(name) for name, value in expected.items() if found.get(name) != value}
    return Got(f"wrong: {wrong}" if wrong else f"{len(expected)} names", not wrong)


@case(OWN, "LoRARequest and LoRAResponse as msgpack", "defaults omitted; the same after a round trip")
def messages(world: World) -> Got:
    request = LoRARequest(LoRAOperation.LOAD, "x")
    packed = msgspec.msgpack.encode(request)
    plain = msgspec.msgpack.decode(packed)
    back = msgspec.msgpack.decode(packed, type=LoRARequest)
    response = LoRAResponse(LoRAStatus.SUCCESS, ["a", "b"])
    same = msgspec.msgpack.decode(msgspec.msgpack.encode(response), type=LoRAResponse) == response
    right = plain == {"operation": "load", "lora_name": "x"} and back == request and back.lora_path is None and same
    return Got(f"{plain}", right)


@case(OWN, "defaults of LoRAConfig", "off, no paths, rank 16, one slot")
def defaults(world: World) -> Got:
    config = LoRAConfig()
    found = (config.enable_lora, list(config.lora_paths), config.max_lora_rank, config.max_num_loras)
    return Got(f"{found}", found == (False, [], 16, 1))


BAD_SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "max_lora_rank 0": ({"max_lora_rank": 0}, ("max_lora_rank", "1")),
    "max_lora_rank 257": ({"max_lora_rank": 257}, ("max_lora_rank", "256")),
    "max_num_loras 0": ({"max_num_loras": 0}, ("max_num_loras", "1")),
    "max_num_loras 1000": ({"max_num_loras": 1000}, ("max_num_loras", "256")),
    "an unknown key": ({"max_rank": 8}, ("max_rank",)),
    "drain_timeout_s -1": ({"drain_timeout_s": -1}, ("drain_timeout_s", "0")),
    "host_memory_bytes 0": ({"host_memory_bytes": 0}, ("host_memory_bytes",)),
}


@case(OWN, "settings out of range", "refused with the limit named", BAD_SETTINGS)
def bad_settings(world: World, what: tuple[dict[str, Any], tuple[str, ...]]) -> Got:
    fields, needles = what
    try:
        LoRAConfig(enable_lora=True, **fields)
    except ValidationError as error:
        return contains(str(error), *needles)
    return Got("accepted", False)


@case(OWN, "LoRAConfig is frozen", "an assignment raises")
def frozen(world: World) -> Got:
    config = LoRAConfig()
    try:
        config.max_lora_rank = 8
    except ValidationError as error:
        return Got(error.errors()[0]["type"], config.max_lora_rank == 16)
    return Got("assigned", False)


def http_status(status: LoRAStatus) -> int:
    kind = STATUS_ERRORS.get(status)
    return fault_of(RuntimeError("secret") if kind is None else kind("why"))[0].status


HTTP_STATUSES: dict[str, tuple[int, int]] = {
    "name exists": (http_status(LoRAStatus.LOAD_NAME_EXISTS), 409),
    "invalid path": (http_status(LoRAStatus.LOAD_INVALID_PATH), 400),
    "invalid adapter": (http_status(LoRAStatus.LOAD_INVALID_ADAPTER), 400),
    "unload of an unknown name": (http_status(LoRAStatus.UNLOAD_NAME_NONEXISTENT), 404),
    "pin of an unknown name": (http_status(LoRAStatus.PIN_NAME_NONEXISTENT), 404),
    "anything unforeseen": (http_status(LoRAStatus.UNSPECIFIED_ERROR), 500),
    "LoRA off": (fault_of(LoRADisabled("off"))[0].status, 501),
    "a request that is wrong": (fault_of(InvalidRequest("wrong"))[0].status, 400),
}


@case(OWN, "HTTP status of", "as specified", HTTP_STATUSES)
def status_mapping(world: World, what: tuple[int, int]) -> Got:
    found, expected = what
    return Got(f"{found}", found == expected)


@case(OWN, "HTTP status of a lost adapter and of one unloaded under a request", "503 and 409")
def late_statuses(world: World) -> Got:
    found = [fault_of(kind("why"))[0].status for kind in (AdapterLost, AdapterUnloaded)]
    return Got(f"{found}", found == [503, 409])


@case(OWN, "an unforeseen fault's words", "kept from the client")
def unforeseen(world: World) -> Got:
    _, body = fault_of(RuntimeError("secret /etc/passwd"))
    return Got(str(body), "secret" not in str(body) and "RuntimeError" in str(body))


@case(OWN, "LoRA off: load, unload, an adapter's request, a base request", "refused naming the setting; base served")
def lora_off(world: World) -> Got:
    engine, answers = start_engine(world.base(), slots=0), Answers()
    responses = [engine.manager.load_adapter(f"x={world.adapter(seed=44)}"), engine.manager.unload_adapter("x")]
    submit(engine, "x", "x", PROMPTS[7])
    submit(engine, "base", None, PROMPTS[7])
    finish(engine, answers)
    statuses = [response.status for response in responses]
    texts = [*(words(response) for response in responses), answers["x"].error]
    return all_of(
        Got(f"{[s.value for s in statuses]}", statuses == [LoRAStatus.LOAD_ERROR, LoRAStatus.UNLOAD_ERROR]),
        *(contains(text, "enable_lora") for text in texts),
        Got(f"{answers['x'].error_type}", answers["x"].error_type == "LoRADisabled"),
        same_tokens(world, "llama", None, PROMPTS[7], answers["base"].tokens),
    )


# Section 2


def same(tensor: torch.Tensor | None, other: torch.Tensor) -> bool:
    return tensor is not None and torch.equal(tensor, other)


@case(OWN, "what LoRAModel exposes", "padded to the maximum rank, scaled once, true ranks kept, private copies")
def model(world: World) -> Got:
    folder = world.adapter(seed=35, r=8, alpha=12, rank_pattern={"q_proj": 3}, alpha_pattern={"q_proj": 5})
    found = read(world, folder)
    tensors = load_file(folder / WEIGHTS)
    key = "layers.0.self_attn.q_proj"
    a, b = found.lora_A[f"{key}.lora_A.weight"], found.lora_B[f"{key}.lora_B.weight"]
    checks = {
        "A": a.shape == (MAX_RANK, 64) and torch.equal(a[:3], tensors[f"{Q}.lora_A.weight"]) and not a[3:].any(),
        "B": b.shape == (64, MAX_RANK) and torch.allclose(b[:, :3], tensors[f"{Q}.lora_B.weight"] * 5 / 3)
        and not b[:, 3:].any(),
        "ranks": (found.rank, found.ranks[key], found.ranks["layers.1.mlp.up_proj"]) == (8, 3, 8),
        "get": same(found.get(f"{key}.lora_A.weight"), a) and found.get("layers.7.x.lora_A.weight") is None,
        "names": found.name == "x" and str(found.path) == str(folder) and len(found.target_modules) == 7,
        "bias": dict(found.lora_bias) == {} and found.adapter_config["r"] == 8,
    }  # fmt: skip
    wrong = [name for name, right in checks.items() if not right]
    return Got(f"wrong: {wrong}" if wrong else ", ".join(checks), not wrong)


FLOAT8: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "float8_e4m3fn": (torch.float8_e4m3fn, torch.bfloat16),
    "float8_e5m2": (torch.float8_e5m2, torch.bfloat16),
}


@case(OWN, "data type of an adapter on a base of", "the base's; bfloat16 on a float8 base", FLOAT8)
def dtypes(world: World, what: tuple[torch.dtype, torch.dtype]) -> Got:
    base, expected = what
    found = read(world, world.adapter(seed=44), base_dtype=base)
    kinds = {tensor.dtype for tensor in (*found.lora_A.values(), *found.lora_B.values())}
    return Got(f"{kinds}", kinds == {expected} and found.dtype is expected)


@case(OWN, "strict=False with a module the server does not adapt", "left out, the rest read")
def not_strict(world: World) -> Got:
    folder = edit_weights(
        world.copy(world.adapter(seed=44)),
        lambda t: {
            **t,
            "base_model.model.score.lora_A.weight": torch.ones(4, 64),
            "base_model.model.score.lora_B.weight": torch.ones(2, 4),
        },
    )
    found = read(world, folder, strict=False)
    return Got(f"{len(found.ranks)} modules", len(found.ranks) == 14 and "score" not in found.ranks)


@case(OWN, "a .bin beside good safetensors, as a pipe that blocks whoever opens it", "loads; never opened")
def pickle_beside(world: World) -> Got:
    folder = world.copy(world.adapter(seed=44))
    os.mkfifo(folder / "adapter_model.bin")
    engine, name = world.engine(), world.new_name()
    load(engine, name, folder)
    tokens, _ = alone(engine, name, PROMPTS[20])
    unload(engine, name)
    return same_tokens(world, "llama", world.adapter(seed=44), PROMPTS[20], tokens)


# Section 3


class Slots(NamedTuple):
    """What a case does to a cache of three slots with a, b, c put in order, and what is left, least recent first."""

    act: Callable[[Any], Any]
    result: Any
    keys: str


def put_pinned(cache: Any) -> Any:
    for key in "abc":
        cache.pin(key)
    try:
        return cache.put("d", 4)
    except NoFreeSlot as error:
        return type(error).__name__


SLOTS: dict[str, Slots] = {
    "put evicts the least recently used": Slots(lambda c: c.put("d", 4), ("a", 0), "bcd"),
    "put of an existing key makes it the most recent": Slots(lambda c: c.put("a", 9), (None, 0), "bca"),
    "get refreshes recency": Slots(lambda c: c.get("a"), (1, 0), "bca"),
    "get of an absent key": Slots(lambda c: c.get("z"), (None, None), "abc"),
    "get_slot does not refresh": Slots(lambda c: (c.get_slot("a"), c.get_slot("z")), (0, None), "abc"),
    "in does not refresh": Slots(lambda c: ("a" in c, "z" in c), (True, False), "abc"),
    "remove frees the slot": Slots(lambda c: (c.remove("b"), c.next_slot()), ((True, 1), 1), "ac"),
    "remove of an absent key": Slots(lambda c: c.remove("z"), (False, None), "abc"),
    "put takes the lowest free slot": Slots(lambda c: (c.remove("c"), c.remove("a"), c.put("d", 4))[2],
                                            (None, 0), "bd"),
    "a pinned adapter is passed over": Slots(lambda c: (c.pin("a"), c.put("d", 4))[1], ("b", 1), "acd"),
    "pins are counted": Slots(lambda c: (c.pin("a"), c.pin("a"), c.unpin("a"), c.put("d", 4))[3], ("b", 1), "acd"),
    "an unpinned adapter can go again": Slots(lambda c: (c.pin("a"), c.unpin("a"), c.put("d", 4))[2], ("a", 0), "bcd"),
    "all pinned": Slots(put_pinned, "NoFreeSlot", "abc"),
    "clear": Slots(lambda c: (c.clear(), c.next_slot(), len(c))[1:], (0, 0), ""),
    "next_slot of a full cache": Slots(lambda c: c.next_slot(), None, "abc"),
    "values and items": Slots(
        lambda c: (c.values(), c.items()),
        ([(1, 0), (2, 1), (3, 2)], [("a", (1, 0)), ("b", (2, 1)), ("c", (3, 2))]), "abc",
    ),
}  # fmt: skip


@case(OWN, "slots", "as specified", SLOTS)
def slots(world: World, what: Slots) -> Got:
    cache: _LoRALRUCache[str, int] = _LoRALRUCache(3)
    given = [cache.put(key, value) for value, key in enumerate("abc", 1)]
    result = what.act(cache)
    cache.check()
    keys = "".join(cache.keys())
    right = given == [(None, 0), (None, 1), (None, 2)] and result == what.result and keys == what.keys
    return Got(f"{result}, left {keys or 'nothing'}", right)


# Section 4


class Item(NamedTuple):
    """A request of a batch, as routing sees it."""

    adapter: AdapterRef | None
    tokens: int


TRIPLES: dict[str, tuple[str, list[int], list[int], int]] = {
    "A10": ("A10", [0], [0, 10], 10),
    "A5 A5 B10": ("A5 A5 B10", [1, 0], [0, 10, 20], 20),
    "A2 A2 B2 base1": ("A2 A2 B2 base1", [1, 0], [0, 2, 6], 6),
    "A5 B4 C3 in any order with base": ("base1 A2 B4 C3 A5 base6", [2, 1, 0], [0, 3, 7, 14], 14),
    "all base": ("base3 base1", [], [0], 0),
    "one row": ("B1", [1], [0, 1], 1),
    "C alone behind base": ("base7 C2", [2], [0, 2], 2),
}


def routed(world: World, batch: str, is_sorted: bool) -> tuple[list[Item], list[Item], Any, Any]:
    """A batch in the words of the specification, as it is routed: items as given, as routed, routing, and manager."""
    engine = start_engine(world.base(), slots=3)
    for name, seed in zip("ABC", (44, 46, 47), strict=True):
        load(engine, name, world.adapter(seed=seed))
        alone(engine, name, PROMPTS[7], 1)
    refs = {name: ref_of(engine, name) for name in "ABC"}
    items = [
        Item(None, int(word[4:])) if word.startswith("base") else Item(refs[word[0]], int(word[1:]))
        for word in batch.split()
    ]
    ordered = engine.manager.sort_lora_batch(items) if is_sorted else items
    rows = [0, *itertools.accumulate(item.tokens for item in ordered)]
    return items, ordered, engine.manager.get_lora_graph_inputs(ordered, rows, "cpu"), engine.manager


def bound_triple(manager: Any, num_groups: int) -> tuple[list[int], list[int], int]:
    """What the bound routing tensors say of the first groups."""
    lora_ids, grouped, ends = manager.input_buffers()[:NUM_ROUTING_INPUTS]
    assert all(value == -1 for value in lora_ids[num_groups:].tolist()), "ids past the last group"
    return lora_ids[:num_groups].tolist(), grouped[: num_groups + 1].tolist(), int(ends[0])


@case(OWN, "the routing triple of a batch, sorted", "highest slot first, base last, groups joined", TRIPLES)
def triple(world: World, what: tuple[str, list[int], list[int], int]) -> Got:
    batch, ids, offsets, end = what
    items, ordered, routing, manager = routed(world, batch, is_sorted=True)
    found = bound_triple(manager, len(ids))
    by_slot = {slot: ref.name for slot, ref in manager.active_adapters_by_slot(ordered).items()}
    stable = [i.tokens for i in ordered if i.adapter is None] == [i.tokens for i in items if i.adapter is None]
    right = found == (ids, offsets, end) and routing.end == end and by_slot == {slot: "ABC"[slot] for slot in ids}
    return Got(f"{found}, by slot {by_slot}", right and stable)


TABLE: dict[str, tuple[list[int], list[int], int]] = {
    "A10": ([0], [0, 10], 10),
    "A5 A5 B10": ([0, 1], [0, 10, 20], 20),
    "A2 A2 B2 base1": ([0, 1], [0, 4, 6], 6),
    "C3 B4 A2 A5 base1 base6": ([2, 1, 0], [0, 3, 7, 14], 14),
    "base4": ([], [0], 0),
}


@case(OWN, "the routing triple, the specification's table as given", "as in the table", {
    batch: (batch, *expected) for batch, expected in TABLE.items()
})  # fmt: skip
def table(world: World, what: tuple[str, list[int], list[int], int]) -> Got:
    batch, ids, offsets, end = what
    _, _, routing, manager = routed(world, batch, is_sorted=False)
    found = bound_triple(manager, len(ids))
    return Got(f"{found}", found == (ids, offsets, end) and routing.end == end)


@case(OWN, "routing a request whose adapter has no slot", "KeyError that names it, never base output")
def unrouted(world: World) -> Got:
    engine = start_engine(world.base(), slots=1)
    load(engine, "a", world.adapter(seed=44))
    try:
        engine.manager.get_lora_graph_inputs([Item(ref_of(engine, "a"), 2)], [0, 2], "cpu")
    except KeyError as error:
        return contains(str(error), "'a'")
    return Got("routed", False)


SPECS: dict[str, str] = {
    "nothing": "", "only =": "=", "no path": "a=", "no name": "=/x", "a NUL": "a=\0", "a newline": "a=\n",
    "a surrogate": "a=\udcff", "100,000 characters": "a=" + "x" * 100_000, "a folder of the system": "a=/proc/self",
    "a device": "a=/dev/null",
}  # fmt: skip


@case(OWN, "load_adapter of", "a status and a message, never an exception, never a trace", SPECS)
def never_raises(world: World, spec: str) -> Got:
    response = world.engine().manager.load_adapter(spec)
    bad = (LoRAStatus.LOAD_INVALID_PATH, LoRAStatus.LOAD_INVALID_ADAPTER)
    text = words(response)
    right = response.status in bad and bool(text) and "Traceback" not in text and len(text) < 102_000
    return Got(f"{response.status.value}: {text[:90]!r}", right)


@case(OWN, "load, is_lora, is_active_lora, activate, unload, activate", "as named; KeyError for what is not loaded")
def predicates(world: World) -> Got:
    manager = start_engine(world.base(), slots=1).manager
    seen: list[Any] = []

    def look() -> None:
        seen.append((manager.is_lora("a"), manager.is_active_lora("a"), list(manager.loras)))

    look()
    response = manager.load_adapter(f"a={world.adapter(seed=44)}")
    look()
    slot = manager.activate_adapter("a")
    look()
    manager.unload_adapter("a")
    look()
    try:
        manager.activate_adapter("a")
        raised = False
    except KeyError:
        raised = True
    expected = [(False, False, []), (True, False, ["a"]), (True, True, ["a"]), (False, False, [])]
    return all_of(
        Got(f"{seen}, slot {slot}, KeyError {raised}", seen == expected and slot == 0 and raised),
        Got(words(response), words(response) == "LoRA adapter 'a' loaded successfully"),
    )


@case(OWN, "load_adapter of a path alone", "is its own name")
def path_alone(world: World) -> Got:
    engine, folder = world.engine(), world.adapter(seed=44)
    response = engine.manager.load_adapter(str(folder))
    tokens, _ = alone(engine, str(folder), PROMPTS[20])
    unload(engine, str(folder))
    return all_of(Got(words(response), response.status is LoRAStatus.SUCCESS),
                  same_tokens(world, "llama", folder, PROMPTS[20], tokens))  # fmt: skip


@case(OWN, "a Hub id with a revision, remote sources on, offline", "400 that says it is offline; nothing is left")
def offline(world: World) -> Got:
    engine = start_engine(world.base(), lora={"allow_remote": True})
    response = engine.manager.load_adapter("hub=some-org/some-adapter@v1")
    left = engine.manager.residency()
    return all_of(
        Got(response.status.value, response.status is LoRAStatus.LOAD_INVALID_PATH and left == ([], [])),
        contains(words(response), "some-org/some-adapter", "HF_HUB_OFFLINE"),
    )


@case(
    OWN,
    "symbolic_inputs, input_buffers and lora_parameters",
    "3 routing tensors, then one stack per parameter, in order",
)
def inputs(world: World) -> Got:
    decoder, _ = load_decoder(world.base("untied"), device=torch.device("cpu"), pack=False)
    manager = manager_of(world.base("untied"))
    parameters = lora_parameters(manager.wrap(decoder))
    specs, buffers = manager.symbolic_inputs(), manager.input_buffers()
    manager.bind_inputs(buffers)
    names = [spec.name for spec in specs[NUM_ROUTING_INPUTS:]]
    order = names == [f"{layer.site.name}.{kind.value}" for _, kind, layer in parameters]
    stacks = {LoRAType.A: "a", LoRAType.B: "b", LoRAType.GAIN: "gain"}
    bound = all(
        getattr(layer.stacks, stacks[kind]) is tensor
        for (_, kind, layer), tensor in zip(parameters, buffers[NUM_ROUTING_INPUTS:], strict=True)
    )
    fits = [(tuple(spec.shape), spec.dtype) for spec in specs] == [(tuple(t.shape), t.dtype) for t in buffers]
    routing = all(spec.dtype is torch.int32 for spec in specs[:NUM_ROUTING_INPUTS])
    return Got(f"{len(specs)} inputs, the stacks from {names[0]} to {names[-1]}", order and bound and fits and routing)


BINDS: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "one too few": lambda tensors: tensors[:-1],
    "one too many": lambda tensors: [*tensors, tensors[-1]],
    "none": lambda tensors: [],
    "one of another shape": lambda tensors: [*tensors[:-1], tensors[-1][:1]],
    "one of another type": lambda tensors: [*tensors[:-1], tensors[-1].double()],
}


@case(OWN, "bind_inputs with", "ValueError that says what was expected; the old ones stay bound", BINDS)
def bad_binds(world: World, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Got:
    engine, folder = world.engine(), world.adapter(seed=44)
    tensors = engine.manager.input_buffers()
    with loaded(world, engine, folder) as (name,):
        try:
            engine.manager.bind_inputs(change(tensors))
            refused = Got("bound", False)
        except ValueError as error:
            refused = contains(str(error), "expected")
        tokens, _ = alone(engine, name, PROMPTS[20])
    return all_of(refused, same_tokens(world, "llama", folder, PROMPTS[20], tokens))


@case(OWN, "bind_inputs with other tensors while adapters have slots", "they are written there; same tokens")
def rebind(world: World) -> Got:
    engine, folder = start_engine(world.base(), slots=2), world.adapter(seed=44)
    load(engine, "a", folder)
    alone(engine, "a", PROMPTS[7], 1)
    fresh = [torch.zeros_like(tensor) for tensor in engine.manager.input_buffers()]
    engine.manager.bind_inputs(fresh)
    tokens, _ = alone(engine, "a", PROMPTS[20])
    same = all(a is b for a, b in zip(fresh, engine.manager.input_buffers(), strict=True))
    filled = sum(bool(tensor.any()) for tensor in fresh[NUM_ROUTING_INPUTS:])
    return all_of(Got(f"{filled} stacks filled", same and filled >= 8),
                  same_tokens(world, "llama", folder, PROMPTS[20], tokens))  # fmt: skip


@case(OWN, "wrap of a decoder", "in place; parameter names and base output stay; lora_parameters as the inputs")
def wrap(world: World) -> Got:
    decoder, _ = load_decoder(world.base(), device=torch.device("cpu"), pack=False)
    before = list(decoder.state_dict())
    manager = manager_of(world.base())
    wrapper = manager.wrap(decoder)
    after = list(decoder.state_dict())
    parameters = lora_parameters(wrapper)
    stacks = len(manager.symbolic_inputs()) - NUM_ROUTING_INPUTS
    return Got(f"{len(after)} names, {len(parameters)} parameters, {stacks} stacks",
               before == after and len(parameters) == stacks > 0)  # fmt: skip


@case(OWN, "wrap with a target that matches nothing", "ValueError that names it")
def wrap_nothing(world: World) -> Got:
    decoder, _ = load_decoder(world.base(), device=torch.device("cpu"), pack=False)
    manager = manager_of(world.base(), (LoRATargetModule("mlp.nothing", ("up_proj",)),))
    try:
        manager.wrap(decoder)
    except ValueError as error:
        return contains(str(error), "mlp.nothing")
    return Got("wrapped", False)


@case(OWN, "lora_weight_adapter on a base checkpoint", "stacked targets joined under the prefix, the rest as is")
def weight_adapter(world: World) -> Got:
    checkpoint = read_checkpoint(world.base())
    manager = manager_of(world.base())
    converted = manager.lora_weight_adapter(lambda tensors: tensors)(checkpoint)
    key = "model.model.layers.0.self_attn.qkv_proj.weight"
    parts = [checkpoint[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"]
    joined = key in converted and torch.equal(converted[key], torch.cat(parts))
    kept = torch.equal(
        converted["model.model.layers.1.mlp.down_proj.weight"], checkpoint["model.layers.1.mlp.down_proj.weight"]
    )
    bare = "model.layers.0.self_attn.qkv_proj.weight" in manager.lora_weight_adapter(lambda t: t, "")(checkpoint)
    split = any("q_proj" in name for name in converted)
    return Got(f"{len(checkpoint)} to {len(converted)} tensors", joined and kept and bare and not split)


@case(OWN, "a warm-up with every slot full and adapters of each kind loaded", "leaves no request and no pin behind")
def warm_up(world: World) -> Got:
    folders = (world.adapter(seed=44), world.adapter(seed=13, use_dora=True))
    engine = start_engine(world.base(), slots=2, paths=tuple(f"a{i}={folder}" for i, folder in enumerate(folders)))
    engine.warm_up()
    engine.check_invariants()
    parts = [
        same_tokens(world, "llama", folder, PROMPTS[20], alone(engine, f"a{index}", PROMPTS[20])[0])
        for index, folder in enumerate(folders)
    ]
    return all_of(Got("idle", not engine.has_work()), *parts)
