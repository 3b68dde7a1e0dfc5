"""What a wrapped model takes beside its own inputs: the step's routing and the slot tensors, in one fixed order."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from kernels import Routing, build_routing
from lora_core.layers import lora_layers
from lora_core.module_weights import AdapterTensors
from lora_core.parallel.slot_split import JointWrite, SlotSplit
from lora_core.routing import routing_triple
from lora_core.slot_write import SlotWrite
from lora_core.stacks import SlotStacks, TensorSpec

NUM_ROUTING_INPUTS = 3

_ALIGN_BYTES = 64
"""A cache line, where torch starts its own tensors too."""


class LoRAInputs:
    """Declares, allocates and binds a model's LoRA inputs: 3 routing tensors, then one stack per slot tensor.

    The routing tensors are int32: the slot of each group `[max_groups]` (-1 past the last group), the first row of each
    group `[max_groups + 1]` (the end of the last group past it), and the number of rows that carry LoRA `[1]`.

    Attributes:
        specs: What each tensor must be, in order.
    """

    def __init__(
        self, stacks: SlotStacks, max_groups: int, device: torch.device, split: SlotSplit | None = None
    ) -> None:
        """Declare.

        Args:
            stacks: The slots of this rank.
            max_groups: Most runs of equal slot in one batch.
            device: Where the tensors are.
            split: Where slots are divided among ranks: what is written here is written on all of them.
        """
        self.specs: tuple[TensorSpec, ...] = (
            TensorSpec("lora_ids", (max_groups,), torch.int32),
            TensorSpec("lora_grouped_offsets", (max_groups + 1,), torch.int32),
            TensorSpec("lora_end", (1,), torch.int32),
            *stacks.specs,
        )
        self._stacks = stacks
        self._split = split
        self._max_groups = max_groups
        self._device = device
        self._bound: tuple[Tensor, ...] = ()
        self._zeros: list[Tensor] = []
        self._model: nn.Module | None = None

    def buffers(self) -> list[Tensor]:
        """The bound tensors or, before there are any, new ones of zeros."""
        if self._bound:
            return list(self._bound)
        # They are written in and out of inference mode, which a tensor created inside it does not allow.
        with torch.inference_mode(False):
            self._zeros = [_zeros(spec, self._device) for spec in self.specs]
        return list(self._zeros)

    def bind(self, tensors: Sequence[Tensor], residents: Iterable[tuple[int, AdapterTensors]]) -> None:
        """Make these the model's inputs, and write the adapters that have slots into them.

        Raises:
            ValueError: their number, or the shape, data type or device of one, is not that of `specs`.
        """
        self._check(tensors)
        self._bound = tuple(tensors)
        # Zeros need not be cleared, which would make all of them take memory.
        are_zero = len(self._zeros) == len(tensors) and all(map(_is_untouched, self._zeros, tensors))
        self._zeros = []
        self._stacks.bind(self._bound[NUM_ROUTING_INPUTS:], are_zero=are_zero)
        self._bind_layers()
        for slot, adapter in residents:
            self.write(slot, adapter)

    def bind_model(self, model: nn.Module) -> None:
        """Bind the LoRA layers of this model, now or as soon as there are tensors."""
        self._model = model
        self._bind_layers()

    def begin_write(self, slot: int, adapter: AdapterTensors) -> SlotWrite | JointWrite:
        """Start to make the slot hold exactly this adapter; without bound tensors it is done, and `bind` will do it.

        The slot is live in no layer until the write is complete. An abandoned write leaves unknown content, which the
        next write of the slot covers.

        Raises:
            ValueError: a tensor of the adapter does not fit its place.
        """
        if not self._bound:
            return SlotWrite((), 0, lambda: None)
        if self._split is None:
            return self._stacks.begin_write(slot, adapter)
        return self._split.begin_write(slot, adapter, self._stacks)

    def write(self, slot: int, adapter: AdapterTensors) -> None:
        """Begin a write and complete it at once."""
        self.begin_write(slot, adapter).advance(None)

    def mark(self, slot: int, sites: Set[int], gain_sites: Set[int]) -> None:
        """See `SlotStacks.mark`."""
        self._stacks.mark(slot, sites, gain_sites)

    def route(
        self,
        slots: Sequence[int | None],
        row_offsets: Sequence[int],
        slot_ranks: Sequence[int],
        device: torch.device,
        *,
        one_launch: bool,
        num_rows: int | None = None,
        into: Tensor | None = None,
    ) -> Routing:
        """Route the rows of a sorted batch to slots, through the bound routing tensors if there are some.

        Args:
            slots: Of each request; None for the base model.
            row_offsets: First row of each request and, last, the number of rows.
            slot_ranks: True rank of each slot's adapter.
            device: Where the step runs.
            one_launch: See `build_routing`.
            num_rows: Rows of the step, those included that pad it; unset: those of the requests.
            into: See `build_routing`.

        Raises:
            ValueError: the batch is not sorted.
        """
        tokens = [stop - start for start, stop in pairwise(row_offsets)]
        lora_ids, grouped_offsets, _ = routing_triple(list(zip(slots, tokens, strict=True)))
        routing = build_routing(
            lora_ids,
            grouped_offsets,
            slot_ranks,
            num_rows=int(row_offsets[-1]) if num_rows is None else num_rows,
            max_groups=self._max_groups,
            device=device,
            one_launch=one_launch,
            into=into,
        )
        return self.bind_routing(routing)

    def full_routing(self, num_rows: int, rank: int, device: torch.device, *, one_launch: bool) -> Routing:
        """A routing of a step whose rows all use the first slot, of the largest rank; it has a buffer of its own."""
        return build_routing(
            [0],
            [0, num_rows],
            [rank] * self._stacks.num_slots,
            num_rows=num_rows,
            max_groups=self._max_groups,
            device=device,
            one_launch=one_launch,
        )

    def bind_routing(self, routing: Routing) -> Routing:
        """Write a step's routing triple into the bound routing tensors, and make them the routing's own."""
        if not self._bound:
            return routing
        lora_ids, grouped_offsets, end = self._bound[:NUM_ROUTING_INPUTS]
        # Offsets past the last group repeat the end.
        triple = [routing.lora_ids, routing.grouped_offsets, routing.grouped_offsets[-1:]]
        torch._foreach_copy_([lora_ids, grouped_offsets, end], triple)
        return replace(routing, lora_ids=lora_ids, grouped_offsets=grouped_offsets)

    def _bind_layers(self) -> None:
        if self._model is None or not self._bound:
            return
        for (_, layer), stacks in zip(lora_layers(self._model), self._stacks.bound, strict=True):
            layer.stacks = stacks

    def _check(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != len(self.specs):
            raise ValueError(
                f"{len(tensors)} LoRA inputs given, expected {len(self.specs)}: "
                f"{NUM_ROUTING_INPUTS} routing tensors and {len(self._stacks.specs)} stacks"
            )
        for tensor, spec in zip(tensors, self.specs, strict=True):
            found = (tuple(tensor.shape), tensor.dtype, tensor.device.type)
            expected = (spec.shape, spec.dtype, self._device.type)
            if found != expected:
                raise ValueError(f"LoRA input {spec.name!r} has (shape, dtype, device) {found}, expected {expected}")


def _zeros(spec: TensorSpec, device: torch.device) -> Tensor:
    """Zeros that take memory on the CPU only where they are written: slots are many, and large with a vocabulary."""
    if device.type != "cpu":
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    num_bytes = prod(spec.shape) * spec.dtype.itemsize
    # numpy asks the system for zeroed pages, torch fills them.
    block = np.zeros(num_bytes + _ALIGN_BYTES, dtype=np.uint8)
    start = -block.ctypes.data % _ALIGN_BYTES
    return torch.from_numpy(block[start : start + num_bytes]).view(spec.dtype).view(spec.shape)


def _is_untouched(zeros: Tensor, given: Tensor) -> bool:
    """Whether a tensor is one of the zeros that were handed out, and nobody has written to it since."""
    return given is zeros and given._version == 0
