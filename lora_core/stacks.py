"""The slot tensors: for every adapted layer, one stack of A matrices and one of B matrices, a slot each."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lora_core.targets import LoRASite
from lora_core.types import LoRAType


class TensorSpec(NamedTuple):
    """What a tensor must be to be bound."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class AdapterTensors(Protocol):
    """The tensors of one adapter."""

    def get(self, key: str) -> Tensor | None:
        """A `[R, in]` or B `[out, R]` under `layers.<n>.<path>.<projection>.lora_A.weight` (or B); None if absent."""
        ...


class SlotStacks:
    """Slot tensors of every site, in site order, A before B.

    Layout, with N slots, rank R (every adapter is padded to it) and S projections fused at a site:
        A `[N, S*R, K]`: rows `s*R:(s+1)*R` of a slot are projection s's A
        B `[N, OUT, R]`: output rows of projection s are projection s's B, which already holds the scale
    """

    def __init__(self, sites: Sequence[LoRASite], num_slots: int, rank: int, dtype: torch.dtype) -> None:
        self.specs = [spec for site in sites for spec in _site_specs(site, num_slots, rank, dtype)]
        self._sites = tuple(sites)
        self._rank = rank
        self._keys = [[(_key(module, LoRAType.A), _key(module, LoRAType.B)) for module in s.modules] for s in sites]
        self._tensors: list[Tensor] = []
        # Sites of each slot that are not zero. A slot that is absent has unknown content: all its sites are written.
        self._filled: dict[int, set[int]] = {}

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Write to these tensors from now on; what they hold is taken as unknown. They must match `specs`."""
        self._tensors = list(tensors)
        self._filled.clear()

    @torch.no_grad()
    def write(self, slot: int, adapter: AdapterTensors) -> None:
        """Make the slot hold exactly this adapter: zeros wherever the adapter has no module.

        Sites that were zero and stay zero are not touched. After an exception the slot's content is unknown, and the
        next write covers all of it.
        """
        before = self._filled.pop(slot, set(range(len(self._sites))))
        filled = set()
        for index, site in enumerate(self._sites):
            parts = [(adapter.get(a_key), adapter.get(b_key)) for a_key, b_key in self._keys[index]]
            is_filled = any(a is not None or b is not None for a, b in parts)
            if is_filled:
                filled.add(index)
            if is_filled or index in before:
                self._write_site(index, site, slot, parts)
        self._filled[slot] = filled

    def _write_site(
        self, index: int, site: LoRASite, slot: int, parts: Sequence[tuple[Tensor | None, Tensor | None]]
    ) -> None:
        a_rows = torch.split(self._tensors[2 * index][slot], self._rank)
        b_rows = torch.split(self._tensors[2 * index + 1][slot], list(site.slices))
        for (a, b), a_part, b_part in zip(parts, a_rows, b_rows, strict=True):
            _fill(a_part, a)
            _fill(b_part, b)


def _fill(destination: Tensor, source: Tensor | None) -> None:
    if source is None:
        destination.zero_()
    elif source.shape != destination.shape:
        # copy_ would broadcast a row over a whole block.
        raise ValueError(f"an adapter tensor has shape {list(source.shape)}, its slot {list(destination.shape)}")
    else:
        destination.copy_(source)


def _key(module: str, kind: LoRAType) -> str:
    return f"{module}.{kind.value}.weight"


def _site_specs(site: LoRASite, num_slots: int, rank: int, dtype: torch.dtype) -> tuple[TensorSpec, TensorSpec]:
    a_shape = (num_slots, len(site.slices) * rank, site.in_features)
    b_shape = (num_slots, sum(site.slices), rank)
    return (
        TensorSpec(f"{site.name}.{LoRAType.A.value}", a_shape, dtype),
        TensorSpec(f"{site.name}.{LoRAType.B.value}", b_shape, dtype),
    )
