"""Normalisation and gates in C, against fp64."""

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native, row_operations
from kernels.native import CACHE_VARIABLE, native_library
from kernels.row_operations import gate, rms_norm, row_functions

DTYPES = [torch.float32, torch.bfloat16]


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
    assert row_functions() is not None, "the project needs a C compiler"
    generator = torch.Generator().manual_seed(size)
    x = (torch.randn(rows, size + spare, generator=generator) * scale).to(dtype)[:, :size]
    weight = torch.randn(size, generator=generator).to(dtype)
    found = rms_norm(x, weight, 1e-5, offset)
    exact = x.double()
    expected = exact / ((exact**2).mean(1, keepdim=True) + 1e-5).sqrt() * (weight.double() + offset)
    assert found.dtype == dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=0.51 * torch.finfo(dtype).eps + 1e-6, atol=1e-30)


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
        found.double(), F.silu(gates) * up, rtol=0.51 * torch.finfo(dtype).eps + 1e-6, atol=1e-30
    )


def test_what_is_no_number_stays_in_its_row() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = torch.nan
    assert rms_norm(x, torch.ones(64), 1e-5).isnan().all(1).tolist() == [False, True, False]
    assert gate(x).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    x, before = torch.randn(500, 1536).to(dtype), torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            results.append((rms_norm(x, x[0], 1e-5), gate(x)))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_heads_of_a_wider_tensor_are_normalised() -> None:
    heads = torch.randn(5, 7, 16)[:, 2:5]
    torch.testing.assert_close(rms_norm(heads, torch.ones(16), 1e-6), F.rms_norm(heads, (16,), torch.ones(16), 1e-6))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fp16_is_left_to_torch(offset: float) -> None:
    x, weight = torch.randn(3, 32).half(), torch.randn(32).half()
    expected = F.rms_norm(x.float(), (32,), weight.float() + offset, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, offset).float(), expected, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(gate(x), F.silu(x[:, :16]) * x[:, 16:])


def test_functions_that_compute_wrongly_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(native.__file__).parent
    for name in ("row_operations.c", "native_vectors.h"):
        (tmp_path / name).write_text((folder / name).read_text().replace("+ call->eps", "+ 2 * call->eps + 1e-3f"))
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
