"""The Triton pair against the reference, to the bit: on a GPU, or under the interpreter where there is none.

Scratch memory comes filled with NaN, and so does everything that may not matter (see `make_case`).
"""

import pytest
import torch

from kernels import sgmv_expand, sgmv_shrink
from tests.kernels import interpreter
from tests.kernels.cases import DEVICE, POPULARITIES, make_case, popular_groups, with_random_values

interpreter.install()

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIXED_RANKS = [16, 8, 1, 16, 5, 12, 0, 3]


@pytest.fixture(autouse=True)
def _scratch(poisoned_scratch: None) -> None:
    """Memory from torch.empty holds NaN."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_mixed_ranks_equal_the_reference(popularity: str, dtype: torch.dtype) -> None:
    make_case(
        popular_groups(popularity, 8 if popularity == "distinct" else 21, 8),
        ranks=MIXED_RANKS,
        max_rank=16,
        in_features=160,
        slices=(64, 32, 32),
        dtype=dtype,
        base_rows=3,
        block_m=8,
    ).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("slices", "in_features", "max_rank"),
    [((576, 192, 192), 576, 8), ((1536, 1536), 576, 16), ((576,), 1536, 16)],
)
def test_smollm2_sites_equal_the_reference(
    slices: tuple[int, ...], in_features: int, max_rank: int, dtype: torch.dtype
) -> None:
    make_case(
        [(1, 2), (0, 17)],
        ranks=[max_rank, max_rank // 2],
        max_rank=max_rank,
        in_features=in_features,
        slices=slices,
        dtype=dtype,
        base_rows=1,
        block_m=16,
    ).check()


@pytest.mark.parametrize(
    ("slices", "in_features"),
    [((100,), 72), ((40, 24, 8), 80), ((65, 63), 33), ((1, 130, 1), 7), ((8, 8), 1)],
)
@pytest.mark.parametrize("max_rank", [1, 4, 12])
def test_ragged_widths_and_ranks_equal_the_reference(slices: tuple[int, ...], in_features: int, max_rank: int) -> None:
    make_case(
        [(2, 1), (1, 9), (0, 3)],
        ranks=[max_rank, 1, max_rank],
        max_rank=max_rank,
        in_features=in_features,
        slices=slices,
        dtype=torch.bfloat16,
        base_rows=1,
        block_m=8,
    ).check()


@pytest.mark.parametrize("max_rank", [64, 256])
def test_large_ranks_and_prefill_tiles_equal_the_reference(max_rank: int) -> None:
    make_case(
        [(1, 70), (0, 5)],
        ranks=[max_rank, max_rank // 2 + 3],
        max_rank=max_rank,
        in_features=256,
        slices=(128, 64),
        dtype=torch.bfloat16,
        base_rows=2,
        block_m=64,
    ).check()


def test_a_vocabulary_sized_output_equals_the_reference() -> None:
    make_case(
        [(1, 1)],
        ranks=[8, 8, 8],
        max_rank=8,
        in_features=64,
        slices=(49152,),
        dtype=torch.bfloat16,
        base_rows=2,
        block_m=16,
    ).check()


@pytest.mark.parametrize("in_features", [4096, 4100])
def test_k_is_split_and_the_last_split_may_be_ragged(in_features: int) -> None:
    case = make_case(
        [(1, 1), (0, 1)],
        ranks=[8, 8],
        max_rank=8,
        in_features=in_features,
        slices=(32,),
        dtype=torch.bfloat16,
        base_rows=1,
        block_m=8,
    )
    planes = sgmv_shrink(case.x, case.a_stack, case.routing, 1)
    assert planes.shape == (16, 3, 8)
    assert not planes[:, :2].isnan().any()
    # A program that wrote rows of another tile would race with it on a device.
    assert planes[:, 2:].isnan().all()
    y = case.y.clone()
    sgmv_expand(planes, case.b_stack, y, case.routing, case.slices)
    assert torch.equal(y, case.expected())


@pytest.mark.parametrize("groups", [[(1, 0), (0, 0)], [(2, 0), (1, 3), (0, 0)], []], ids=str)
def test_empty_groups_and_no_groups_are_served(groups: list[tuple[int, int]]) -> None:
    make_case(
        groups,
        ranks=[4, 4, 4],
        max_rank=8,
        in_features=32,
        slices=(16, 16),
        dtype=torch.bfloat16,
        base_rows=2,
        block_m=8,
    ).check()


def test_rows_of_a_wider_tensor_are_served() -> None:
    case = make_case(
        [(1, 3), (0, 2)], ranks=[8, 8], max_rank=8, in_features=64, slices=(32,), dtype=torch.bfloat16, block_m=8
    )
    wide_x, wide_y = torch.full((5, 96), 9.0, dtype=torch.bfloat16), torch.full((5, 48), 9.0, dtype=torch.bfloat16)
    wide_x, wide_y = wide_x.to(DEVICE), wide_y.to(DEVICE)
    wide_x[:, 16:80], wide_y[:, 8:40] = case.x, case.y
    planes = sgmv_shrink(wide_x[:, 16:80], case.a_stack, case.routing, 1)
    sgmv_expand(planes, case.b_stack, wide_y[:, 8:40], case.routing, case.slices)
    assert torch.equal(wide_y[:, 8:40], case.expected())
    assert (wide_y[:, :8] == 9).all()
    assert (wide_y[:, 40:] == 9).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_values_agree_within_rounding(dtype: torch.dtype) -> None:
    case = with_random_values(
        make_case(
            [(2, 1), (1, 6), (0, 1)],
            ranks=[16, 16, 16],
            max_rank=16,
            in_features=576,
            slices=(64, 64),
            dtype=dtype,
            block_m=8,
        )
    )
    result, expected = case.result().float(), case.expected().float()
    if dtype == torch.float32:
        # TF32 would be 1e-3 off.
        torch.testing.assert_close(result, expected, rtol=0, atol=4e-6)
        return
    assert ((result - expected).abs() <= torch.finfo(dtype).eps * expected.abs().clamp_min(1)).all()
    assert (result == expected).float().mean() > 0.99


def test_two_runs_give_the_same_bits() -> None:
    case = with_random_values(
        make_case([(0, 5)], ranks=[8], max_rank=8, in_features=1024, slices=(64,), dtype=torch.float32, block_m=8)
    )
    assert torch.equal(case.result(), case.result())
