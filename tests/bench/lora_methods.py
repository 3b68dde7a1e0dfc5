"""Ways to add many adapters' deltas to a layer's output on the CPU: this project's, and those of its peers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import Routing, sgmv
from kernels.sgmv_cpu import layer_cut
from tests.bench.lora_weights import Site, Weights


class Step(NamedTuple):
    """What a method is told once a step: its routing, and the activations' data type."""

    routing: Routing
    dtype: torch.dtype


class Method(Protocol):
    """A way to do it."""

    family: str
    """What the way is called."""
    form: str
    """Which of the ways of this family it is."""

    def prepare(self, step: Step) -> None:
        """What is computed once for all layers of a step."""
        ...

    def add(self, x: Tensor, y: Tensor, layer: int, site: int) -> None:
        """Add the deltas of a layer's site to y `[T, OUT]` in place, given x `[T, K]`."""
        ...


class Ours:
    """`kernels.sgmv`."""

    family = "ours"
    form = "sgmv"

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._shape: tuple[int, torch.dtype] | None = None
        self._checked: set[tuple[int, int]] = set()

    def prepare(self, step: Step) -> None:
        """Cut the groups anew, as each step does."""
        shape = step.routing.num_rows, step.dtype
        if shape != self._shape:
            self._shape, self._checked = shape, set()
        self._routing = replace(step.routing)
        for site in self._weights.sites:
            self._routing.loops(layer_cut(step.dtype, site.in_features, site.slices))

    def add(self, x: Tensor, y: Tensor, layer: int, site: int) -> None:
        """One call; its arguments are checked at the first of its shape, as a LoRA layer has it."""
        a, b = self._weights.in_dtype(x.dtype)[layer][site]
        key = layer, site
        sgmv(x, a, b, y, self._routing, self._weights.sites[site].slices, check=key not in self._checked)
        self._checked.add(key)


class Loop:
    """mm and addmm_ for each group and projection, on views of true rank; optionally one mm for all projections."""

    family = "loop"

    def __init__(self, weights: Weights, dtype: torch.dtype, *, one_shrink: bool) -> None:
        self.form = f"{_name(dtype)}{', one mm of A' if one_shrink else ''}"
        self._weights, self._dtype, self._one_shrink = weights, dtype, one_shrink
        self._stacks = weights.in_dtype(dtype)

    def prepare(self, step: Step) -> None:
        """The groups that have a rank."""
        self._end = step.routing.end
        ranks = step.routing.slot_ranks
        self._groups = [(*group, ranks[group.slot]) for group in step.routing.groups if ranks[group.slot]]

    def add(self, x: Tensor, y: Tensor, layer: int, site: int) -> None:
        """Cast x once, then loop."""
        (a, b), full = self._stacks[layer][site], self._weights.rank
        slices = self._weights.sites[site].slices
        if x.dtype != self._dtype:
            x = x[: self._end].to(self._dtype)
        for slot, start, stop, rank in self._groups:
            rows = x[start:stop]
            one_shrink = torch.mm(rows, a[slot].t()) if self._one_shrink else None
            column = 0
            for projection, width in enumerate(slices):
                first = projection * full
                if one_shrink is None:
                    v = torch.mm(rows, a[slot, first : first + rank].t())
                else:
                    v = one_shrink[:, first : first + rank]
                target = y[start:stop, column : column + width]
                matrix = b[slot, column : column + width, :rank].t()
                if y.dtype == v.dtype:
                    target.addmm_(v, matrix)
                else:
                    target.add_(torch.mm(v, matrix))
                column += width


class Gather:
    """vLLM's way on the CPU: the padded weights of each row are gathered, then einsum."""

    family = "gather"

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self.form = _name(dtype)
        self._weights, self._dtype = weights, dtype
        self._stacks = weights.in_dtype(dtype)

    def prepare(self, step: Step) -> None:
        """The slot of each row."""
        self._end = step.routing.end
        self._slots = step.routing.row_slots[1]

    def add(self, x: Tensor, y: Tensor, layer: int, site: int) -> None:
        """All projections of A at once, then each of B."""
        (a, b), rank, end = self._stacks[layer][site], self._weights.rank, self._end
        v = torch.einsum("bi,boi->bo", x[:end].to(self._dtype), a[self._slots])
        for projection, column, width in _spans(self._weights.sites[site]):
            low = v[:, projection * rank : (projection + 1) * rank]
            gathered = b[self._slots, column : column + width]
            y[:end, column : column + width].add_(torch.einsum("bi,boi->bo", low, gathered))


class Grouped:
    """`torch.nn.functional.grouped_mm` over all slots, with B as one block-diagonal matrix or slice by slice."""

    family = "grouped_mm"

    def __init__(self, weights: Weights, dtype: torch.dtype, *, diagonal: bool) -> None:
        self.form = f"{_name(dtype)}, B {'block-diagonal' if diagonal else 'by slice'}"
        self._weights, self._dtype = weights, dtype
        # Groups come by descending slot, and grouped_mm takes them as they lie: its stacks lie that way.
        self._a = [[stacks.a.flip(0).transpose(1, 2) for stacks in layer] for layer in weights.in_dtype(dtype)]
        if diagonal:
            self._b = [[[b.flip(0).transpose(1, 2)] for b in layer] for layer in weights.diagonal(dtype)]
        else:
            self._b = [
                [
                    [part.flip(0).transpose(1, 2) for part in torch.split(stacks.b, list(site.slices), 1)]
                    for stacks, site in zip(layer, weights.sites, strict=True)
                ]
                for layer in weights.in_dtype(dtype)
            ]

    def prepare(self, step: Step) -> None:
        """Where each slot's rows end; absent slots have none."""
        ends = {group.slot: group.stop for group in step.routing.groups}
        self._end, offsets, last = step.routing.end, [], 0
        for slot in reversed(range(len(step.routing.slot_ranks))):
            last = ends.get(slot, last)
            offsets.append(last)
        self._offsets = torch.tensor(offsets, dtype=torch.int32)

    def add(self, x: Tensor, y: Tensor, layer: int, site: int) -> None:
        """One product of A for all groups, and one or S of B."""
        parts, rank, end = self._b[layer][site], self._weights.rank, self._end
        v = F.grouped_mm(x[:end].to(self._dtype), self._a[layer][site], offs=self._offsets)
        if len(parts) == 1:
            y[:end].add_(F.grouped_mm(v, parts[0], offs=self._offsets))
            return
        for (projection, column, width), part in zip(_spans(self._weights.sites[site]), parts, strict=True):
            low = v[:, projection * rank : (projection + 1) * rank]
            y[:end, column : column + width].add_(F.grouped_mm(low, part, offs=self._offsets))


def peers(weights: Weights, dtype: torch.dtype) -> list[Method]:
    """Every peer in every form it could best have: the activations' data type, or fp32 weights."""
    methods: list[Method] = []
    for weight_dtype in sorted({dtype, torch.float32}, key=str):
        methods.append(Loop(weights, weight_dtype, one_shrink=False))
        methods.append(Loop(weights, weight_dtype, one_shrink=True))
        methods.append(Gather(weights, weight_dtype))
        methods.append(Grouped(weights, weight_dtype, diagonal=False))
        methods.append(Grouped(weights, weight_dtype, diagonal=True))
    return methods


def _spans(site: Site) -> Iterator[tuple[int, int, int]]:
    """Index, first column and width of each projection."""
    column = 0
    for projection, width in enumerate(site.slices):
        yield projection, column, width
        column += width


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
