# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (Triton reads a kernel's signature itself: an annotation other than constexpr would change what it compiles.)
"""Kernels that break one rule each, to show that the judge sees it; and one that looks as bad and is not.

Run as `python -m tests.kernels.static.offenders`, without TRITON_INTERPRET: it prints, as JSON, the rules that each
breaks on each target.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Launch
from tests.kernels.static.configurations import Configuration
from tests.kernels.static.judge import broken_rules
from tests.kernels.static.machine_code import read
from tests.kernels.static.targets import GFX942, SM_90, Target, compile_for


@triton.jit
def scaled_product(
    x, w, out, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr
):
    """out = (2 x) @ w.T: the left side of the product is computed, so it is in registers."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    acc = tl.zeros((M, N), tl.float32)
    for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
        left = tl.load(x + m[:, None] * K + (step * BLOCK_K + k)[None, :])
        right = tl.load(w + n[None, :] * K + (step * BLOCK_K + k)[:, None])
        acc = tl.dot((left.to(tl.float32) * 2.0).to(tl.bfloat16), right, acc)
    tl.store(out + m[:, None] * N + n[None, :], acc)


@triton.jit
def plain_product(
    x, w, out, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr
):
    """out = x @ w.T"""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    acc = tl.zeros((M, N), tl.float32)
    for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
        left = tl.load(x + m[:, None] * K + (step * BLOCK_K + k)[None, :])
        right = tl.load(w + n[None, :] * K + (step * BLOCK_K + k)[:, None])
        acc = tl.dot(left, right, acc)
    tl.store(out + m[:, None] * N + n[None, :], acc)


@triton.jit
def product_by_sums(x, w, out, K: tl.constexpr, N: tl.constexpr):
    """out = w @ x, without a matrix instruction."""
    n, k = tl.arange(0, N), tl.arange(0, K)
    right = tl.load(w + n[:, None] * K + k[None, :]).to(tl.float32)
    tl.store(out + n, tl.sum(right * tl.load(x + k).to(tl.float32)[None, :], 1))


@triton.jit
def strided_copy(x, out, stride, N: tl.constexpr):
    """out = every stride-th value of x."""
    n = tl.arange(0, N)
    tl.store(out + n, tl.load(x + n * stride))


def offenders(target: Target) -> Iterator[tuple[str, Configuration]]:
    """What each does wrong, and the launch."""

    def launch(kernel: Any, *arguments: Any, **constants: Any) -> Configuration:
        return Configuration("", "", Launch(kernel, 1, arguments, {**constants, "num_warps": 4}))

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, w, out = empty(256, 4096), empty(256, 4096), empty(256, 256, dtype=torch.float32)
    tile = {"K": 4096, "M": 64, "N": 64, "BLOCK_K": 64}
    yield "pipelined register product", launch(scaled_product, x, w, out, **tile, STAGES=3)
    yield "register product", launch(scaled_product, x, w, out, **tile, STAGES=1)
    yield "shared memory", launch(plain_product, x, w, out, **{**tile, "M": 16, "N": 16, "BLOCK_K": 1024}, STAGES=5)
    yield "no matrix instruction", launch(product_by_sums, x, w, out, K=1024, N=16)
    if target.backend == "cuda":
        # AMD's compiler has no such option.
        yield "spill", launch(product_by_sums, x, w, out, K=1024, N=16, maxnreg=32)
    yield "2-byte access", launch(strided_copy, x, empty(4096), 3, N=1024)


def broken(target: Target) -> dict[str, list[str]]:
    """The rules each breaks on a target."""
    return {
        name: broken_rules(configuration, read(compile_for(target, configuration.launch), target), target)
        for name, configuration in offenders(target)
    }


if __name__ == "__main__":
    print(json.dumps({target.name: broken(target) for target in (SM_90, GFX942)}))
