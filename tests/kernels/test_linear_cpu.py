"""The packed linear layer against torch's own, packed and not."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernels import PackedLinear

DTYPES = (torch.float32, torch.bfloat16)


def weight_and_bias(dtype: torch.dtype, out: int = 96, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, width, generator=generator) / width**0.5
    return weight.to(dtype), torch.randn(out, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (7, 64), (130, 64), (2, 3, 64), (0, 64)], ids=str)
def test_packed_equals_fp64(shape: tuple[int, ...], with_bias: bool, dtype: torch.dtype) -> None:
    weight, bias = weight_and_bias(dtype)
    layer = PackedLinear(weight, bias if with_bias else None)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    result = layer(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    weight, bias = weight_and_bias(dtype)
    layer = PackedLinear(weight, bias)
    for shape in ((0, 64), (2, 0, 64), (0, 3, 64)):
        result = layer(torch.zeros(shape, dtype=dtype))
        assert (result.shape, result.dtype) == ((*shape[:-1], 96), dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize(
    "layout", ["vector", "columns", "every-other-row", "every-other-column", "transposed", "one-row"]
)
def test_any_layout_of_x_is_served(layout: str, dtype: torch.dtype) -> None:
    weight, bias = weight_and_bias(dtype)
    wide = torch.randn(10, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = {
        "vector": wide[0, :64],
        "columns": wide[:5, 20:84],
        "every-other-row": wide[::2, :64],
        "every-other-column": wide[:, :128:2],
        "transposed": wide.view(-1)[: 64 * 9].view(64, 9).t(),
        "one-row": wide[:1, :64].expand(5, 64),
    }[layout]
    result = PackedLinear(weight, bias)(x)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=20 * torch.finfo(dtype).eps)


def test_the_original_weight_may_change_after_packing() -> None:
    weight, _ = weight_and_bias(torch.float32)
    layer = PackedLinear(weight)
    if not layer.is_packed:
        pytest.skip("this processor packs nothing")
    x = torch.randn(3, 64)
    before = layer(x)
    weight.zero_()
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (1, 1), (33, 7), (70, 130)], ids=str)
def test_the_dense_weight_is_the_original_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = weight_and_bias(dtype, *shape)
    layer = PackedLinear(weight.clone(), bias)
    found = layer.dense_weight()
    assert found.dtype == dtype
    assert found.layout == torch.strided
    assert torch.equal(found, weight)
    if layer.is_packed:
        x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
        before = layer(x)
        found.zero_()
        assert torch.equal(layer(x), before), "the layer reads the tensor it handed out"


def test_the_dense_weight_may_be_asked_for_while_another_thread_multiplies() -> None:
    weight, bias = weight_and_bias(torch.float32, 256, 192)
    layer = PackedLinear(weight, bias)
    x = torch.randn(3, 192)
    expected = layer(x)
    with ThreadPoolExecutor(2) as pool:
        dense = [pool.submit(layer.dense_weight) for _ in range(50)]
        products = [layer(x) for _ in range(50)]
        assert all(torch.equal(future.result(), weight) for future in dense)
    assert all(torch.equal(product, expected) for product in products)


@pytest.mark.parametrize("is_built", [False, True])
def test_without_onednn_the_plain_weight_serves(is_built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: is_built)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    weight, bias = weight_and_bias(torch.float32)
    layer = PackedLinear(weight, bias)
    x = torch.randn(3, 64)
    assert not layer.is_packed
    assert torch.equal(layer(x), F.linear(x, weight, bias))


@pytest.mark.parametrize("operator", ["_reorder_linear_weight", "_linear_pointwise"])
def test_a_missing_private_operator_leaves_the_plain_weight(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise AttributeError(f"'_OpNamespace' 'mkldnn' object has no attribute '{operator}'")

    monkeypatch.setattr(torch.ops.mkldnn, operator, missing)
    weight, _ = weight_and_bias(torch.float32)
    layer = PackedLinear(weight)
    assert not layer.is_packed
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_private_operator_that_means_something_else_leaves_the_plain_weight(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = torch.ops.mkldnn._linear_pointwise.default

    def without_bias(x: torch.Tensor, weight: torch.Tensor, bias: object, *rest: object) -> torch.Tensor:
        return operator(x, weight, None, *rest)  # type: ignore[no-any-return]

    weight, bias = weight_and_bias(dtype)
    if not PackedLinear(weight, bias).is_packed:
        pytest.skip("this processor packs nothing")
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", SimpleNamespace(default=without_bias))
    layer = PackedLinear(weight, bias)
    assert not layer.is_packed
    x = torch.randn(3, 64).to(dtype)
    assert torch.equal(layer(x), F.linear(x, weight, bias))


@pytest.mark.parametrize("value", [0.0, 1.0, -3e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_weights_are_packed(value: float, dtype: torch.dtype) -> None:
    if not PackedLinear(weight_and_bias(dtype)[0]).is_packed:
        pytest.skip("this processor packs nothing")
    assert PackedLinear(torch.full((33, 4096), value, dtype=dtype)).is_packed


def test_other_dtypes_are_served_unpacked() -> None:
    weight, bias = weight_and_bias(torch.float64)
    layer = PackedLinear(weight, bias)
    x = torch.randn(3, 64, dtype=torch.float64)
    assert not layer.is_packed
    assert torch.equal(layer(x), F.linear(x, weight, bias))


def test_disagreeing_arguments_are_refused() -> None:
    weight, bias = weight_and_bias(torch.float32)
    layer = PackedLinear(weight)
    with pytest.raises(ValueError, match=r"weight has shape \[96\]"):
        PackedLinear(bias)
    with pytest.raises(ValueError, match=r"bias is torch.float32 \[95\], expected torch.float32 \[96\]"):
        PackedLinear(weight, bias[1:])
    with pytest.raises(ValueError, match=r"x is torch.float32 \[3, 63\], expected torch.float32 \[..., 64\]"):
        layer(torch.zeros(3, 63))
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16"):
        layer(torch.zeros(3, 64, dtype=torch.bfloat16))


def test_the_layer_says_what_it_is() -> None:
    weight, bias = weight_and_bias(torch.bfloat16)
    assert repr(PackedLinear(weight, bias)).startswith(
        "PackedLinear(in_features=64, out_features=96, bias=True, dtype=torch.bfloat16"
    )
