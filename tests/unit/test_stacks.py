"""Slots: what a write leaves in them, when layers see it, and what it does not touch."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import Routing, build_routing
from lora_core import slot_write
from lora_core.inputs import LoRAInputs
from lora_core.layers import LoRAModelWrapper, RoutingContext, lora_layers
from lora_core.module_weights import ModuleWeights
from lora_core.stacks import SlotStacks
from lora_core.wrapping import wrap_targets
from tests.unit.adapted_model import (
    ALL_MODULES,
    HIDDEN,
    LM_MODULES,
    LM_SITES,
    VOCABULARY,
    HostAdapter,
    TinyLM,
    host_adapter,
    module_name,
)

NUM_SLOTS, RANK = 3, 12
CPU = torch.device("cpu")
ATTENTION = tuple(module_name(layer, f"{p}_proj") for layer in range(2) for p in "qkvo")

ADAPTERS = {
    "everything": host_adapter(0, 12),
    "narrow": host_adapter(1, 3, ("embed_tokens", "lm_head", module_name(0, "k_proj"), module_name(1, "up_proj"))),
    "dora": host_adapter(2, 5, LM_MODULES, gains=LM_MODULES),
    "attention": host_adapter(3, 8, ATTENTION),
    "some gains": host_adapter(4, 1, ALL_MODULES, gains=(module_name(0, "v_proj"), module_name(1, "down_proj"))),
    "embedding": host_adapter(5, 2, ("embed_tokens",), gains=("embed_tokens",)),
    "head": host_adapter(6, 9, ("lm_head",)),
    "nothing": host_adapter(7, 4, ()),
}


class Server:
    """A wrapped `TinyLM` with bound slots."""

    def __init__(self, *, tied: bool = False, tensors: Sequence[Tensor] | None = None) -> None:
        self.model = TinyLM(tied=tied)
        context = RoutingContext()
        wrap_targets(self.model, LM_SITES, context)
        self.wrapper = LoRAModelWrapper(self.model, context)
        self.stacks = SlotStacks(LM_SITES, NUM_SLOTS, RANK, torch.float32)
        self.inputs = LoRAInputs(self.stacks, NUM_SLOTS, CPU)
        self.inputs.bind_model(self.model)
        self.inputs.bind(self.inputs.buffers() if tensors is None else tensors, [])
        self.ranks = [0] * NUM_SLOTS

    def put(self, slot: int, name: str) -> None:
        self.inputs.write(slot, ADAPTERS[name])
        self.ranks[slot] = ADAPTERS[name].rank

    def routing(self, groups: Sequence[tuple[int, int]], num_rows: int) -> Routing:
        offsets = [0]
        for _, rows in groups:
            offsets.append(offsets[-1] + rows)
        slots = [slot for slot, _ in groups]
        return build_routing(slots, offsets, self.ranks, num_rows=num_rows, max_groups=NUM_SLOTS, device=CPU)

    def logits(self, ids: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.wrapper(ids, routing=self.routing(groups, len(ids)))
        return logits

    def content(self, slot: int) -> list[Tensor]:
        return [tensor[slot].clone() for tensor in self.inputs.buffers()[3:]]

    def live(self, slot: int) -> list[str]:
        return [layer.site.name for _, layer in lora_layers(self.model) if slot in layer.live_slots]


def tokens(num_rows: int) -> Tensor:
    return torch.arange(num_rows) * 7 % VOCABULARY


def assert_holds(server: Server, slot: int, name: str) -> None:
    """The slot is what a write into fresh zeros makes of it, tensor by tensor."""
    fresh = Server()
    fresh.put(slot, name)
    for spec, found, expected in zip(server.inputs.specs[3:], server.content(slot), fresh.content(slot), strict=True):
        assert torch.equal(found, expected), f"{spec.name} after {name}"
    assert server.live(slot) == fresh.live(slot)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "names",
    [
        ("everything", "narrow", "dora"),
        ("attention", "some gains", "embedding"),
        ("head", "nothing", "embedding"),
        ("dora", "everything", "head"),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [(1, 1, 1), (2, 5, 1), (20, 3, 70)], ids=str)
def test_rows_of_a_mixed_batch_equal_dense_weights(names: tuple[str, ...], rows: tuple[int, ...], tied: bool) -> None:
    server, plain = Server(tied=tied), TinyLM(tied=tied)
    for slot, name in enumerate(names):
        server.put(slot, name)
    groups = [(slot, rows[slot]) for slot in (2, 1, 0)]
    end = sum(rows)
    ids = tokens(end + 3)
    logits = server.logits(ids, groups)
    start = 0
    for slot, num_rows in groups:
        part = slice(start, start + num_rows)
        with torch.inference_mode():
            expected = ADAPTERS[names[slot]].merged(tied=tied)(ids[part])
        torch.testing.assert_close(logits[part], expected, rtol=1e-4, atol=1e-4)
        start += num_rows
    with torch.inference_mode():
        assert torch.equal(logits[end:], plain(ids)[end:])


def test_a_tied_weight_stays_one_and_as_it_was() -> None:
    server, plain = Server(tied=True), TinyLM(tied=True)
    server.put(0, "dora")
    server.logits(tokens(9), [(0, 9)])
    head, embedding = server.model.lm_head, server.model.model.embed_tokens
    assert head.weight is embedding.weight
    assert torch.equal(head.weight, plain.lm_head.weight)
    assert list(server.model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in server.model.named_parameters()] == [name for name, _ in plain.named_parameters()]


@pytest.mark.parametrize("last", ADAPTERS)
@pytest.mark.parametrize("first", ["everything", "dora", "some gains", "nothing"])
def test_nothing_of_an_earlier_occupant_stays(first: str, last: str) -> None:
    server = Server()
    server.put(1, first)
    server.put(1, last)
    assert_holds(server, 1, last)
    assert all(not tensor.any() for slot in (0, 2) for tensor in server.content(slot))


@pytest.mark.parametrize("name", ["everything", "narrow", "embedding"])
def test_what_bound_tensors_hold_is_cleared(name: str) -> None:
    specs = SlotStacks(LM_SITES, NUM_SLOTS, RANK, torch.float32).specs
    stacks = [torch.full(spec.shape, float("nan")) for spec in specs]
    routing = [torch.zeros(n, dtype=torch.int32) for n in (NUM_SLOTS, NUM_SLOTS + 1, 1)]
    server = Server(tensors=[*routing, *stacks])
    server.put(1, name)
    assert_holds(server, 1, name)


def test_zeros_that_were_handed_out_are_not_written_again() -> None:
    stacks = SlotStacks(LM_SITES, NUM_SLOTS, RANK, torch.float32)
    inputs = LoRAInputs(stacks, NUM_SLOTS, CPU)
    inputs.bind(inputs.buffers(), [])
    assert inputs.begin_write(0, ADAPTERS["head"]).num_bytes_left == 9 * (HIDDEN + VOCABULARY) * 4

    touched = LoRAInputs(SlotStacks(LM_SITES, NUM_SLOTS, RANK, torch.float32), NUM_SLOTS, CPU)
    buffers = touched.buffers()
    buffers[-1][0, 0] = 1.0
    touched.bind(buffers, [])
    slot_bytes = sum(tensor[0].nbytes for tensor in buffers[3:])
    assert touched.begin_write(0, ADAPTERS["head"]).num_bytes_left == slot_bytes
    # Bound tensors are not new ones, also if they are bound a second time.
    inputs.write(1, ADAPTERS["everything"])
    inputs.bind(inputs.buffers(), [])
    assert inputs.begin_write(1, ADAPTERS["head"]).num_bytes_left == slot_bytes


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux how much memory is in use")
def test_slots_take_memory_as_they_are_filled() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    # 64 slots of 15 MB each.
    site = replace(LM_SITES[0], in_features=50_000, slices=(8192,))
    inputs = LoRAInputs(SlotStacks([site], 64, 64, torch.float32), 64, CPU)
    inputs.bind(inputs.buffers(), [])
    weights = ModuleWeights(torch.ones(50_000, 64), torch.ones(8192, 64), None)
    inputs.write(3, HostAdapter(64, {"embed_tokens": weights}))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in inputs.buffers())
    # All slots would be 960 MB; some of the growth may be other tests' threads.
    assert resident_bytes() - before < 300_000_000


def test_only_modules_that_change_are_written() -> None:
    server = Server()
    sizes = []
    for name in ("head", "head", "attention", "head", "nothing", "nothing"):
        write = server.inputs.begin_write(0, ADAPTERS[name])
        sizes.append(write.num_bytes_left // 4)
        assert write.advance(None)
        assert write.num_bytes_left == 0
    head = 9 * (HIDDEN + VOCABULARY)
    attention = sum(8 * (m.a.shape[1] + m.b.shape[0]) for m in ADAPTERS["attention"].modules.values())
    assert sizes == [head, head, head + attention, head + attention, head, 0]


def test_layers_are_live_where_the_adapter_is() -> None:
    server = Server()
    server.put(0, "attention")
    server.put(2, "embedding")
    attention = [f"layers.{layer}.self_attn.{path}" for layer in range(2) for path in ("qkv_proj", "o_proj")]
    assert server.live(0) == attention
    assert server.live(1) == []
    assert server.live(2) == ["embed_tokens"]
    gains = [layer.site.name for _, layer in lora_layers(server.model) if layer.stacks and 2 in layer.stacks.gain_slots]
    assert gains == ["embed_tokens"]
    server.put(0, "nothing")
    assert server.live(0) == []


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Writes look at the clock every few rows."""
    monkeypatch.setattr(slot_write, "_CHUNK_BYTES", 200)
    return 200


