"""The manager on real files and real kernels: slots, their content, routing, and batches against dense weights."""

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_core.errors import AdapterLost, AdapterNotFound, LoRADisabled
from lora_core.layers import LoRAModelWrapper, lora_parameters
from lora_core.manager import LoRAManagerV3
from lora_core.slot_write import SlotWrite
from lora_core.slots import NoFreeSlot
from lora_core.types import AdapterRef, LoRAStatus
from tests.unit.adapted_model import (
    ADAPTERS,
    PROJECTIONS,
    RANK,
    TARGETS,
    TinyModel,
    make_manager,
    merged_model,
    module_name,
    random_pairs,
    random_rows,
    save_adapter,
    save_adapters,
)


@dataclass(frozen=True)
class Row:
    """A request, as far as routing is concerned."""

    adapter: AdapterRef | None
    label: int = 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def dense() -> dict[str, TinyModel]:
    """For each adapter, the model with it merged."""
    return {name: merged_model(adapter.pairs(), adapter.alpha / adapter.rank) for name, adapter in ADAPTERS.items()}


def load(manager: LoRAManagerV3, folders: dict[str, Path], *names: str) -> list[AdapterRef]:
    for name in names:
        response = manager.load_adapter(f"{name}={folders[name]}")
        assert response.status is LoRAStatus.SUCCESS, response.message
    return [manager.acquire(name) for name in names]


def wrapped(manager: LoRAManagerV3, model: TinyModel | None = None) -> LoRAModelWrapper:
    wrapper = manager.wrap(model or TinyModel())
    manager.bind_inputs(manager.input_buffers())
    return wrapper


@torch.inference_mode()
def run(manager: LoRAManagerV3, wrapper: LoRAModelWrapper, batch: list[Row], tokens: list[int], x: Tensor) -> Tensor:
    offsets = [0, *itertools.accumulate(tokens)]
    y: Tensor = wrapper(x, routing=manager.get_lora_graph_inputs(batch, offsets, "cpu"))
    return y


