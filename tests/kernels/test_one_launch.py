"""Shrink and expand in one launch: the same bits as two, whatever runs first, and counters that are zero again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime import interpreter as triton_interpreter

from kernels import build_routing, sgmv
from tests.kernels import interpreter
from tests.kernels.cases import DEVICE, POPULARITIES, Case, make_case, popular_groups, with_random_values

interpreter.install()

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _scratch(poisoned_scratch: None) -> None:
    """Memory from torch.empty holds NaN."""


def check(case: Case) -> None:
    """The result is right, and the counters are as they were."""
    assert case.routing.counters is not None
    case.check()
    assert not case.routing.counters.any()


def in_two_launches(case: Case) -> Case:
    routing = case.routing
    offsets = routing.grouped_offsets.tolist()
    num_groups = int((routing.lora_ids >= 0).sum())
    two = build_routing(
        routing.lora_ids.tolist()[:num_groups],
        offsets[: num_groups + 1],
        routing.slot_ranks,
        num_rows=routing.num_rows,
        max_groups=routing.max_groups,
        device=DEVICE,
        block_m=routing.block_m,
    )
    assert two.counters is None
    return replace(case, routing=two)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_mixed_ranks_equal_the_reference(popularity: str, dtype: torch.dtype) -> None:
    check(
        make_case(
            popular_groups(popularity, 6 if popularity == "distinct" else 21, 6),
            ranks=[16, 8, 1, 0, 5, 12],
            max_rank=16,
            in_features=160,
            slices=(64, 32, 32),
            dtype=dtype,
            base_rows=3,
            block_m=8,
            one_launch=True,
        )
    )


@pytest.mark.parametrize(
    ("slices", "in_features", "max_rank", "ranks"),
    [
        ((100,), 72, 12, [12, 1, 7]),
        ((65, 63), 33, 4, [4, 1, 4]),
        # K is split, and the last split is ragged.
        ((32,), 1100, 8, [8, 8, 3]),
        # Whole blocks of columns are past the slot's rank.
        ((64, 64), 96, 128, [128, 3, 70]),
    ],
)
def test_ragged_shapes_splits_and_skipped_columns(
    slices: tuple[int, ...], in_features: int, max_rank: int, ranks: Sequence[int]
) -> None:
    check(
        make_case(
            [(2, 1), (1, 9), (0, 3)],
            ranks=ranks,
            max_rank=max_rank,
            in_features=in_features,
            slices=slices,
            dtype=torch.bfloat16,
            base_rows=9,
            block_m=8,
            one_launch=True,
        )
    )


@pytest.mark.parametrize("groups", [[(1, 0), (0, 0)], [(2, 0), (1, 3), (0, 0)], [(0, 4)], []], ids=str)
def test_empty_groups_and_empty_slots_are_served(groups: list[tuple[int, int]]) -> None:
    check(
        make_case(
            groups,
            ranks=[0, 4, 4],
            max_rank=8,
            in_features=32,
            slices=(16, 16),
            dtype=torch.bfloat16,
            base_rows=2,
            block_m=8,
            one_launch=True,
        )
    )


@pytest.mark.parametrize("block_m", [8, 64])
def test_random_values_give_the_bits_of_two_launches(block_m: int) -> None:
    case = with_random_values(
        make_case(
            [(2, 1), (1, 20), (0, 1)],
            ranks=[16, 16, 16],
            max_rank=16,
            in_features=576,
            slices=(64, 64),
            dtype=torch.bfloat16,
            block_m=block_m,
            one_launch=True,
        )
    )
    assert torch.equal(case.result(), in_two_launches(case).result())


@pytest.mark.skipif(not interpreter.is_active(), reason="a device starts programs in its own order")
def test_programs_may_start_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(
        [(1, 9), (0, 3)],
        ranks=[8, 3],
        max_rank=8,
        in_features=64,
        slices=(32, 16),
        dtype=torch.bfloat16,
        base_rows=3,
        block_m=8,
        one_launch=True,
    )
    started = []
    builder = triton_interpreter.InterpreterBuilder
    plain = builder.set_grid_idx

    def last_first(self: Any, x: int, y: int, z: int) -> None:
        started.append(self.grid_dim[0] - 1 - x)
        plain(self, started[-1], y, z)

    monkeypatch.setattr(builder, "set_grid_idx", last_first)
    check(case)
    assert started[0] == max(started) > 0


def test_steps_of_other_shapes_do_not_share_a_buffer() -> None:
    case = make_case(
        [(0, 3)], ranks=[4], max_rank=4, in_features=8, slices=(8,), dtype=torch.float32, block_m=8, one_launch=True
    )
    with pytest.raises(ValueError, match=r"reuse a buffer only for equal .*one_launch"):
        build_routing([0], [0, 3], [4], num_rows=3, max_groups=1, device=DEVICE, block_m=8, into=case.routing.buffer)


def test_the_cpu_path_has_nothing_to_count() -> None:
    routing = build_routing([0], [0, 2], [4], num_rows=3, max_groups=1, device=torch.device("cpu"), one_launch=True)
    assert routing.counters is None
    y = torch.zeros(3, 8)
    sgmv(torch.ones(3, 8), torch.ones(1, 4, 8), torch.ones(1, 8, 4), y, routing, (8,))
    assert y.tolist() == [[32.0] * 8, [32.0] * 8, [0.0] * 8]


def test_some_rows_of_a_step_are_one_launch_too() -> None:
    routing = build_routing(
        [1, 0], [0, 4, 6], [4, 4], num_rows=8, max_groups=2, device=DEVICE, block_m=8, one_launch=True
    )
    selected = routing.select([3, 5, 7])
    assert selected.tiles is not None
    assert selected.counters is not None
    assert len(selected.counters) == len(selected.tiles) + 1
    assert not selected.counters.any()