def test_a_write_in_pieces_disturbs_no_step_and_shows_when_it_is_complete(small_chunks: int) -> None:
    server = Server()
    server.put(0, "dora")
    server.put(1, "everything")
    ids = tokens(7)
    before = server.logits(ids, [(0, 5)])
    write = server.inputs.begin_write(1, ADAPTERS["some gains"])
    server.ranks[1] = ADAPTERS["some gains"].rank
    left = [write.num_bytes_left]
    while not write.advance(0.0):
        assert server.live(1) == []
        left.append(write.num_bytes_left)
        assert torch.equal(server.logits(ids, [(0, 5)]), before)
    assert len(left) > 30
    # A chunk ends with the row that fills it.
    assert max(a - b for a, b in pairwise(left)) < 3 * small_chunks
    assert left == sorted(left, reverse=True)
    assert write.advance(0.0)
    assert_holds(server, 1, "some gains")
    assert torch.equal(server.logits(ids, [(0, 5)]), before)


def test_an_abandoned_write_ends_and_the_next_one_covers_the_slot(small_chunks: int) -> None:
    server = Server()
    server.put(1, "dora")
    first = server.inputs.begin_write(1, ADAPTERS["everything"])
    for _ in range(9):
        first.advance(0.0)
    second = server.inputs.begin_write(1, ADAPTERS["narrow"])
    content = server.content(1)
    with pytest.raises(RuntimeError, match="abandoned"):
        first.advance(None)
    assert all(torch.equal(a, b) for a, b in zip(content, server.content(1), strict=True))
    assert server.live(1) == []
    assert second.advance(None)
    assert_holds(server, 1, "narrow")


