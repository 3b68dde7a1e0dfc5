"""A linear layer on the CPU: in the blocked order oneDNN multiplies in, or widened where it does not multiply."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear_native import linear_function, linear_native
from kernels.support import cpu_multiplies

_EXPECTED_ROWS = 64
"""Rows oneDNN is told to choose the blocking for; 16 to 256 measured alike, 1 is slower from two rows on."""

_TOLERANCE = 0.03
"""Largest difference between the packed product and the plain one, as a part of the largest result or weight."""

_FEW_ROWS = 384
"""Rows up to which a weight of 16 bits is widened in the cache; more of them are worth a copy in fp32."""

_MAX_WIDENED = 1 << 22
"""Most elements of a widened part of a weight, and of what it gives: 16 MB."""


class PackedLinear:
    """`y = x @ weight.T + bias` with a prepacked weight: 1.2 to 2 times `F.linear` at decode batch sizes.

    The packing operators are private to torch (Inductor emits them). Where they are missing, refuse the weight, or get
    a first product wrong, the layer keeps the plain weight and calls `F.linear`.

    Unless that is of 16 bits and the processor does not multiply them (`cpu_multiplies`). Then weight and rows are
    widened, multiplied in fp32, and the result rounded once. SmolLM2 in bf16, which has three times the rate of
    `F.linear` so in decodes of 8 rows and six times in prompts, is up to twice as fast as packed in fp32.

    Attributes:
        in_features: Width of x.
        out_features: Width of y.
        dtype: Data type of weight, bias, x and y.
        is_packed: Whether the weight was packed. The original can then be freed: the layer holds its own copy.
        is_widened: Whether the weight is widened for each product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack a weight.

        Args:
            weight: `[out_features, in_features]`; fp32 or bf16 on the CPU to be packed, any other works unpacked.
            bias: `[out_features]` of the same dtype, or None.

        Raises:
            ValueError: weight is not a matrix, or bias disagrees with it.
        """
        if weight.dim() != 2:
            raise ValueError(f"weight has shape {list(weight.shape)}, expected [out_features, in_features]")
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        if bias is not None and (bias.shape != (self.out_features,) or bias.dtype != weight.dtype):
            raise ValueError(
                f"bias is {bias.dtype} {list(bias.shape)}, expected {weight.dtype} [{self.out_features}] as weight is"
            )
        self._bias = None if bias is None else bias.detach().contiguous()
        packed = _pack(weight.detach(), self._bias)
        self.is_packed = packed is not None
        is_on_cpu = weight.device.type == "cpu" and weight.numel() > 0
        self.is_widened = packed is None and is_on_cpu and not cpu_multiplies(weight.dtype)
        self._weight = weight.detach() if packed is None else packed
        self._is_native = self.is_widened and weight.is_contiguous() and linear_function(weight.dtype) is not None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` `[..., in_features]`, of the weight's dtype, to `[..., out_features]`.

        Raises:
            ValueError: x disagrees with the weight.
        """
        if x.shape[-1] != self.in_features or x.dtype != self.dtype:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}, expected {self.dtype} [..., {self.in_features}] as weight is"
            )
        if self.is_packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
            return y
        if not self.is_widened:
            return F.linear(x, self._weight, self._bias)
        if x.dim() == 2:
            return self._widened(x)
        return self._widened(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def _widened(self, rows: Tensor) -> Tensor:
        """Map `[rows, in_features]` to `[rows, out_features]`."""
        weight, bias, num_rows = self._weight, self._bias, rows.shape[0]
        if num_rows <= _FEW_ROWS:
            if not self._is_native:
                return F.linear(rows, weight, bias)
            return linear_native(rows if rows.stride(1) == 1 else rows.contiguous(), weight, bias)
        y = rows.new_empty(num_rows, self.out_features)
        wide = rows.float()
        step = max(1, _MAX_WIDENED // max(self.in_features, num_rows))
        for start in range(0, self.out_features, step):
            outs = slice(start, start + step)
            y[:, outs] = F.linear(wide, weight[outs].float(), None if bias is None else bias[outs].float())
        return y

    @property
    def bias(self) -> Tensor | None:
        """What is added to the product, not to be changed; None for nothing."""
        return self._bias

    def dense_weight(self) -> Tensor:
        """The weight `[out_features, in_features]`, bit for bit, in its usual order.

        Packed: a new tensor each time, which only the caller holds. Not packed: the layer's own, not to be changed.
        Any thread may ask while others multiply.
        """
        return self._weight.to_dense() if self.is_packed else self._weight

    def __repr__(self) -> str:
        return (
            f"PackedLinear(in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self._bias is not None}, dtype={self.dtype}, "
            f"is_packed={self.is_packed}, is_widened={self.is_widened})"
        )


def _pack(weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The weight in oneDNN's order, or None where this build or this processor cannot use it."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16) or weight.numel() == 0:
        return None
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):  # type: ignore[no-untyped-call]
        return None
    # Private operators may change without notice, in meaning too: one row is multiplied in both ways.
    row = torch.linspace(0.5, 1.5, weight.shape[1]).to(weight.dtype).unsqueeze(0)
    expected = F.linear(row, weight, bias)
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)
        found: Tensor = torch.ops.mkldnn._linear_pointwise.default(row, packed, bias, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    return packed if found.shape == expected.shape and _is_close(found, expected, weight) else None


def _is_close(found: Tensor, expected: Tensor, weight: Tensor) -> bool:
    """Whether two products with a weight differ by no more than roundings."""
    low, high = torch.aminmax(weight)
    allowed = _TOLERANCE * torch.stack([expected.abs().max(), low.abs(), high.abs()]).float().max()
    return bool((found.float() - expected.float()).abs().max() <= allowed)
