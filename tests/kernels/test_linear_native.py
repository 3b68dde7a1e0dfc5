"""Linear layers of 16 bits in C, against fp64, and where a layer takes them."""

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import PackedLinear, linear_cpu, linear_native, native
from kernels.native import CACHE_VARIABLE, native_library
from kernels.support import cpu_multiplies

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def unmultiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies fp32 alone, whichever this one is."""
    monkeypatch.setattr(linear_cpu, "cpu_multiplies", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(linear_cpu, "_pack", lambda weight, bias: None)


def operands(rows: int, width: int, outs: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight and a bias."""
    generator = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(rows, width, generator=generator), torch.randn(outs, generator=generator)
    weight = torch.randn(outs, width, generator=generator) / width**0.5
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def assert_rounded_once(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Half a unit of the result, and what fp32 sums differ by.
    limits = torch.finfo(found.dtype)
    sums = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    allowed = 0.51 * limits.eps * exact.abs() + limits.smallest_normal * limits.eps + 2e-6 * sums
    assert bool(((found.double() - exact).abs() <= allowed).all())


@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 90),
    outs=st.integers(1, 40),
    spare=st.integers(0, 3),
    with_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
@settings(deadline=None, max_examples=150)
def test_a_product_is_exact_but_for_one_rounding(
    rows: int, width: int, outs: int, spare: int, with_bias: bool, dtype: torch.dtype
) -> None:
    assert linear_native.linear_function(dtype) is not None, "the project needs a C compiler"
    x, weight, bias = operands(rows, width + spare, outs, dtype)
    x, weight = x[:, :width], weight[:, :width].contiguous()
    found = linear_native.linear_native(x, weight, bias if with_bias else None)
    assert (found.shape, found.dtype) == ((rows, outs), dtype)
    assert_rounded_once(found, x, weight, bias if with_bias else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_gets_the_same_alone_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    x, weight, bias = operands(67, 577, 301, dtype)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = linear_native.linear_native(x, weight, bias)
        torch.set_num_threads(3)
        assert torch.equal(linear_native.linear_native(x, weight, bias), expected)
        for rows in (slice(0, 1), slice(30, 36), slice(60, 67)):
            assert torch.equal(linear_native.linear_native(x[rows], weight, bias), expected[rows])
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_at_the_ends_of_the_range(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    ends = [0.0, -0.0, limits.max, limits.min, limits.smallest_normal, limits.smallest_normal * limits.eps, 1.0]
    x = torch.tensor([ends, [-end for end in ends]], dtype=dtype)
    weight = torch.eye(len(ends), dtype=dtype)
    assert torch.equal(linear_native.linear_native(x, weight, None), x)
    over = linear_native.linear_native(x[:, 2:3], torch.full((1, 1), 2.0, dtype=dtype), None)
    assert over.flatten().tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_in_its_row_and_its_output(dtype: torch.dtype) -> None:
    x, weight, _ = operands(9, 40, 11, dtype)
    x[4, 39] = torch.nan
    assert linear_native.linear_native(x, weight, None).isnan().all(1).tolist() == [row == 4 for row in range(9)]
    x[4, 39] = 0
    weight[7, 3] = torch.nan
    assert linear_native.linear_native(x, weight, None).isnan().all(0).tolist() == [out == 7 for out in range(11)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 384, 385])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_widens_few_rows_and_many(
    rows: int, with_bias: bool, dtype: torch.dtype, unmultiplied: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several parts of the weight.
    monkeypatch.setattr(linear_cpu, "_MAX_WIDENED", 7000)
    x, weight, bias = operands(rows, 70, 96, dtype)
    layer = PackedLinear(weight, bias if with_bias else None)
    assert layer.is_widened
    assert not layer.is_packed
    assert layer.dense_weight().data_ptr() == weight.data_ptr(), "the layer holds a second copy"
    assert_rounded_once(layer(x), x, weight, bias if with_bias else None)
    batched = layer(x.view(1, rows, 70).expand(2, rows, 70))
    assert batched.shape == (2, rows, 96)
    assert_rounded_once(batched[1], x, weight, bias if with_bias else None)


def test_a_weight_that_is_not_contiguous_is_torchs_to_multiply(unmultiplied: None) -> None:
    x, weight, _ = operands(3, 32, 32, torch.bfloat16)
    layer = PackedLinear(weight.t())
    assert layer.is_widened
    torch.testing.assert_close(layer(x), F.linear(x, weight.t()))


def test_what_the_processor_multiplies_is_not_widened() -> None:
    assert not PackedLinear(torch.randn(8, 8)).is_widened


def test_a_torch_without_its_private_checks_is_taken_for_one_that_multiplies_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> bool:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_is_mkldnn_fp16_supported'")

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", missing)
    cpu_multiplies.cache_clear()
    try:
        x, weight, bias = operands(3, 24, 8, torch.float16)
        layer = PackedLinear(weight, bias)
        assert layer.is_widened
        assert_rounded_once(layer(x), x, weight, bias)
    finally:
        cpu_multiplies.cache_clear()


def test_without_a_compiler_torch_multiplies(
    unmultiplied: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(native, "COMPILERS", ())
    for remembered in (native_library, linear_native.linear_function):
        remembered.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for rows in (2, 400):
                x, weight, bias = operands(rows, 40, 16, torch.bfloat16)
                torch.testing.assert_close(PackedLinear(weight, bias)(x), F.linear(x, weight, bias))
        (record,) = caplog.records
        assert "linear_native.c is not used, plain torch is: no C compiler was found" in record.message
    finally:
        for remembered in (native_library, linear_native.linear_function):
            remembered.cache_clear()
