"""What layers do to rows in C, against fp64."""

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native, row_operations
from kernels.native import CACHE_VARIABLE, native_library
from kernels.row_operations import gate, join, rms_norm, rotate_, row_functions

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Half of the smallest number: fp16 has few of those near 0.
SMALLEST = {torch.float32: 1e-30, torch.bfloat16: 1e-30, torch.float16: 2.0**-25}


@given(
    rows=st.integers(1, 9),
    size=st.integers(1, 100),
    spare=st.integers(0, 5),
    offset=st.sampled_from([0.0, 1.0]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
)
@settings(deadline=None, max_examples=150)
def test_a_norm_is_exact_but_for_one_rounding(
    rows: int, size: int, spare: int, offset: float, dtype: torch.dtype, scale: float
) -> None:
    assert row_functions(dtype) is not None, "the project needs a C compiler"
    generator = torch.Generator().manual_seed(size)
    x = (torch.randn(rows, size + spare, generator=generator) * scale).to(dtype)[:, :size]
    weight = torch.randn(size, generator=generator).to(dtype)
    found = rms_norm(x, weight, 1e-5, offset)
    exact = x.double()
    expected = exact / ((exact**2).mean(1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    assert found.dtype == dtype
    assert found.is_contiguous()
    torch.testing.assert_close(
        found.double(), expected, rtol=0.51 * torch.finfo(dtype).eps + 1e-6, atol=SMALLEST[dtype]
    )


@given(
    rows=st.integers(1, 9), width=st.integers(1, 70), dtype=st.sampled_from(DTYPES), scale=st.sampled_from([1.0, 30.0])
)
@settings(deadline=None, max_examples=100)
def test_a_gate_is_exact_but_for_one_rounding(rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(width)
    gate_up = (torch.randn(rows, 2 * width, generator=generator) * scale).to(dtype)
    gates, up = gate_up.double().chunk(2, 1)
    found = gate(gate_up)
    torch.testing.assert_close(
        found.double(), F.silu(gates) * up, rtol=0.51 * torch.finfo(dtype).eps + 1e-6, atol=SMALLEST[dtype]
    )


@given(
    rows=st.integers(1, 9),
    size=st.integers(1, 100),
    spare=st.integers(0, 5),
    scale=st.sampled_from([1.0, 0.22]),
    dtype=st.sampled_from(DTYPES),
)
@settings(deadline=None, max_examples=100)
def test_joining_is_adding_and_a_norm(rows: int, size: int, spare: int, scale: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    x, part = (torch.randn(rows, size + spare, generator=generator).to(dtype)[:, :size] for _ in range(2))
    weight = torch.randn(size, generator=generator).to(dtype)
    joined, normed = join(x, part, scale, weight, 1e-5, 1.0)
    assert joined.is_contiguous()
    half_ulp = 0.51 * torch.finfo(dtype).eps
    torch.testing.assert_close(joined.double(), x.double() + scale * part.double(), rtol=half_ulp, atol=1e-7)
    assert torch.equal(normed, rms_norm(joined, weight, 1e-5, 1.0))


@given(
    rows=st.integers(1, 9),
    heads=st.integers(1, 5),
    pairs=st.integers(1, 40),
    unturned=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
)
@settings(deadline=None, max_examples=100)
def test_pairs_of_channels_turn(rows: int, heads: int, pairs: int, unturned: int, dtype: torch.dtype) -> None:
    """Of the first heads of a tensor that has others behind them."""
    generator = torch.Generator().manual_seed(pairs)
    tensor = torch.randn(rows, heads + 2, 2 * pairs + unturned, generator=generator).to(dtype)
    cos, sin = (torch.randn(rows, 1, 2 * pairs, generator=generator).to(dtype) for _ in range(2))
    before = tensor.clone()
    rotate_(tensor[:, :heads], cos, sin)
    turned = before[:, :heads, : 2 * pairs].double()
    expected = turned * cos.double() + turned.roll(pairs, -1) * sin.double()
    found = tensor[:, :heads, : 2 * pairs].double()
    torch.testing.assert_close(found, expected, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(tensor[:, heads:], before[:, heads:])
    assert torch.equal(tensor[..., 2 * pairs :], before[..., 2 * pairs :])


@pytest.mark.parametrize("transposed", [False, True])
def test_what_c_does_not_take_torch_rotates(transposed: bool) -> None:
    heads = torch.randn(3, 4, 16) if transposed else torch.randn(3, 4, 16).double()
    heads = heads.transpose(0, 1) if transposed else heads
    cos, sin = (torch.randn(heads.shape[0], 1, 16).to(heads.dtype) for _ in range(2))
    expected = heads.double() * cos + heads.double().roll(8, -1) * sin
    rotate_(heads, cos, sin)
    torch.testing.assert_close(heads.double(), expected, rtol=2 * torch.finfo(cos.dtype).eps, atol=4e-3)


def test_what_is_no_number_stays_in_its_row() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = torch.nan
    assert rms_norm(x, torch.ones(64), 1e-5).isnan().all(1).tolist() == [False, True, False]
    assert gate(x).isnan().any(1).tolist() == [False, True, False]
    for found in join(torch.ones(3, 64), x, 1.0, torch.ones(64), 1e-5):
        assert found.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    x, before = torch.randn(500, 1536).to(dtype), torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            turned = x.clone().view(500, 24, 64)
            rotate_(turned, x[:, None, :64].contiguous(), x[:, None, 64:128].contiguous())
            results.append((rms_norm(x, x[0], 1e-5), gate(x), *join(x, x, 0.5, x[0], 1e-5), turned))
        finally:
            torch.set_num_threads(before)
    for one, several in zip(*results, strict=True):
        assert torch.equal(one, several)


def test_more_dimensions_are_rows_of_rows() -> None:
    x = torch.randn(2, 3, 16)
    assert torch.equal(gate(x), gate(x.view(6, 16)).view(2, 3, 8))
    assert torch.equal(rms_norm(x, torch.ones(16), 1e-6), rms_norm(x.view(6, 16), torch.ones(16), 1e-6).view(2, 3, 16))


def test_heads_of_a_wider_tensor_are_normalised() -> None:
    heads = torch.randn(5, 7, 16)[:, 2:5]
    torch.testing.assert_close(rms_norm(heads, torch.ones(16), 1e-6), F.rms_norm(heads, (16,), torch.ones(16), 1e-6))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fp64_is_left_to_torch(offset: float) -> None:
    x, weight = torch.randn(3, 32).double(), torch.randn(32).double()
    expected = F.rms_norm(x.float(), (32,), weight.float() + offset, 1e-5).double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, offset), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gate(x), F.silu(x[:, :16]) * x[:, 16:])
    for found, right in zip(join(x, x, 0.5, weight, 1e-5, offset), (1.5 * x, expected), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", ["2 * call->eps + 1e-3f", "NAN"])
def test_functions_that_compute_wrongly_are_not_used(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(native.__file__).parent
    for name in ("row_operations.c", "native_vectors.h"):
        (tmp_path / name).write_text((folder / name).read_text().replace("+ call->eps", f"+ {wrong}"))
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    native_library.cache_clear()
    row_functions.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            x = torch.randn(2, 64)
            torch.testing.assert_close(row_operations.rms_norm(x, x[0], 1e-5), F.rms_norm(x, (64,), x[0], 1e-5))
        (record,) = caplog.records
        assert "row_operations.c, as compiled here, is not used" in record.message
    finally:
        native_library.cache_clear()
        row_functions.cache_clear()
