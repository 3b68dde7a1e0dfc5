"""bf16 copies of slots are never old ones, take bounded memory, and go with their stacks."""

import gc
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import sgmv_cpu
from kernels.bf16_copies import Bf16Copies, Bf16Weights
from tests.kernels.cases import Case, make_case

SLICES = (24, 8)
RANKS = (12, 9, 12)
LARGE = 1 << 30


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Bf16Copies:
    """Empty ones, which `sgmv` uses for every long bf16 group, on any processor."""
    copies = Bf16Copies(LARGE)
    monkeypatch.setattr(sgmv_cpu, "_BF16_COPIES", copies)
    monkeypatch.setattr(sgmv_cpu, "_has_fast_bf16", lambda: True)
    monkeypatch.setattr(sgmv_cpu, "_pays_in_bf16", lambda *_: True)
    return copies


def long_case(seed: int = 0) -> Case:
    return make_case(
        [(2, 80), (1, 87), (0, 81)],
        ranks=RANKS,
        max_rank=12,
        in_features=16,
        slices=SLICES,
        dtype=torch.bfloat16,
        base_rows=2,
        device=torch.device("cpu"),
        seed=seed,
    )


def stacks(seed: int = 0) -> tuple[Tensor, Tensor]:
    case = long_case(seed)
    return case.a_stack, case.b_stack


def weights_of(copies: Bf16Copies, a: Tensor, b: Tensor, slot: int) -> Bf16Weights:
    found = copies.of(a, b, SLICES)
    rank = RANKS[slot]
    return found.find(slot, rank) or copies.add(found, a, b, slot, rank, SLICES)


def assert_equal(found: Bf16Weights, a: Tensor, b: Tensor, slot: int) -> None:
    expected = Bf16Weights.of(a, b, slot, RANKS[slot], SLICES)
    assert torch.equal(found.a, expected.a)
    for part, expected_part in zip(found.b, expected.b, strict=True):
        assert torch.equal(part, expected_part)


@pytest.mark.parametrize("rank", [1, 3, 4, 16])
@pytest.mark.parametrize(
    "slices",
    [pytest.param((24,), id="one"), pytest.param((24, 8, 40), id="block"), pytest.param((20000, 10000), id="large")],
)
def test_a_copy_holds_the_true_ranks_of_its_slot(slices: tuple[int, ...], rank: int) -> None:
    a, b = torch.randn(2, len(slices) * 16, 5), torch.randn(2, sum(slices), 16)
    weights = Bf16Weights.of(a, b, 1, rank, slices)
    column = 0
    for index, (part, width) in enumerate(zip(weights.b, slices, strict=True)):
        first = index * rank
        assert torch.equal(weights.a[:, first : first + rank].t(), a[1, index * 16 : index * 16 + rank].bfloat16())
        assert torch.equal(part.t(), b[1, column : column + width, :rank].bfloat16())
        if weights.block is not None:
            rest = weights.block[:, column : column + width].clone()
            assert torch.equal(rest[first : first + rank], part)
            rest[first : first + rank] = 0
            assert not rest.any()
        column += width
    assert (weights.block is None) is (len(slices) == 1 or sum(slices) * rank > 28_000)


def test_copies_are_kept_from_call_to_call(copies: Bf16Copies) -> None:
    case = long_case()
    case.check()
    # The first use of a slot is not enough for a copy of it.
    assert copies.num_bytes == 0
    case.check()
    kept = [copies.of(case.a_stack, case.b_stack, SLICES).find(slot, rank) for slot, rank in enumerate(RANKS)]
    assert None not in kept
    with torch.inference_mode():
        case.check()
    again = [copies.of(case.a_stack, case.b_stack, SLICES).find(slot, rank) for slot, rank in enumerate(RANKS)]
    assert all(one is other for one, other in zip(kept, again, strict=True))


def _narrow(a: Tensor, b: Tensor) -> None:
    a[1].narrow(0, 1, 1).narrow(1, 3, 2).fill_(5)


def _narrow_b(a: Tensor, b: Tensor) -> None:
    b[1].narrow(0, 20, 8).fill_(1)


def _foreach(a: Tensor, b: Tensor) -> None:
    # As slots are written, in pieces.
    torch._foreach_copy_([a[1, :2], b[1, :, :1]], [torch.ones(2, 16), torch.ones(32, 1)], non_blocking=True)
    torch._foreach_zero_([a[1, 4:6]])


def _whole(a: Tensor, b: Tensor) -> None:
    b[1].copy_(torch.ones_like(b[1]))


def _detached(a: Tensor, b: Tensor) -> None:
    a.detach()[1].view(-1)[1] = 3


def _old_view(a: Tensor, b: Tensor) -> Callable[[], object]:
    part = a[1].narrow(0, 0, 2)
    return lambda: part.fill_(2)


def _set_data(a: Tensor, b: Tensor) -> None:
    a.data = torch.ones_like(a)


WRITES = (_narrow, _narrow_b, _foreach, _whole, _detached, _old_view, _set_data)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_written_slot_is_copied_anew(
    write: Callable[[Tensor, Tensor], Callable[[], object] | None],
    in_thread: bool,
    mode: Callable[[], torch.no_grad],
    copies: Bf16Copies,
) -> None:
    case = long_case()
    if write is _old_view:
        # The view is older than the copy.
        prepared = write(case.a_stack, case.b_stack)
        assert prepared is not None
        change = prepared
    else:

        def change() -> object:
            return write(case.a_stack, case.b_stack)

    case.check()
    before = case.result()
    assert copies.num_bytes > 0

    def run() -> None:
        with mode():
            change()

    if in_thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    for inside in (mode, torch.no_grad, torch.inference_mode):
        with inside():
            case.check()
    assert not torch.equal(case.result()[80:167], before[80:167])


