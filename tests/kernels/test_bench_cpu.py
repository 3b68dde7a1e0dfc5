"""What the CPU benchmark times is right, and it notices what is not."""

import pytest
import torch

from kernels import reference
from tests.bench import bench_kernels_cpu
from tests.bench.lora_methods import Method, Ours, peers
from tests.bench.lora_points import Batch, all_points, small_points
from tests.bench.lora_weights import Weights


def test_every_method_equals_the_reference() -> None:
    assert bench_kernels_cpu.check() == {}


def test_a_wrong_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a reference that leaves out one slot, every method is wrong."""
    right = reference.sgmv

    def without_a_slot(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: object) -> None:
        a = a.clone()
        a[point.slots()[0]] = 0
        right(x, a, b, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "sgmv", without_a_slot)
    point = next(iter(small_points()))
    weights = Weights(bench_kernels_cpu.TINY_SITES, point.rank, point.slot_ranks, 1)
    methods: list[Method] = [Ours(weights), *peers(weights, point.dtype)]
    batch = Batch(point, weights.sites)
    wrong = bench_kernels_cpu.wrong_methods(methods, batch, point.step(), weights)
    assert len(wrong) == len(methods)


def test_the_points_cover_what_is_promised() -> None:
    points = list(all_points())
    assert len(set(points)) == len(points)
    assert {(point.rows, point.adapters) for point in points} == {
        (1, 1), (8, 1), (8, 4), (8, 8), (32, 8), (64, 8), (64, 64), (512, 8), (2048, 8)
    }  # fmt: skip
    assert {point.rank for point in points} == {8, 16, 64}
    assert any(point.base_rows for point in points)
    assert any(len(set(point.slot_ranks)) > 1 for point in points)