def test_random_writes_and_abandoned_ones_leave_exactly_the_last(small_chunks: int) -> None:
    generator = torch.Generator().manual_seed(3)
    server, names = Server(), list(ADAPTERS)
    for _ in range(25):
        choice, steps = torch.randint(0, 1000, (2,), generator=generator).tolist()
        write = server.inputs.begin_write(choice % 2, ADAPTERS[names[choice % len(names)]])
        for _ in range(steps % 20):
            write.advance(0.0)
        if steps % 3 == 0:
            write.advance(None)
    for slot, name in enumerate(("narrow", "attention")):
        server.put(slot, name)
        assert_holds(server, slot, name)


def test_the_budget_ends_a_call(monkeypatch: pytest.MonkeyPatch, small_chunks: int) -> None:
    server = Server()
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 0.001)
    write = server.inputs.begin_write(0, ADAPTERS["everything"])
    total = write.num_bytes_left
    # The first look at the clock starts the budget; each chunk is followed by another.
    assert not write.advance(0.0035)
    assert 4 * small_chunks <= total - write.num_bytes_left < 4 * 3 * small_chunks


@pytest.mark.parametrize(("budget_s", "is_complete"), [(0.05, True), (0.008, False)])
def test_a_step_that_wrote_for_most_of_its_time_completes_no_slot(
    monkeypatch: pytest.MonkeyPatch, small_chunks: int, budget_s: float, is_complete: bool
) -> None:
    server = Server()
    ticks = count()
    write = server.inputs.begin_write(0, ADAPTERS["narrow"])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 0.001)
    assert write.advance(budget_s) is is_complete
    spent_s = (next(ticks) - 1) * 0.001
    assert 0.004 < spent_s < 0.008
    assert write.num_bytes_left == 0
    assert (server.live(0) != []) is is_complete
    assert write.advance(budget_s)
    assert_holds(server, 0, "narrow")


