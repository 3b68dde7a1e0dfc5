"""The CPU path against the reference, to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import sgmv_cpu
from tests.kernels.cases import POPULARITIES, make_case, popular_groups, with_random_values

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SITES = (((576, 192, 192), 576), ((1536, 1536), 576), ((576,), 1536))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("slices", "in_features"), SITES)
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_decode_equals_the_reference(
    popularity: str, slices: tuple[int, ...], in_features: int, dtype: torch.dtype
) -> None:
    make_case(
        popular_groups(popularity, 8, 8),
        ranks=[16, 8, 1, 16, 5, 12, 16, 3],
        max_rank=16,
        in_features=in_features,
        slices=slices,
        dtype=dtype,
        base_rows=3,
        device=CPU,
    ).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 17, 63, 64, 130])
def test_segments_of_every_length_equal_the_reference(rows: int, dtype: torch.dtype) -> None:
    make_case(
        [(2, rows), (0, 1)],
        ranks=[8, 8, 6],
        max_rank=8,
        in_features=96,
        slices=(64, 32, 32),
        dtype=dtype,
        base_rows=2,
        device=CPU,
    ).check()


def test_a_mixed_step_equals_the_reference() -> None:
    make_case(
        [(7, 1), (6, 2), (5, 100), (4, 1), (1, 1), (0, 20)],
        ranks=[8, 4, 8, 0, 2, 8, 8, 1],
        max_rank=8,
        in_features=64,
        slices=(48, 16),
        dtype=torch.bfloat16,
        base_rows=1,
        device=CPU,
    ).check()


def test_groups_out_of_order_and_slots_used_twice_equal_the_reference() -> None:
    make_case(
        [(0, 2), (1, 1), (0, 1), (2, 3), (2, 1)],
        ranks=[4, 4, 4],
        max_rank=4,
        in_features=16,
        slices=(8,),
        dtype=torch.float32,
        device=CPU,
    ).check()


def test_slices_without_a_large_common_divisor_equal_the_reference() -> None:
    make_case(
        [(2, 1), (1, 3), (0, 1)],
        ranks=[4, 4, 4],
        max_rank=4,
        in_features=16,
        slices=(31, 32, 33),
        dtype=torch.float32,
        device=CPU,
    ).check()


def test_the_plain_path_serves_long_bf16_segments_without_bf16_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgmv_cpu, "_has_fast_bf16", lambda: False)
    make_case(
        [(0, 80)],
        ranks=[8],
        max_rank=8,
        in_features=64,
        slices=(32, 32),
        dtype=torch.bfloat16,
        device=CPU,
    ).check()


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_fp32_and_rounded_once(dtype: torch.dtype, rows: int) -> None:
    """Against fp64, the error is half a unit in y's last place; long bf16 segments also round v to bf16."""
    case = make_case(
        [(1, rows), (0, rows)], ranks=[8, 8], max_rank=8, in_features=256, slices=(64, 64), dtype=dtype, device=CPU
    )
    case = with_random_values(case)
    x, y = case.x.double(), case.y.double()
    exact, magnitude = y.clone(), torch.zeros_like(y)
    for slot, start, stop in case.routing.groups:
        a, b = case.a_stack[slot].double().view(2, 8, -1), case.b_stack[slot].double().view(2, 64, 8)
        v = torch.einsum("tk,srk->str", x[start:stop], a)
        exact[start:stop] += torch.einsum("str,sor->tso", v, b).reshape(stop - start, -1)
        magnitude[start:stop] = torch.einsum("str,sor->tso", v.abs(), b.abs()).reshape(stop - start, -1)
    epsilon = torch.finfo(dtype).eps
    low_rank_error = 0.51 * epsilon if dtype == torch.bfloat16 and rows >= 64 else 1e-5
    bound = 0.5001 * epsilon * exact.abs() + low_rank_error * magnitude + 1e-6
    assert ((case.result().double() - exact).abs() <= bound).all()


@settings(deadline=None, max_examples=150)
@given(
    lengths=st.dictionaries(st.integers(0, 9), st.integers(1, 70), min_size=1, max_size=8),
    slices=st.lists(st.sampled_from([8, 16, 24, 5]), min_size=1, max_size=4),
    ranks=st.lists(st.integers(0, 12), min_size=10, max_size=10),
    in_features=st.sampled_from([8, 33, 64]),
    base_rows=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_any_batch_equals_the_reference(
    lengths: dict[int, int],
    slices: list[int],
    ranks: list[int],
    in_features: int,
    base_rows: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    case = make_case(
        sorted(lengths.items(), reverse=True),
        ranks=ranks,
        max_rank=12,
        in_features=in_features,
        slices=slices,
        dtype=dtype,
        base_rows=base_rows,
        device=CPU,
        seed=seed,
    )
    assert torch.equal(case.result(), case.expected())