@torch.inference_mode()
def assert_matches_dense(model: TinyModel, x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(y, TinyModel()(x), atol=1e-2), "the adapter made no difference"


def test_a_mixed_batch_equals_dense_weights_and_base_rows_keep_their_bits(
    folders: dict[str, Path], dense: dict[str, TinyModel]
) -> None:
    manager = make_manager(num_slots=4)
    wrapper = wrapped(manager)
    refs = load(manager, folders, *ADAPTERS)
    for ref in refs:
        manager.activate_adapter(ref)
    batch = manager.sort_lora_batch([Row(None), *(Row(ref) for ref in refs), Row(None), Row(refs[1])])
    tokens = [3, 1, 5, 2, 4, 1, 6]
    x = random_rows(sum(tokens))
    y = run(manager, wrapper, batch, tokens, x)

    plain = TinyModel()(x)
    starts = itertools.accumulate(tokens, initial=0)
    for row, start, count in zip(batch, starts, tokens, strict=False):
        rows = slice(start, start + count)
        if row.adapter is None:
            assert torch.equal(y[rows], plain[rows])
        else:
            assert_matches_dense(dense[row.adapter.name], x[rows], y[rows])


@pytest.mark.parametrize("enable_lora", [True, False])
def test_only_base_rows_give_the_bits_of_a_plain_model(folders: dict[str, Path], enable_lora: bool) -> None:
    manager = make_manager(enable_lora=enable_lora)
    wrapper = wrapped(manager)
    if enable_lora:
        manager.activate_adapter(load(manager, folders, "full")[0])
    x = random_rows(9)
    y = run(manager, wrapper, [Row(None), Row(None)], [4, 5], x)
    assert torch.equal(y, TinyModel()(x))


def test_a_slot_changes_hands_and_nothing_of_the_old_adapter_stays(
    folders: dict[str, Path], dense: dict[str, TinyModel]
) -> None:
    manager = make_manager(num_slots=1)
    wrapper = wrapped(manager)
    x = random_rows(3)
    for ref in load(manager, folders, "wide", "partial", "second", "full", "second"):
        assert manager.activate_adapter(ref) == 0
        assert_matches_dense(dense[ref.name], x, run(manager, wrapper, [Row(ref)], [3], x))


def test_slots_are_written_once_per_assignment(folders: dict[str, Path]) -> None:
    manager = make_manager(num_slots=2)
    wrapper = wrapped(manager)
    refs = load(manager, folders, "full", "partial", "second")
    for ref in refs[:2]:
        manager.activate_adapter(ref)
    stacks = manager.input_buffers()[3:]
    for stack in stacks:
        stack.fill_(7.0)
    for ref in refs[:2]:
        manager.activate_adapter(ref)
    run(manager, wrapper, manager.sort_lora_batch([Row(refs[0]), Row(refs[1])]), [1, 1], random_rows(2))
    assert all(torch.equal(stack, torch.full_like(stack, 7.0)) for stack in stacks)

    # The least recently used one goes; the other slot is not touched.
    manager.activate_adapter(refs[1])
    assert manager.activate_adapter(refs[2]) == 0
    assert all(torch.equal(stack[1], torch.full_like(stack[1], 7.0)) for stack in stacks)
    assert not any(torch.equal(stack[0], torch.full_like(stack[0], 7.0)) for stack in stacks[12:14])


def test_the_layout_of_stacks(folders: dict[str, Path]) -> None:
    manager = make_manager(num_slots=3)
    wrapped(manager)
    refs = load(manager, folders, "full", "partial")
    slots = [manager.activate_adapter(ref) for ref in refs]
    a, b = manager.input_buffers()[3:5]
    pairs = ADAPTERS["partial"].pairs()
    q_a, q_b = pairs[module_name(0, "q_proj")]
    k_a, k_b = pairs[module_name(0, "k_proj")]
    expected_a, expected_b = torch.zeros(3 * RANK, 16), torch.zeros(32, RANK)
    expected_a[:2], expected_a[RANK : RANK + 2] = q_a, k_a
    expected_b[:16, :2], expected_b[16:24, :2] = 3.0 * q_b, 3.0 * k_b
    assert torch.equal(a[slots[1]], expected_a)
    torch.testing.assert_close(b[slots[1]], expected_b)
    assert not a[2].any()


def test_adapters_activated_before_the_tensors_are_bound_are_written_when_they_are(
    folders: dict[str, Path], dense: dict[str, TinyModel]
) -> None:
    manager = make_manager()
    (ref,) = load(manager, folders, "full")
    manager.activate_adapter(ref)
    manager.bind_inputs(manager.input_buffers())
    wrapper = manager.wrap(TinyModel())
    x = random_rows(3)
    assert_matches_dense(dense["full"], x, run(manager, wrapper, [Row(ref)], [3], x))

    # Other tensors, with anything in them.
    (partial,) = load(manager, folders, "partial")
    manager.activate_adapter(partial)
    manager.bind_inputs([torch.full(spec.shape, 9, dtype=spec.dtype) for spec in manager.symbolic_inputs()])
    for given in (ref, partial):
        assert_matches_dense(dense[given.name], x, run(manager, wrapper, [Row(given)], [3], x))


def test_slots_are_written_in_and_out_of_inference_mode(folders: dict[str, Path], dense: dict[str, TinyModel]) -> None:
    manager = make_manager(num_slots=1)
    with torch.inference_mode():
        wrapper = wrapped(manager)
        full, wide = load(manager, folders, "full", "wide")
        manager.activate_adapter(full)
    manager.activate_adapter(wide)
    x = random_rows(3)
    assert_matches_dense(dense["wide"], x, run(manager, wrapper, [Row(wide)], [3], x))


def test_a_failed_write_leaves_no_slot_behind(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(num_slots=1)
    wrapped(manager)
    full, wide = load(manager, folders, "full", "wide")
    manager.activate_adapter(full)

    def fail(self: SlotWrite, budget_s: float | None) -> bool:
        raise RuntimeError("device lost")

    monkeypatch.setattr(SlotWrite, "advance", fail)
    for put in (manager.activate_adapter, manager.prepare):
        with pytest.raises(AdapterLost, match="RuntimeError: device lost"):
            put(wide)
        assert manager.can_activate(wide)
        assert not manager.is_writing
        manager.check()
    assert manager.slot_of(wide) is None
    manager.check()


def test_stacks_have_the_bases_data_type(folders: dict[str, Path], dense: dict[str, TinyModel]) -> None:
    manager = make_manager(base_dtype=torch.bfloat16)
    wrapper = wrapped(manager, TinyModel().bfloat16())
    (ref,) = load(manager, folders, "full")
    manager.activate_adapter(ref)
    dtypes = [stack.dtype for stack in manager.input_buffers()[3:]]
    assert set(zip(dtypes[::3], dtypes[1::3], dtypes[2::3], strict=True)) == {
        (torch.bfloat16, torch.bfloat16, torch.float32)
    }, "A, B and the gain"
    x = random_rows(4).bfloat16()
    y = run(manager, wrapper, [Row(ref), Row(None)], [2, 2], x)
    with torch.inference_mode():
        expected = dense["full"](x[:2].float())
        assert (y[:2].float() - expected).norm() < 0.03 * expected.norm()
        assert torch.equal(y[2:], TinyModel().bfloat16()(x)[2:])


def test_requests_keep_the_weights_they_were_admitted_with(tmp_path: Path) -> None:
    manager = make_manager()
    wrapper = wrapped(manager)
    old_pairs, new_pairs = random_pairs(0, 2), random_pairs(1, 2)
    folder = save_adapter(tmp_path / "adapter", old_pairs, 2.0)
    manager.load_adapter(f"a={folder}")
    old = manager.acquire("a")
    manager.activate_adapter(old)
    manager.pin(old)

    assert "1 request(s) in progress" in manager.unload_adapter("a").message
    assert not manager.is_lora("a")
    with pytest.raises(AdapterNotFound):
        manager.acquire("a")
    save_adapter(folder, new_pairs, 2.0)
    assert manager.load_adapter(f"a={folder}").status is LoRAStatus.SUCCESS
    new = manager.acquire("a")
    assert new != old
    assert not manager.is_active_lora("a")
    manager.activate_adapter("a")
    assert manager.is_active_lora("a")

    x = random_rows(4)
    batch = manager.sort_lora_batch([Row(old), Row(new)])
    assert manager.active_adapters_by_slot(batch) == {1: new, 0: old}
    y = run(manager, wrapper, batch, [2, 2], x)
    assert_matches_dense(merged_model(new_pairs, 1.0), x[:2], y[:2])
    assert_matches_dense(merged_model(old_pairs, 1.0), x[2:], y[2:])

    manager.unpin(old)
    manager.release(old)
    assert manager.slot_of(old) is None
    assert manager.residency() == ([new], [new])
    with pytest.raises(KeyError, match="not loaded"):
        manager.activate_adapter(old)


def test_loads_and_unloads_while_another_thread_decodes(folders: dict[str, Path], dense: dict[str, TinyModel]) -> None:
    manager = make_manager(num_slots=2)
    wrapper = wrapped(manager)
    (ref,) = load(manager, folders, "full")
    manager.activate_adapter(ref)
    manager.pin(ref)
    stop = threading.Event()

    def churn() -> int:
        count = 0
        while not stop.is_set():
            manager.load_adapter(f"wide={folders['wide']}")
            manager.unload_adapter("wide")
            count += 1
        return count

    x = random_rows(5)
    with torch.inference_mode():
        expected = dense["full"](x)
    with ThreadPoolExecutor(1) as pool:
        churning = pool.submit(churn)
        for _ in range(150):
            if manager.is_lora("wide"):
                with contextlib.suppress(KeyError):  # unloaded between the two calls
                    manager.activate_adapter("wide")
            y = run(manager, wrapper, [Row(ref)], [5], x)
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
            manager.check()
        stop.set()
        assert churning.result(30) > 0


def test_500_cycles_leave_nothing_behind(folders: dict[str, Path]) -> None:
    manager = make_manager(num_slots=2)
    wrapped(manager)
    for _ in range(500):
        (ref,) = load(manager, folders, "partial")
        manager.activate_adapter(ref)
        manager.unload_adapter("partial")
        manager.release(ref)
    assert manager.loras == {}
    assert manager.residency() == ([], [])
    assert manager.active_adapters_by_slot([Row(ref)]) == {}
    manager.check()


def test_slots_follow_pins_and_use(folders: dict[str, Path]) -> None:
    manager = make_manager(num_slots=2)
    wrapper = wrapped(manager)
    full, wide, partial = load(manager, folders, "full", "wide", "partial")
    assert [manager.activate_adapter(ref) for ref in (full, wide)] == [0, 1]
    # A decode step through `full` makes `wide` the one to go.
    run(manager, wrapper, [Row(full)], [1], random_rows(1))
    manager.pin(full)
    assert manager.activate_adapter(partial) == 1
    manager.pin(partial)
    assert manager.can_activate(full)
    assert not manager.can_activate(wide)
    with pytest.raises(NoFreeSlot):
        manager.activate_adapter(wide)
    manager.unpin(full)
    assert manager.can_activate(wide)
    assert manager.activate_adapter("wide") == 0
    assert manager.residency() == ([wide, partial], [full, wide, partial])
    with pytest.raises(KeyError, match="'absent' is not loaded"):
        manager.activate_adapter("absent")


def test_sorting_is_by_falling_slot_stable_and_base_last(folders: dict[str, Path]) -> None:
    manager = make_manager(num_slots=3)
    a, b, c = load(manager, folders, "full", "wide", "partial")
    for ref in (a, b, c):
        manager.activate_adapter(ref)
    batch = [Row(ref, label) for label, ref in enumerate([None, a, c, None, a, b, c])]
    assert [row.label for row in manager.sort_lora_batch(batch)] == [2, 6, 5, 1, 4, 0, 3]
    assert manager.sort_lora_batch([]) == []


@pytest.mark.parametrize(
    ("batch", "lora_ids", "grouped_offsets"),
    [
        ([("full", 10)], [0, -1, -1], [0, 10, 10, 10]),
        ([("full", 5), ("full", 5), ("wide", 10)], [0, 1, -1], [0, 10, 20, 20]),
        ([("full", 2), ("full", 2), ("wide", 2), (None, 1)], [0, 1, -1], [0, 4, 6, 6]),
        (
            [("partial", 3), ("wide", 4), ("full", 2), ("full", 5), (None, 1), (None, 6)],
            [2, 1, 0],
            [0, 3, 7, 14],
        ),
        ([(None, 2), (None, 3)], [-1, -1, -1], [0, 0, 0, 0]),
    ],
)
def test_the_routing_of_a_batch(
    folders: dict[str, Path], batch: list[tuple[str | None, int]], lora_ids: list[int], grouped_offsets: list[int]
) -> None:
    manager = make_manager(num_slots=3)
    refs = dict(zip(("full", "wide", "partial"), load(manager, folders, "full", "wide", "partial"), strict=True))
    for ref in refs.values():
        manager.activate_adapter(ref)
    buffers = manager.input_buffers()
    manager.bind_inputs(buffers)
    rows = [Row(None if name is None else refs[name]) for name, _ in batch]
    offsets = [0, *itertools.accumulate(tokens for _, tokens in batch)]
    routing = manager.get_lora_graph_inputs(rows, offsets, "cpu")
    assert routing.end == grouped_offsets[-1]
    assert routing.slot_ranks == (4, 8, 2)
    for ids, bounds in ((routing.lora_ids, routing.grouped_offsets), (buffers[0], buffers[1])):
        assert ids.tolist() == lora_ids
        assert bounds.tolist() == grouped_offsets
    assert buffers[2].tolist() == [routing.end]


def test_a_request_is_never_routed_to_the_base_silently(folders: dict[str, Path]) -> None:
    manager = make_manager()
    (ref,) = load(manager, folders, "full")
    for batch in ([Row(ref)], [Row(None), Row(ref)]):
        with pytest.raises(KeyError, match=r"'full'.*has no slot"):
            manager.get_lora_graph_inputs(batch, list(range(len(batch) + 1)), "cpu")
    manager.activate_adapter(ref)
    with pytest.raises(ValueError, match="sort_lora_batch"):
        manager.get_lora_graph_inputs([Row(None), Row(ref)], [0, 1, 2], "cpu")
    with pytest.raises(ValueError, match="2 entries for 2 requests"):
        manager.get_lora_graph_inputs([Row(ref), Row(None)], [0, 1], "cpu")
    with pytest.raises(ValueError, match="257 token rows, max_lora_seq_len is 256"):
        manager.get_lora_graph_inputs([Row(ref)], [0, 257], "cpu")


def test_lora_off() -> None:
    manager = make_manager(enable_lora=False, projections={})
    for response in (manager.load_adapter("a=b"), manager.unload_adapter("a")):
        assert response.status in (LoRAStatus.LOAD_ERROR, LoRAStatus.UNLOAD_ERROR)
        assert "enable_lora" in response.message
    with pytest.raises(LoRADisabled, match="enable_lora"):
        manager.acquire("a")
    batch = [Row(None, 1), Row(None, 2)]
    assert manager.sort_lora_batch(batch) == batch
    assert manager.get_lora_graph_inputs(batch, [0, 3, 4], "cpu").end == 0
    ghost = Row(AdapterRef("ghost", 1))
    with pytest.raises(KeyError, match="ghost"):
        manager.get_lora_graph_inputs([ghost], [0, 1], "cpu")
    model = TinyModel()
    wrapped(manager, model)
    assert lora_parameters(model) == []
    assert len(manager.symbolic_inputs()) == 3


def test_inputs_are_checked_one_by_one() -> None:
    manager = make_manager()
    wrapper = manager.wrap(TinyModel())
    specs, buffers = manager.symbolic_inputs(), manager.input_buffers()
    assert [(tuple(t.shape), t.dtype) for t in buffers] == [(spec.shape, spec.dtype) for spec in specs]
    names = [f"{name.removeprefix('model.model.')}.{kind.value}" for name, kind, _ in lora_parameters(wrapper)]
    assert [spec.name for spec in specs] == ["lora_ids", "lora_grouped_offsets", "lora_end", *names]
    with pytest.raises(ValueError, match="26 LoRA inputs given, expected 27: 3 routing tensors and 24 stacks"):
        manager.bind_inputs(buffers[:-1])
    with pytest.raises(ValueError, match=r"'layers.0.self_attn.qkv_proj.lora_A' has .*float16"):
        manager.bind_inputs([*buffers[:3], buffers[3].half(), *buffers[4:]])
    with pytest.raises(ValueError, match=r"'layers\.0\.self_attn\.qkv_proj\.lora_A'"):
        manager.bind_inputs([*buffers[:3], buffers[4], buffers[3], *buffers[5:]])
    manager.bind_inputs(buffers)
    assert all(bound is given for bound, given in zip(manager.input_buffers(), buffers, strict=True))


def test_the_weight_adapter_gives_the_wrapped_models_state() -> None:
    model = TinyModel()
    checkpoint = {}
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        target = next(target for target in TARGETS if stem.endswith(target.path))
        parts = tensor.split([PROJECTIONS[p][0] for p in target.projections])
        for projection, part in zip(target.projections, parts, strict=True):
            checkpoint[f"{stem.rpartition('.')[0]}.{projection}.{suffix}"] = part.clone()
    manager = make_manager()
    wrapper = manager.wrap(TinyModel())
    for parameter in wrapper.parameters():
        torch.nn.init.zeros_(parameter)
    wrapper.load_state_dict(manager.lora_weight_adapter(lambda tensors: tensors)(checkpoint))
    x = random_rows(2)
    assert torch.equal(wrapper(x), model(x))
    bare = manager.lora_weight_adapter(lambda tensors: tensors, wrapper_prefix="")(checkpoint)
    assert bare.keys() == model.state_dict().keys()