@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_ranks_of_a_slot_change_from_adapter_to_adapter(in_inference_mode: bool) -> None:
    server = Server()
    names = ("attention", "dora", "everything", "attention", "attention", "narrow", "dora")
    for index, name in enumerate(names):
        with torch.inference_mode((index % 2 == 1) == in_inference_mode):
            server.put(0, name)
        assert_holds(server, 0, name)


def test_an_adapter_that_does_not_fit_is_refused_and_the_slot_stays() -> None:
    server = Server()
    server.put(0, "everything")
    name = module_name(0, "k_proj")
    a, b, _ = ADAPTERS["everything"].modules[name]
    misfits: dict[str, ModuleWeights] = {
        "B of another width": ModuleWeights(a, b[:1], None),
        "A of another rank": ModuleWeights(a[:3], b, None),
        "a gain of one value": ModuleWeights(a, b, torch.zeros(1)),
        "a rank past the slot's": ModuleWeights(a.repeat(2, 1), b.repeat(1, 2), None),
    }
    for weights in misfits.values():
        with pytest.raises(ValueError, match=rf"{name} has tensors .*rank up to 12"):
            server.inputs.begin_write(0, HostAdapter(12, {name: weights}))
    assert_holds(server, 0, "everything")


def test_before_there_are_tensors_a_write_is_left_to_bind() -> None:
    stacks = SlotStacks(LM_SITES, NUM_SLOTS, RANK, torch.float32)
    inputs = LoRAInputs(stacks, NUM_SLOTS, CPU)
    assert inputs.begin_write(0, ADAPTERS["head"]).advance(0.0)
    inputs.bind(inputs.buffers(), [(0, ADAPTERS["head"])])
    assert stacks.bound[-1].live_slots == {0}


def test_bf16_adapters_fill_fp32_slots() -> None:
    server, name = Server(), module_name(1, "down_proj")
    weights = ADAPTERS["everything"].modules[name]
    half = ModuleWeights(weights.a.bfloat16(), weights.b.bfloat16(), None)
    server.inputs.write(0, HostAdapter(12, {name: half}))
    index = next(index for index, site in enumerate(LM_SITES) if name in site.modules)
    assert torch.equal(server.stacks.bound[index].a[0], half.a.float())
    assert torch.equal(server.stacks.bound[index].b[0], half.b.float())
