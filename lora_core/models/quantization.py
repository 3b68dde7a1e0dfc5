"""Weight-only quantisation of linear layers through torchao; everything that knows torchao is here.

int8: one scale for each output row, symmetric (`Int8WeightOnlyConfig`, torchao's default). int4: a scale and a zero for
each group along the input, in the packed order of torch's CPU kernel (`PrototypeInt4WeightOnlyConfig`: the packing
formats of `Int4WeightOnlyConfig` itself need another device). Both treat each output row by itself, so a fused weight
quantises as its projections would apart. Activations are never quantised.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lora_core.config import Quantization
from lora_core.errors import ConfigError

logger = logging.getLogger(__name__)

INT4_GROUP_SIZES = (128, 64, 32)
"""Inputs that share a scale, best first: torchao's default is 128, and its CPU kernel has these."""

_INT4_ROWS = 16
"""The CPU kernel takes output rows in multiples of this."""

_INT4_BLOCK_ROWS = 64
"""Packed int4 weights are independent in blocks of so many rows: 64, 32 or 16 by processor, whose multiple it is."""


class WeightQuantizer:
    """Quantises linear layers, all of one model in the same way, and gives back what their weights stand for.

    Attributes:
        quantization: "int8" or "int4".
        group_size: Inputs that share a scale; None is all of a row's.
    """

    def __init__(self, quantization: Quantization, group_size: int | None) -> None:
        """Import torchao, which takes seconds, and prepare.

        Raises:
            ConfigError: the torchao installed has no such quantisation.
        """
        self.quantization = quantization
        self.group_size = group_size
        self._config = _torchao_config(quantization, group_size)

    def quantize_(self, layer: nn.Linear) -> None:
        """Replace the weight of one layer, as `F.linear` multiplies with it; the plain one is freed if no one holds it.

        Args:
            layer: Its weight `[out_features, in_features]` is one that `plan_quantization` has seen.
        """
        from torchao.quantization import quantize_

        plain = type(layer.weight)
        quantize_(layer, self._config)
        # torchao logs a weight that it cannot quantise, and leaves it as it is.
        assert type(layer.weight) is not plain, f"torchao left a weight {tuple(layer.weight.shape)} unquantised"

    def dense(self, weight: Tensor) -> Tensor:
        """What a quantised weight stands for: a new tensor `[out_features, in_features]` of the layer's dtype.

        Nothing is kept. Any thread may ask while others multiply.
        """
        if self.quantization == "int8":
            dense: Tensor = weight.dequantize()
            return dense
        return _dense_int4(weight)


def plan_quantization(
    quantization: Quantization, shapes: Mapping[str, tuple[int, int]], *, dtype: torch.dtype, device: torch.device
) -> WeightQuantizer | None:
    """Choose how to quantise layers, having checked that each can be.

    The int4 group is the largest of `INT4_GROUP_SIZES` that divides the inputs of every layer.

    Args:
        quantization: The setting.
        shapes: `(out_features, in_features)` of the layers to quantise, by name.
        dtype: Of their weights and inputs.
        device: Where they run.

    Returns:
        None for "none".

    Raises:
        ConfigError: a layer, the device or the torchao installed cannot serve it; the setting is named.
    """
    if quantization == "none":
        return None
    if quantization == "int8":
        return WeightQuantizer("int8", None)
    if device.type != "cpu":
        raise ConfigError(
            f"quantization is 'int4' and device is {device.type!r}; int4 is served on the cpu only: "
            "set quantization to 'int8' or 'none', or device to 'cpu'"
        )
    if dtype != torch.bfloat16:
        logger.warning("int4 weights multiply many times faster in bfloat16 than in %s; set dtype: bfloat16", dtype)
    return WeightQuantizer("int4", _int4_group_size(shapes))


def _int4_group_size(shapes: Mapping[str, tuple[int, int]]) -> int:
    smallest = min(INT4_GROUP_SIZES)
    for name, (out_features, in_features) in shapes.items():
        for what, found, divisor in (("in", in_features, smallest), ("out", out_features, _INT4_ROWS)):
            if found % divisor:
                raise ConfigError(
                    f"quantization is 'int4', and {name} of the base model has {what}_features {found}, "
                    f"expected a multiple of {divisor}: set quantization to 'int8' or 'none'"
                )
    return next(size for size in INT4_GROUP_SIZES if all(shape[1] % size == 0 for shape in shapes.values()))


def _torchao_config(quantization: Quantization, group_size: int | None) -> Any:
    # By default torchao also changes torch's precision of fp32 products, for the whole process.
    options: dict[str, Any] = {"set_inductor_config": False}
    try:
        if quantization == "int8":
            from torchao.quantization import Int8WeightOnlyConfig

            return Int8WeightOnlyConfig(**options)
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=group_size, **options)
    except ImportError as error:
        raise ConfigError(
            f"quantization is {quantization!r}, which the torchao installed does not have ({error}); "
            "install torchao 0.18, or set quantization to 'none'"
        ) from error


def _dense_int4(weight: Any) -> Tensor:
    """`(q - 8) * scale + zero` of a weight in the CPU kernel's packed order, which torchao cannot dequantise itself."""
    rows, columns = weight.shape
    group_size = weight.block_size[1]
    # [groups, rows, 2]
    scales, zeros = weight.scale_and_zero.float().unbind(-1)
    dense = torch.empty(rows, columns, dtype=weight.dtype, device=weight.device)
    orders: dict[int, Tensor] = {}
    for start in range(0, rows, _INT4_BLOCK_ROWS):
        block = slice(start, min(start + _INT4_BLOCK_ROWS, rows))
        num_rows = block.stop - start
        if num_rows not in orders:
            orders[num_rows] = _packed_order(num_rows, columns)
        values = torch.empty(num_rows * columns)
        values[orders[num_rows]] = _nibbles(weight.qdata[block]).float()
        grouped = values.view(num_rows, -1, group_size) - 8
        grouped *= scales[:, block].T[:, :, None]
        grouped += zeros[:, block].T[:, :, None]
        dense[block] = grouped.view(num_rows, columns)
    return dense


def _packed_order(rows: int, columns: int) -> Tensor:
    """Which element of a row-major matrix each nibble of its packed form is.

    The order is the processor's own, so it is asked for: the elements' numbers are packed, four bits at a time.
    """
    numbers = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    order = torch.zeros(rows * columns, dtype=torch.int64)
    for shift in range(0, (rows * columns).bit_length(), 4):
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((numbers >> shift) & 15, 1)
        order |= _nibbles(packed).long() << shift
    return order


def _nibbles(packed: Tensor) -> Tensor:
    """Low and high half of each byte, one after the other: uint8 `[2 * bytes]`."""
    return torch.stack((packed & 15, packed >> 4), -1).view(-1)