def test_every_piece_of_a_write_makes_the_copies_old_ones(copies: Bf16Copies) -> None:
    case = long_case()
    for row in range(case.a_stack.shape[1]):
        # Twice: the first use makes no copy.
        case.check()
        case.check()
        case.a_stack[0, row].neg_()
        case.check()
        case.check()
        assert copies.num_bytes > 0
        case.b_stack[0, row : row + 1].neg_()


def test_a_write_during_the_copy_is_noticed() -> None:
    """What was copied in between is not found by the next operation."""
    copies, (a, b) = Bf16Copies(LARGE), stacks()
    found = copies.of(a, b, SLICES)
    a[0, 0] += 1
    copies.add(found, a, b, 0, RANKS[0], SLICES)
    b[0] += 1
    assert_equal(weights_of(copies, a, b, 0), a, b, 0)
    # Nor is what comes late kept with the copies that were made since.
    copies.add(found, a, b, 1, RANKS[1], SLICES)
    assert copies.num_bytes == weights_of(copies, a, b, 0).num_bytes


def test_a_slot_of_another_rank_is_copied_anew() -> None:
    copies, (a, b) = Bf16Copies(LARGE), stacks()
    found = copies.of(a, b, SLICES)
    for rank in (4, 2, 4):
        assert found.find(0, rank) is None
        weights = copies.add(found, a, b, 0, rank, SLICES)
        assert weights.a.shape == (16, 2 * rank)
        assert found.find(0, rank) is weights
        assert copies.num_bytes == weights.num_bytes


def test_stacks_at_the_address_of_earlier_ones_have_their_own_copies(copies: Bf16Copies) -> None:
    """Tensors and their memory are reused at once here, both with the version of the first."""
    memory = long_case()
    a_memory, b_memory = memory.a_stack.numpy(), memory.b_stack.numpy()
    for seed in range(20):
        case = long_case(seed)
        a_memory[:], b_memory[:] = case.a_stack.numpy(), case.b_stack.numpy()
        case = replace(case, a_stack=torch.from_numpy(a_memory), b_stack=torch.from_numpy(b_memory))
        assert case.a_stack._version == 0
        case.check()
        case.check()
        assert copies.num_bytes > 0
        del case
        assert copies.num_bytes == 0


@pytest.mark.parametrize("which", ["a", "b"])
def test_copies_go_with_either_stack(which: str) -> None:
    copies, (a, b) = Bf16Copies(LARGE), stacks()
    weights_of(copies, a, b, 0)
    assert copies.num_bytes > 0
    if which == "a":
        del a
    else:
        del b
    assert copies.num_bytes == 0


def test_copies_made_in_inference_mode_are_of_use_outside() -> None:
    """Others could not take part in what is differentiated."""
    copies, (a, b) = Bf16Copies(LARGE), stacks()
    with torch.inference_mode():
        weights = weights_of(copies, a, b, 0)
    assert not weights.a.is_inference()
    assert not any(part.is_inference() for part in weights.b)


def test_copies_of_inference_tensors_are_not_kept(copies: Bf16Copies) -> None:
    with torch.inference_mode():
        case = long_case()
        assert case.a_stack.is_inference()
        case.check()
        case.a_stack[0].neg_()
        case.check()
    assert copies.num_bytes == 0


def test_the_least_recently_used_stacks_lose_their_copies() -> None:
    pairs = [stacks(seed) for seed in range(3)]
    size = Bf16Weights.of(*pairs[0], 0, RANKS[0], SLICES).num_bytes
    copies = Bf16Copies(2 * size)
    first = weights_of(copies, *pairs[0], 0)
    weights_of(copies, *pairs[1], 0)
    assert weights_of(copies, *pairs[0], 0) is first
    weights_of(copies, *pairs[2], 0)
    assert copies.num_bytes == 2 * size
    assert copies.of(*pairs[0], SLICES).find(0, RANKS[0]) is first
    assert copies.of(*pairs[1], SLICES).find(0, RANKS[0]) is None


def test_no_more_than_the_most_bytes_are_ever_kept() -> None:
    pairs = [stacks(seed) for seed in range(5)]
    size = Bf16Weights.of(*pairs[0], 0, RANKS[0], SLICES).num_bytes
    for max_bytes in (0, size - 1, size, 7 * size // 2):
        copies = Bf16Copies(max_bytes)
        for turn in range(30):
            a, b = pairs[turn % 5]
            slot = turn % 3
            assert_equal(weights_of(copies, a, b, slot), a, b, slot)
            assert 0 <= copies.num_bytes <= max_bytes
            if turn % 7 == 0:
                a[slot].neg_()


def test_threads_may_ask_and_write_at_any_time() -> None:
    """Each thread writes a slot of its own and then finds what it wrote."""
    copies, pairs = Bf16Copies(3000), [stacks(seed) for seed in range(3)]
    failures: list[BaseException] = []

    def work(slot: int) -> None:
        try:
            for turn in range(150):
                a, b = pairs[turn % 3]
                a[slot].fill_(turn)
                b[slot].fill_(turn)
                assert_equal(weights_of(copies, a, b, slot), a, b, slot)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert copies.num_bytes <= 3000
    pairs.clear()
    gc.collect()
    assert copies.num_bytes == 0
