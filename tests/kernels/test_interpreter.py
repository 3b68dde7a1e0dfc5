"""The interpreter's repaired bf16 arithmetic against torch, value by value."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels import interpreter

pytestmark = pytest.mark.skipif(not interpreter.is_active(), reason="kernels run on a GPU here")
interpreter.install()


@triton.jit  # type: ignore[untyped-decorator]
def arithmetic_kernel(x, y, total, product, negative, less, from_fp32, wide, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    a = tl.load(x + at)
    b = tl.load(y + at)
    tl.store(total + at, a + b)
    tl.store(product + at, a * b)
    tl.store(negative + at, -a)
    tl.store(less + at, (a < b).to(tl.int32))
    tl.store(from_fp32 + at, tl.load(wide + at).to(tl.bfloat16))


@triton.jit  # type: ignore[untyped-decorator]
def product_kernel(x, y, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.arange(0, SIZE)[:, None] * SIZE
    at = row + tl.arange(0, SIZE)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


def test_arithmetic_comparison_and_rounding_equal_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, generator=generator).bfloat16()
    y = torch.randn(1024, generator=generator).bfloat16()
    wide = torch.randn(1024, generator=generator)
    wide[:3] = torch.tensor([float("nan"), float("inf"), 1.00390625])
    total, product, negative, rounded = (torch.empty_like(x) for _ in range(4))
    less = torch.empty(1024, dtype=torch.int32)
    arithmetic_kernel[(1,)](x, y, total, product, negative, less, rounded, wide, SIZE=1024)
    assert torch.equal(total, x + y)
    assert torch.equal(product, x * y)
    assert torch.equal(negative, -x)
    assert torch.equal(less.bool(), x < y)
    torch.testing.assert_close(rounded, wide.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_a_bf16_product_accumulates_in_fp32() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 32, generator=generator).bfloat16()
    y = torch.randn(32, 32, generator=generator).bfloat16()
    out = torch.empty(32, 32)
    product_kernel[(1,)](x, y, out, SIZE=32)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=0, atol=5e-6)


def test_narrowing_every_pattern_gives_it_back() -> None:
    bits = np.arange(0x7F81, dtype=np.uint16)
    assert (interpreter.narrow(interpreter.widen(bits))[:-1] == bits[:-1]).all()
    assert interpreter.narrow(np.array([np.nan], dtype=np.float32)) == 0x7FC0
