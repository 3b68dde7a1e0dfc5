"""The CPU path against the reference, to the bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import build_routing, sgmv, sgmv_cpu
from kernels.sgmv_native import sgmv_function
from tests.kernels.cases import POPULARITIES, make_case, popular_groups, with_random_values

CPU = torch.device("cpu")
CLONE = torch.ops.aten.clone.default
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SITES = (((576, 192, 192), 576), ((1536, 1536), 576), ((576,), 1536))


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test runs with the compiled kernel, and as where there is no compiler."""
    assert sgmv_function() is not None, "the project needs a C compiler"
    if request.param == "torch":
        monkeypatch.setattr(sgmv_cpu, "sgmv_function", lambda: None)
    return bool(request.param == "compiled")


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_without_a_large_common_divisor_equal_the_reference(dtype: torch.dtype) -> None:
    make_case(
        [(2, 1), (1, 3), (0, 6)],
        ranks=[4, 3, 4],
        max_rank=4,
        in_features=16,
        slices=(31, 32, 49),
        dtype=dtype,
        device=CPU,
    ).check()


@pytest.mark.parametrize("max_rank", [1, 7, 8, 34, 64, 256])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_bf16_groups_of_every_rank_equal_the_reference(rows: int, max_rank: int) -> None:
    """Of odd ranks, too, and where B's rows are no whole number of pairs; what is past a rank is never a number."""
    ranks = sorted({max_rank, max(1, max_rank - 1), (max_rank + 1) // 2, 1})
    case = make_case(
        [(slot, rows) for slot in reversed(range(len(ranks)))],
        ranks=ranks,
        max_rank=max_rank,
        in_features=96,
        slices=(80, 48),
        dtype=torch.bfloat16,
        base_rows=1,
        device=CPU,
    )
    for slot, rank in enumerate(ranks):
        case.a_stack[slot].view(2, max_rank, -1)[:, rank:] = torch.nan
        case.b_stack[slot, :, rank:] = torch.nan
    case.check()


@pytest.mark.parametrize("has_instructions", [False, True])
def test_long_bf16_segments_are_served_with_and_without_bf16_instructions(
    has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_instructions and not sgmv_cpu._has_fast_bf16():
        pytest.skip("this processor does not multiply bf16")
    monkeypatch.setattr(sgmv_cpu, "_has_fast_bf16", lambda: has_instructions)
    products: set[torch.dtype] = set()
    product = torch.mm

    def noted(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        products.add(x.dtype)
        return product(x, a)

    monkeypatch.setattr(torch, "mm", noted)
    # What torch would have to widen is long from a higher rank on.
    ranks = [8, 6] if has_instructions else [80, 60]
    make_case(
        [(1, 390), (0, 400)],
        ranks=ranks,
        max_rank=max(ranks),
        in_features=1536,
        slices=(2048, 1024),
        dtype=torch.bfloat16,
        base_rows=1,
        device=CPU,
    ).check()
    assert products == {torch.bfloat16 if has_instructions else torch.float32}


@pytest.mark.parametrize("rows", [1, 8, 15, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_fp32_and_rounded_once(dtype: torch.dtype, rows: int, is_compiled: bool) -> None:
    """Against fp64, the error is half a unit in y's last place; v of many rows in bf16 is rounded, too."""
    case = make_case(
        [(1, rows), (0, rows)], ranks=[8, 8], max_rank=8, in_features=256, slices=(1024, 1024), dtype=dtype, device=CPU
    )
    case = with_random_values(case)
    x, y = case.x.double(), case.y.double()
    exact, magnitude = y.clone(), torch.zeros_like(y)
    for slot, start, stop in case.routing.groups:
        a, b = case.a_stack[slot].double().view(2, 8, -1), case.b_stack[slot].double().view(2, 1024, 8)
        v = torch.einsum("tk,srk->str", x[start:stop], a)
        exact[start:stop] += torch.einsum("str,sor->tso", v, b).reshape(stop - start, -1)
        magnitude[start:stop] = torch.einsum("str,sor->tso", v.abs(), b.abs()).reshape(stop - start, -1)
    epsilon = torch.finfo(dtype).eps
    rounds_v = dtype == torch.bfloat16 and (rows >= 64 or not is_compiled)
    low_rank_error = 0.51 * epsilon if rounds_v else 1e-5
    bound = 0.5001 * epsilon * exact.abs() + low_rank_error * magnitude + 1e-6
    assert ((case.result().double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("groups", "ranks", "max_rank", "in_features", "slices"),
    [
        pytest.param([(1, 40), (0, 1)], [256, 200], 256, 4096, (4096, 1024, 1024), id="llama-qkv"),
        pytest.param([(1, 90), (0, 2)], [16, 8], 16, 512, (14336, 14336), id="gate-up"),
        pytest.param([(1, 200), (0, 37)], [16, 5], 16, 4096, (512, 64), id="more-rows-than-a-cache-holds"),
        pytest.param([(2, 30), (0, 70)], [8, 8, 4], 8, 64, (131072,), id="head"),
        pytest.param([(slot, 1) for slot in reversed(range(256))], [8] * 256, 8, 64, (96, 32), id="256-slots"),
        pytest.param([(0, 32768)], [256], 256, 32, (32, 32), id="32k-rows"),
    ],
)
def test_large_sizes_equal_the_reference_in_bounded_memory(
    groups: list[tuple[int, int]],
    ranks: list[int],
    max_rank: int,
    in_features: int,
    slices: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    case = make_case(
        groups,
        ranks=ranks,
        max_rank=max_rank,
        in_features=in_features,
        slices=slices,
        dtype=dtype,
        base_rows=1,
        device=CPU,
    )
    sizes = LargestResult()
    with sizes:
        result = case.result()
    assert sizes.num_elements <= sgmv_cpu.MAX_TEMPORARY
    # Sums of many products are no longer small integers that 16 bits hold: v is rounded where the product is bf16.
    expected = case.expected()
    if dtype == torch.bfloat16:
        torch.testing.assert_close(result[: case.routing.end], expected[: case.routing.end], rtol=0.02, atol=2.0)
    else:
        assert torch.equal(result[: case.routing.end], expected[: case.routing.end])
    assert torch.equal(result[case.routing.end :], case.y[case.routing.end :])


def test_stacks_may_begin_anywhere_in_their_memory() -> None:
    case = make_case(
        [(4, 1), (3, 1), (2, 1), (1, 1), (0, 20)],
        ranks=[4] * 5,
        max_rank=4,
        in_features=16,
        slices=(8, 4),
        dtype=torch.float32,
        device=CPU,
    )

    def moved(stack: torch.Tensor) -> torch.Tensor:
        memory = torch.full((stack.numel() + 7,), float("nan"))
        view = memory[7:].view_as(stack)
        return view.copy_(stack)

    replace(case, a_stack=moved(case.a_stack), b_stack=moved(case.b_stack)).check()


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_wider_tensors_are_served(dtype: torch.dtype, rows: int) -> None:
    case = make_case(
        [(slot, rows) for slot in (3, 2, 1, 0)],
        ranks=[4, 3, 4, 4],
        max_rank=4,
        in_features=16,
        slices=(8, 4),
        dtype=dtype,
        base_rows=2,
        device=CPU,
    )

    def widened(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(rows, 7), rows, torch.full_like(rows, 7)], 1)

    x, y = widened(case.x)[:, 16:32], widened(case.y)
    expected = y.clone()
    expected[:, 12:24] = case.expected()
    sgmv(x, case.a_stack, case.b_stack, y[:, 12:24], case.routing, case.slices)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_other_groups_of_a_decode_step(dtype: torch.dtype) -> None:
    """Alone or among seven others: the same, but for the order in which fp32 sums are made."""
    case = with_random_values(
        make_case(
            [(slot, 1) for slot in reversed(range(8))],
            ranks=[16] * 8,
            max_rank=16,
            in_features=576,
            slices=(192, 64, 64),
            dtype=dtype,
            device=CPU,
        )
    )
    together = case.result()
    for slot, start, stop in case.routing.groups:
        routing = build_routing([slot], [0, 1], [16] * 8, num_rows=1, max_groups=8, device=CPU)
        alone = replace(case, x=case.x[start:stop], y=case.y[start:stop], routing=routing).result()
        torch.testing.assert_close(together[start:stop], alone, rtol=torch.finfo(dtype).eps, atol=1e-5)


class LargestResult(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements of the largest tensor that any operation makes, views and results in place left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {
            tensor.untyped_storage().data_ptr() for tensor in (*args, *(kwargs or {}).values()) if is_tensor(tensor)
        }
        if is_tensor(result) and result.untyped_storage().data_ptr() not in inputs and func is not CLONE:
            self.num_elements = max(self.num_elements, result.numel())
        return result


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
