"""The slot tensors: for every adapted layer, a stack of A matrices, one of B matrices and one of gains, a slot each."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.schedule import cpu_stack_dtype
from lora_core.module_weights import AdapterTensors, ModuleWeights
from lora_core.slot_write import Move, Mover, SlotWrite, make_moves
from lora_core.targets import LoRASite
from lora_core.types import LoRAType

STACKS_PER_SITE = 3

_GAIN_DTYPE = torch.float32


def stack_dtype(base_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Data type of A and B in the slots of a device, for a base model's."""
    return cpu_stack_dtype(base_dtype) if device.type == "cpu" else base_dtype


class TensorSpec(NamedTuple):
    """What a tensor must be to be bound."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class SiteStacks:
    """The slot tensors of one site, and which of their slots hold something.

    Attributes:
        a: `[N, S*R, K]`; of the embedding `[N, vocab, R]`.
        b: `[N, OUT, R]`.
        gain: fp32 `[N, OUT]`.
        live_slots: Slots whose adapter changes this layer. Every other slot adds nothing here.
        gain_slots: Those of them whose adapter scales the layer's output (DoRA).
    """

    a: Tensor
    b: Tensor
    gain: Tensor
    live_slots: frozenset[int] = frozenset()
    gain_slots: frozenset[int] = frozenset()


class _Filled(NamedTuple):
    """How much of a module's place in a slot may not be zero: so many ranks of A and B, and its gain."""

    rank: int
    has_gain: bool


_ZERO = _Filled(0, False)


class _Module(NamedTuple):
    """One PEFT module, and the part of a site that is its own.

    Attributes:
        name: Normalised name.
        site: Index of its site.
        in_features: Rows or columns of A that are not ranks.
        out_features: Rows of B, and gains.
        rank_axis: Dimension of A that counts ranks; B's is its last.
    """

    name: str
    site: int
    in_features: int
    out_features: int
    rank_axis: int

    def filled_by(self, weights: ModuleWeights, max_rank: int) -> _Filled:
        """What these weights fill of the place; raises ValueError if they do not fit."""
        a, b, gain = weights
        rank = a.shape[self.rank_axis]
        a_shape = (self.in_features, rank) if self.rank_axis else (rank, self.in_features)
        b_shape = (self.out_features, rank)
        # copy_ would broadcast a row over a whole block.
        fits = a.shape == a_shape and b.shape == b_shape and (gain is None or gain.shape == b_shape[:1])
        if not fits or rank > max_rank:
            found = [tuple(tensor.shape) for tensor in weights if tensor is not None]
            expected = [a_shape, b_shape, b_shape[:1]][: len(found)]
            raise ValueError(f"{self.name} has tensors {found}, its slot holds {expected} of a rank up to {max_rank}")
        return _Filled(rank, gain is not None)


