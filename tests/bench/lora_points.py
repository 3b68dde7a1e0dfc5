"""The batches that SGMV and its peers are compared on."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels import build_routing
from tests.bench.lora_methods import Step
from tests.bench.lora_weights import Site

RANKS = (8, 16, 64)
SIZES = ((1, 1), (8, 1), (8, 4), (8, 8), (32, 8), (64, 8), (512, 8), (2048, 8))
MANY = (64, 64)
MIXED_RANKS = (8, 64, 16, 32, 8, 16, 8, 64)
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Point:
    """One batch.

    Attributes:
        dtype: Of the activations.
        rows: Rows that have an adapter.
        adapters: Adapters they are spread over, each with an equal share.
        slot_ranks: True ranks of all slots; the adapters are in some of the slots.
        rank: Rank the slots are padded to.
        base_rows: Rows without an adapter, after the others.
    """

    dtype: torch.dtype
    rows: int
    adapters: int
    slot_ranks: tuple[int, ...]
    rank: int
    base_rows: int = 0

    def slots(self) -> list[int]:
        """The slots in use, in the order of their rows."""
        drawn = random.Random(self.adapters).sample(range(len(self.slot_ranks)), self.adapters)
        return sorted(drawn, reverse=True)

    def step(self) -> Step:
        """The routing of the batch."""
        offsets = [index * self.rows // self.adapters for index in range(self.adapters + 1)]
        routing = build_routing(
            self.slots(),
            offsets,
            self.slot_ranks,
            num_rows=self.rows + self.base_rows,
            max_groups=len(self.slot_ranks),
            device=torch.device("cpu"),
        )
        return Step(routing, self.dtype)

    def figures(self) -> dict[str, object]:
        """What names the point in its line."""
        ranks = sorted(set(self.slot_ranks))
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "rank": self.rank if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}",
            "rows": self.rows,
            "adapters": self.adapters,
            "base_rows": self.base_rows,
            "slots": len(self.slot_ranks),
        }


class Batch:
    """The inputs and outputs of a layer's sites."""

    def __init__(self, point: Point, sites: Sequence[Site]) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = point.rows + point.base_rows
        self.x = [torch.randn(rows, site.in_features, generator=generator).to(point.dtype) for site in sites]
        self.y = [torch.randn(rows, sum(site.slices), generator=generator).to(point.dtype) for site in sites]


def all_points() -> Iterator[Point]:
    """Those of the same weights next to each other."""
    for rank in RANKS:
        for dtype in DTYPES:
            for rows, adapters in SIZES:
                yield Point(dtype, rows, adapters, (rank,) * 8, rank)
            if rank == 16:
                for rows, adapters in ((8, 4), (32, 8), (512, 8)):
                    yield Point(dtype, rows, adapters, (rank,) * 8, rank, base_rows=rows)
        for dtype in DTYPES:
            rows, adapters = MANY
            yield Point(dtype, rows, adapters, (rank,) * adapters, rank)
    for dtype in DTYPES:
        for rows, adapters in ((8, 8), (32, 8), (512, 8)):
            yield Point(dtype, rows, adapters, MIXED_RANKS, 64)


def small_points() -> Iterator[Point]:
    """Points that take a moment to compute, one of each kind of piece."""
    for dtype in DTYPES:
        yield Point(dtype, 1, 1, (8,) * 4, 8)
        yield Point(dtype, 4, 4, (8,) * 4, 8, base_rows=2)
        yield Point(dtype, 6, 2, (8, 3, 5, 8), 8, base_rows=1)
        yield Point(dtype, 70, 1, (8, 8), 8)
