"""The base model's layers as its checkpoint has them, for adapters that are checked where no rank has whole layers."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_core.canary import canary_ids, canary_values
from lora_core.module_weights import BaseWeight
from lora_core.tensor_keys import EMBEDDING_MODULE, HEAD_MODULE

_PREFIX = "model."


class CheckpointModules:
    """Weights and canary outputs of a base model's layers, by normalised module name.

    Implements `lora_core.module_weights.BaseModules`, as `ModelBaseModules` does for a model that is whole on one
    device: with the same weights, rounded to the same data type. They are taken from the mapped files when they are
    asked for. Any thread may ask.
    """

    def __init__(self, checkpoint: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Take the weights from a checkpoint.

        Args:
            checkpoint: Its tensors by name, projections apart; not to be changed. Without a head, the embedding is it.
            dtype: The base model's data type.
        """
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._lock = threading.Lock()
        self._canaries: dict[str, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def open_weight(self, module: str) -> Iterator[BaseWeight]:
        """The weight of a module, until the block ends. Raises KeyError: the model has no such module."""
        yield BaseWeight(self._tensor(module, "weight").to(self._dtype))

    def canary(self, module: str) -> tuple[Tensor, Tensor]:
        """A fixed input and the base's output for it, both kept after the first call; see `ModelBaseModules.canary`.

        Raises:
            KeyError: the model has no such module.
        """
        with self._lock:
            if module not in self._canaries:
                self._canaries[module] = self._run(module)
            return self._canaries[module]

    @torch.inference_mode()
    def _run(self, module: str) -> tuple[Tensor, Tensor]:
        weight = self._tensor(module, "weight").to(self._dtype)
        if module == EMBEDDING_MODULE:
            ids = canary_ids(len(weight))
            return ids, F.embedding(ids, weight)
        x = canary_values(weight.shape[1], self._dtype)
        bias = self._checkpoint.get(f"{_PREFIX}{module}.bias")
        return x, F.linear(x.to(self._dtype)[None], weight, None if bias is None else bias.to(self._dtype))[0]

    def _tensor(self, module: str, parameter: str) -> Tensor:
        if module == HEAD_MODULE:
            head = self._checkpoint.get(f"{HEAD_MODULE}.{parameter}")
            return self._tensor(EMBEDDING_MODULE, parameter) if head is None else head
        return self._checkpoint[f"{_PREFIX}{module}.{parameter}"]
