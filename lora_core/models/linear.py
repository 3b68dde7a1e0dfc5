"""The linear layers of a decoder, whose weights may be stored in other forms."""

import torch.nn.functional as F
from torch import Tensor, nn

from kernels.linear_cpu import PackedLinear
from lora_core.models.activations import gated
from lora_core.models.quantization import WeightQuantizer


class Linear(nn.Linear):
    """A linear layer whose weight can be quantised, or reordered for the CPU's matrix kernels."""

    _packed: PackedLinear | None = None
    _quantizer: WeightQuantizer | None = None

    def quantize(self, quantizer: WeightQuantizer) -> None:
        """Replace the weight by a quantised one, which is a parameter of the same name and shape."""
        assert self._packed is None, "a packed weight cannot be quantised"
        quantizer.quantize_(self)
        self._quantizer = quantizer

    def pack(self) -> None:
        """Replace the weight by a reordered copy; the layer has no `weight` parameter from now on.

        A quantised weight is in its own kernel's order already, and stays.
        """
        if self._quantizer is None:
            self._packed = PackedLinear(self.weight.detach(), None if self.bias is None else self.bias.detach())
            self.register_parameter("weight", None)

    @property
    def has_dense_weight(self) -> bool:
        """Whether `dense_weight` is the layer's own tensor, and takes no memory."""
        return self._quantizer is None and (self._packed is None or not self._packed.is_packed)

    def dense_weight(self) -> Tensor:
        """The weight the layer multiplies with, `[out_features, in_features]` in its dtype, however it is stored.

        Plain: the layer's own tensor, not to be changed. Packed or quantised: a new one, which only the caller holds.
        Any thread may ask while others multiply.
        """
        if self._packed is not None:
            return self._packed.dense_weight()
        weight = self.weight.detach()
        return weight if self._quantizer is None else self._quantizer.dense(weight)

    def forward(self, input: Tensor) -> Tensor:
        """Map `[T, in_features]` to a new tensor `[T, out_features]`."""
        if self._packed is not None:
            return self._packed(input)
        return F.linear(input, self.weight, self.bias)

    def gated(self, input: Tensor, activation: str) -> Tensor:
        """Map `[T, in_features]` to the gated activation `[T, out_features / 2]` of gate and up, side by side."""
        return gated(self(input), activation)