class _Place:
    """A module's part of one slot: all ranks of A and B, and the gain."""

    def __init__(self, a: Tensor, b: Tensor, gain: Tensor, rank_axis: int) -> None:
        self.gain = gain
        self._pair = (a, b)
        self._axes = (rank_axis, 1)
        self._first = self._pair
        self._num_first = b.shape[1]

    def ranks(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Some ranks of A and B."""
        # Views made inside inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            a, b = (part.narrow(axis, start, stop - start) for part, axis in zip(self._pair, self._axes, strict=True))
        return a, b

    def first_ranks(self, rank: int) -> tuple[Tensor, Tensor]:
        """The first ranks of A and B; kept for the next adapter, as views take longer to make than small copies."""
        if rank != self._num_first:
            self._first, self._num_first = self.ranks(0, rank), rank
        return self._first


class SlotStacks:
    """Slot tensors of every site, in site order: A, B, then the gains.

    Layout, with N slots, rank R (the largest an adapter may have) and S projections fused at a site:
        A `[N, S*R, K]`: rows `p*R:(p+1)*R` of a slot are projection p's A; of the embedding `[N, vocab, R]`
        B `[N, OUT, R]`: output rows of projection p are projection p's B, which already holds the scale
        gain fp32 `[N, OUT]`: factors on the base's output, less one
    Ranks of a slot past its adapter's are zero.
    """

    def __init__(
        self,
        sites: Sequence[LoRASite],
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        *,
        mover: Mover = make_moves,
    ) -> None:
        """Bind nothing yet.

        Args:
            sites: Where the slots are.
            num_slots: N.
            rank: R.
            dtype: Of A and B.
            mover: What writes to the bound tensors.
        """
        self.specs = [spec for site in sites for spec in _site_specs(site, num_slots, rank, dtype)]
        self.bound: list[SiteStacks] = []
        """Of each site; empty before `bind`."""
        self._sites = tuple(sites)
        self._modules = [
            _Module(name, site.index, site.in_features, width, int(site.kind == "embedding"))
            for site in sites
            for name, width in zip(site.modules, site.slices, strict=True)
        ]
        self._mover = mover
        self.num_slots = num_slots
        self._rank = rank
        self._itemsize = dtype.itemsize
        self._places: dict[int, list[_Place]] = {}
        # What each slot's modules fill, in their order. A slot that is absent has unknown content.
        self._filled: dict[int, list[_Filled]] = {}
        self._writes: dict[int, SlotWrite] = {}

    def bind(self, tensors: Sequence[Tensor], *, are_zero: bool = False) -> None:
        """Write to these tensors from now on. They must match `specs`; unless they are zero, what they hold is unknown.

        Writes in progress are abandoned.
        """
        for slot in list(self._writes):
            self._abandon(slot)
        triples = zip(*(tensors[kind::STACKS_PER_SITE] for kind in range(STACKS_PER_SITE)), strict=True)
        self.bound = [SiteStacks(a, b, gain) for a, b, gain in triples]
        self._places.clear()
        self._filled = dict.fromkeys(range(self.num_slots), [_ZERO] * len(self._modules)) if are_zero else {}

    def begin_write(self, slot: int, adapter: AdapterTensors) -> SlotWrite:
        """Start to make the slot hold exactly this adapter, zeros wherever it has no module.

        From here on the slot is live nowhere, until the write is complete; an earlier write of it is abandoned. Places
        that were zero and stay zero are not touched.

        Raises:
            ValueError: a tensor of the adapter does not fit its place; the slot is as it was.
        """
        weights = [adapter.module(module.name) for module in self._modules]
        after = [
            _ZERO if w is None else m.filled_by(w, self._rank) for m, w in zip(self._modules, weights, strict=True)
        ]
        self._abandon(slot)
        self._set_live(slot, ())
        before = self._filled.pop(slot, None) or [_Filled(self._rank, True)] * len(self._modules)

        def finish() -> None:
            del self._writes[slot]
            self._filled[slot] = after
            self._set_live(slot, after)

        moves, num_bytes = self._moves(slot, weights, before, after), self._num_bytes(before, after)
        write = SlotWrite(moves, num_bytes, finish, self._mover)
        self._writes[slot] = write
        return write

    def write(self, slot: int, adapter: AdapterTensors) -> None:
        """Begin a write and complete it at once. After an exception the next write of the slot covers all of it."""
        self.begin_write(slot, adapter).advance(None)

    def mark(self, slot: int, sites: Set[int], gain_sites: Set[int]) -> None:
        """Say which sites the slot's adapter changes, and where it scales the output; by index, no others."""
        for site, stacks in enumerate(self.bound):
            if (site in sites) != (slot in stacks.live_slots):
                stacks.live_slots ^= {slot}
            if (site in gain_sites) != (slot in stacks.gain_slots):
                stacks.gain_slots ^= {slot}

    def _abandon(self, slot: int) -> None:
        if (write := self._writes.pop(slot, None)) is not None:
            write.abandon()

    def _moves(
        self,
        slot: int,
        weights: Sequence[ModuleWeights | None],
        before: Sequence[_Filled],
        after: Sequence[_Filled],
    ) -> Iterator[Move]:
        rows = zip(self._slot_places(slot), weights, before, after, strict=True)
        for place, new_weights, old, new in rows:
            if new_weights is not None:
                a, b = place.first_ranks(new.rank)
                yield a, new_weights.a
                yield b, new_weights.b
                if new_weights.gain is not None:
                    yield place.gain, new_weights.gain
            if new.rank < old.rank:
                a, b = place.ranks(new.rank, old.rank)
                yield a, None
                yield b, None
            if old.has_gain and not new.has_gain:
                yield place.gain, None

    def _num_bytes(self, before: Sequence[_Filled], after: Sequence[_Filled]) -> int:
        """What `_moves` writes."""
        num_bytes = 0
        for module, old, new in zip(self._modules, before, after, strict=True):
            ranks = max(old.rank, new.rank)
            num_bytes += ranks * (module.in_features + module.out_features) * self._itemsize
            if old.has_gain or new.has_gain:
                num_bytes += module.out_features * _GAIN_DTYPE.itemsize
        return num_bytes

    def _slot_places(self, slot: int) -> list[_Place]:
        """Views of a slot's tensors, made once."""
        if slot not in self._places:
            self._places[slot] = [
                place
                for site, stacks in zip(self._sites, self.bound, strict=True)
                for place in _site_places(site, stacks, slot, self._rank)
            ]
        return self._places[slot]

    def _set_live(self, slot: int, filled: Sequence[_Filled]) -> None:
        """Say at every site whether the slot's adapter is there; nothing filled: it is nowhere."""
        parts = list(zip(self._modules, filled, strict=False))
        live = {module.site for module, part in parts if part != _ZERO}
        self.mark(slot, live, {module.site for module, part in parts if part.has_gain})


def _site_places(site: LoRASite, stacks: SiteStacks, slot: int, rank: int) -> list[_Place]:
    rank_axis = int(site.kind == "embedding")
    with torch.inference_mode(False):
        a_parts = [stacks.a[slot]] if rank_axis else torch.split(stacks.a[slot], rank)
        b_parts, gain_parts = (torch.split(stack[slot], list(site.slices)) for stack in (stacks.b, stacks.gain))
        return [_Place(*parts, rank_axis) for parts in zip(a_parts, b_parts, gain_parts, strict=True)]


def _site_specs(site: LoRASite, num_slots: int, rank: int, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    a_shape = (site.in_features, rank) if site.kind == "embedding" else (len(site.slices) * rank, site.in_features)
    return (
        TensorSpec(f"{site.name}.{LoRAType.A.value}", (num_slots, *a_shape), dtype),
        TensorSpec(f"{site.name}.{LoRAType.B.value}", (num_slots, site.out_features, rank), dtype),
        TensorSpec(f"{site.name}.{LoRAType.GAIN.value}", (num_slots, site.out_features), _GAIN_DTYPE),
    )
