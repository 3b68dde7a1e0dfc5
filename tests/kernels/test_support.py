"""Devices without Triton kernels: named, warned of once, and served in plain torch."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import (
    GATED_ACTIVATIONS,
    Routing,
    build_routing,
    reference,
    scale_rows,
    sgmv,
    sgmv_embed,
    sgmv_expand,
    sgmv_shrink,
    sgmv_swiglu,
    support,
)
from tests.kernels.cases import Case, make_case

CPU = torch.device("cpu")
META = torch.device("meta")


def on_device_without_triton(dtype: torch.dtype) -> Case:
    """A batch as such a device has it: no tile table, and stacks in the activations' dtype; here on the CPU."""
    case = make_case(
        [(2, 1), (0, 12)],
        ranks=[5, 3, 12],
        max_rank=12,
        in_features=40,
        slices=(24, 24),
        dtype=dtype,
        base_rows=3,
        device=CPU,
    )
    return replace(
        case,
        a_stack=case.a_stack.to(dtype),
        b_stack=case.b_stack.to(dtype),
        routing=replace(case.routing, path="torch"),
    )


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is known of any device, nor said."""
    for remembered in (support.triton_fault, support.warn_of_fallback):
        remembered.cache_clear()
    yield
    for remembered in (support.triton_fault, support.warn_of_fallback):
        remembered.cache_clear()


def test_old_gpus_are_named() -> None:
    assert support.cuda_fault((8, 0)) is None
    assert support.cuda_fault((12, 1)) is None
    assert support.cuda_fault((7, 5)) == "its compute capability is 7.5, the kernels need 8.0 or later"
    assert support.hip_fault("gfx942:sramecc+:xnack-") is None
    assert support.hip_fault("gfx906:sramecc+") == (
        "its architecture is gfx906, the kernels need gfx90a, gfx942, gfx950"
    )


@pytest.mark.parametrize("kind", ["mps", "xpu", "meta"])
def test_devices_that_are_no_gpu_of_cuda_or_hip_are_named(kind: str) -> None:
    fault = support.triton_fault(torch.device(kind))
    assert fault is not None
    assert f"{kind!r}" in fault
    assert not support.can_launch_dependently(torch.device(kind))


def test_a_gpu_is_judged_by_what_is_installed(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 7)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    if not torch.version.hip:
        assert support.triton_fault(cuda) == support.cuda_fault((7, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    support.triton_fault.cache_clear()
    fault = support.triton_fault(cuda)
    assert fault is not None
    assert "triton is not installed" in fault


def test_one_warning_says_why(fresh: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kernels.support"):
        routings = [
            build_routing([0], [0, 2], [4], num_rows=3, max_groups=1, device=META, one_launch=True) for _ in range(3)
        ]
        routings.append(routings[0].select([1, 2]))
    assert [record.getMessage() for record in caplog.records] == [
        "adapters and attention on meta run in plain torch, which is slow: there are no kernels for devices of type "
        "'meta', only for cuda (NVIDIA and AMD)"
    ]
    assert [(routing.path, routing.tiles, routing.counters) for routing in routings] == [("torch", None, None)] * 4
    assert routings[0].stack_dtype(torch.bfloat16) is torch.bfloat16


def test_a_supported_gpu_has_a_tile_table(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys.modules["kernels.schedule"], "triton_fault", lambda device: None)
    routing = build_routing([0], [0, 2], [4], num_rows=3, max_groups=1, device=META)
    assert routing.tiles is not None
    assert routing.path == "triton"
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_plain_torch_equals_the_reference(dtype: torch.dtype) -> None:
    case = on_device_without_triton(dtype)
    case.check()
    y = case.y.clone()
    planes = sgmv_shrink(case.x, case.a_stack, case.routing, 2)
    sgmv_expand(planes, case.b_stack, y, case.routing, case.slices)
    assert torch.equal(y, case.expected())
    for activation in GATED_ACTIVATIONS:
        case.check_gated(activation)


def test_plain_torch_embeds_and_scales() -> None:
    case = on_device_without_triton(torch.bfloat16)
    ids = torch.arange(16) % 7
    table = torch.ones(3, 7, 12, dtype=torch.bfloat16)
    gain = torch.full((3, 48), 0.5)

    def run(embed: Callable[..., None], scale: Callable[..., None], routing: Routing) -> Tensor:
        y = case.y.clone()
        scale(y, gain, None, routing)
        embed(ids, table, case.b_stack, y, routing)
        return y

    expected = run(reference.sgmv_embed, reference.scale_rows, case.routing)
    assert torch.equal(run(sgmv_embed, scale_rows, case.routing), expected)
    assert not torch.equal(expected[:13], case.y[:13])
    assert torch.equal(expected[13:], case.y[13:])


def test_the_stacks_dtype_follows_the_path() -> None:
    case = on_device_without_triton(torch.bfloat16)
    wide_a, wide_b = case.a_stack.float(), case.b_stack.float()
    with pytest.raises(ValueError, match=r"a_stack is torch.float32 and x torch.bfloat16, expected .* torch.bfloat16"):
        sgmv(case.x, wide_a, wide_b, case.y, case.routing, case.slices)
    with pytest.raises(ValueError, match=r"a_stack torch.float32 .* stacks in torch.bfloat16"):
        sgmv_embed(torch.zeros(16, dtype=torch.int64), torch.zeros(3, 7, 12), wide_b, case.y, case.routing)
    half, on_cpu = on_device_without_triton(torch.float16), replace(case.routing, path="cpu")
    with pytest.raises(ValueError, match=r"a_stack is torch.float16 and x torch.float16, expected .* torch.float32"):
        sgmv_swiglu(half.x, half.a_stack, half.b_stack, half.y, on_cpu)
