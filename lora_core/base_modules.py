"""The base model's layers by PEFT module, as adapters are checked and converted against them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lora_core.canary import canary_ids, canary_values
from lora_core.layers import LoRALayer, lora_layers
from lora_core.module_weights import BaseWeight

_UNPACKED_BYTES = 2**28
"""Memory for unpacked weights at a time; one that is larger has it to itself."""


class _Part(NamedTuple):
    """The rows of a layer's output that are one PEFT module's."""

    layer: LoRALayer
    start: int
    stop: int


class ModelBaseModules:
    """Weights and canary outputs of a wrapped model's layers, by normalised module name.

    Implements `lora_core.module_weights.BaseModules`. Any thread may ask, also while another runs the model: the layers
    are only read.
    """

    def __init__(self, model: nn.Module) -> None:
        """Look at the LoRA layers of a wrapped model, whose weights are loaded."""
        self._parts = {name: part for _, layer in lora_layers(model) for name, part in _parts(layer)}
        floats = (p for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
        anchor = next(floats, torch.empty(0))
        self._dtype, self._device = anchor.dtype, anchor.device
        self._lock = threading.Lock()
        self._unpacked = _Room(_UNPACKED_BYTES)
        self._canaries: dict[str, tuple[Tensor, Tensor]] = {}
        self._stream = _side_stream(self._device)

    @contextmanager
    def open_weight(self, module: str) -> Iterator[BaseWeight]:
        """The weight of a module, until the block ends.

        Of a layer that stores its weight in another order or quantised it is an unpacked copy of the whole layer's, in
        the base dtype. Such copies take bounded memory however many threads ask: some wait for others' blocks to end,
        so a thread must not open a second one in its block.

        Raises:
            KeyError: the model has no such module, or no adapter may change it.
        """
        layer, start, stop = self._parts[module]
        is_stored = getattr(layer.base, "has_dense_weight", True)
        num_bytes = layer.site.in_features * layer.site.out_features * self._dtype.itemsize
        with nullcontext() if is_stored else self._unpacked.take(num_bytes):
            # Not inference mode: quantised tensors cannot be detached in it.
            with torch.no_grad(), torch.cuda.stream(self._stream):
                unpack = getattr(layer.base, "dense_weight", None)
                dense = layer.get_parameter("weight") if unpack is None else unpack()
            yield BaseWeight(dense if layer.site.kind == "embedding" else dense[start:stop], self._stream)

    def canary(self, module: str) -> tuple[Tensor, Tensor]:
        """A fixed input and the base's output for it, both kept after the first call.

        Inputs depend on the layer's input width alone: values of unit mean square or, of the embedding, ids spread over
        the vocabulary.

        Returns:
            fp32 `[in]` (of the embedding: int64 token ids `[n]`), and `[out]` (`[n, hidden]`) in the base dtype, on the
            CPU. Neither is to be changed.

        Raises:
            KeyError: the model has no such module, or no adapter may change it.
        """
        layer, start, stop = self._parts[module]
        with self._lock:
            if layer.site.name not in self._canaries:
                x = self._input(layer)
                self._canaries[layer.site.name] = x, self._run(layer, x)
            x, y = self._canaries[layer.site.name]
        return (x, y) if layer.site.kind == "embedding" else (x, y[start:stop])

    def _input(self, layer: LoRALayer) -> Tensor:
        width = layer.site.in_features
        return canary_ids(width) if layer.site.kind == "embedding" else canary_values(width, self._dtype)

    def _run(self, layer: LoRALayer, x: Tensor) -> Tensor:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if layer.site.kind == "embedding":
                return layer.base(x.to(self._device)).cpu()
            return layer.base(x.to(self._device, self._dtype)[None])[0].cpu()


class _Room:
    """So many bytes, which threads take parts of and give back."""

    def __init__(self, num_bytes: int) -> None:
        self._size = num_bytes
        self._num_taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[None]:
        """Wait for room, or to be alone if there will never be enough, and have it until the block ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_taken == 0 or self._num_taken + num_bytes <= self._size)
            self._num_taken += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._num_taken -= num_bytes
                self._changed.notify_all()


def _parts(layer: LoRALayer) -> list[tuple[str, _Part]]:
    parts, start = [], 0
    for name, width in zip(layer.site.modules, layer.site.slices, strict=True):
        parts.append((name, _Part(layer, start, start + width)))
        start += width
    return parts


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream behind everything that is queued to load weights; from there on it runs beside the steps."""
    if device.type != "cuda":
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
