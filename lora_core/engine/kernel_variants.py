"""Every kernel variant that an engine's steps can ask for, so that all are compiled before the first request comes.

A variant is what the compiler makes of a kernel for some compile-time arguments. These follow from shapes: of the
model, of the adapter slots, and of the step, and of the last from few things: which tiles are chosen for so many rows,
and into how many parts attention cuts the longest past. Each is found here by describing launches with tensors that
have no memory, by the very functions that steps launch with.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import GATED_ACTIVATIONS, PagedLayout
from kernels.schedule import MAX_ONE_LAUNCH_TILE
from kernels.tuning import (
    StepShape,
    device_name,
    expand_tile,
    launches_dependently,
    meta_device,
    num_tiles,
    row_tile,
    shrink_tile,
    swiglu_tile,
)
from lora_core.config import LoRAConfig
from lora_core.models.decoder import DecoderConfig
from lora_core.targets import LoRASite

if TYPE_CHECKING:
    from kernels.launch import Launch

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how much of how much is done."""

_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class AdapterKernels:
    """What adapters' kernels depend on beside a step's rows.

    Attributes:
        sites: Of the model, or of a rank's share of it; those of equal shapes count once.
        num_slots: Adapter slots.
        max_groups: Most groups of a step.
        rank: Padded rank of the slots.
        activation: Of the gate.
        biases: Whether each site's layer has a bias, by the site's path in a layer.
        one_launch: The setting.
        dtype: Of activations and slots.
        device: Where steps run.
    """

    sites: Sequence[LoRASite]
    num_slots: int
    max_groups: int
    rank: int
    activation: str
    biases: frozenset[str]
    one_launch: bool
    dtype: torch.dtype
    device: torch.device

    def launches(self, max_rows: int) -> "Iterator[Launch]":
        """Those of all steps of up to `max_rows` rows, one of each variant and a few more."""
        distinct = {(site.kind, site.target.path, site.in_features, site.slices): site for site in self.sites}
        seen: set[Hashable] = set()
        for num_rows in range(1, max_rows + 1):
            choice = self._choice(num_rows, list(distinct.values()))
            if choice not in seen:
                seen.add(choice)
                for site in distinct.values():
                    yield from self._site_launches(site, num_rows)

    def _choice(self, num_rows: int, sites: Sequence[LoRASite]) -> Hashable:
        """All that the variants of a step of so many rows depend on."""
        name, size = device_name(self.device), self.dtype.itemsize
        block_m = row_tile(num_rows, self.max_groups, name)
        step = StepShape(name, num_rows, self.max_groups, block_m)
        tiles = [
            (
                shrink_tile(step, self.rank, len(site.slices), site.in_features, size),
                expand_tile(step, self.rank, site.out_features, size),
                swiglu_tile(step, self.rank, site.slices[0], size),
            )
            for site in sites
        ]
        return block_m, launches_dependently(self.device, num_rows, self.max_groups), tuple(tiles)

    def _site_launches(self, site: LoRASite, num_rows: int) -> "Iterator[Launch]":
        from kernels.sgmv_launch import expand_launch, gated_launches, gather_launch, scale_launch, sgmv_launches

        with meta_device(device_name(self.device)):
            block_m = row_tile(num_rows, self.max_groups, device_name(self.device))
            length = num_tiles(num_rows, self.max_groups, block_m)
            tiles = _empty(length, 4, dtype=torch.int32)
            has_counters = self.one_launch and block_m <= MAX_ONE_LAUNCH_TILE
            counters = _empty(length + 1, dtype=torch.int32) if has_counters else None
            y = self._empty(num_rows, site.out_features)
            b_stack = self._empty(self.num_slots, site.out_features, self.rank)
            gain = _empty(self.num_slots, site.out_features, dtype=torch.float32)
            bias = self._empty(site.out_features) if site.target.path in self.biases else None
            yield scale_launch(y, gain, bias, tiles, block_m)
            if site.kind == "embedding":
                ids = _empty(num_rows, dtype=torch.int64)
                a_stack = self._empty(self.num_slots, site.in_features, self.rank)
                planes, gather = gather_launch(ids, a_stack, tiles, block_m)
                yield gather
                yield expand_launch(planes, b_stack, y, tiles, block_m, self.max_groups, [site.out_features])
                return
            x = self._empty(num_rows, site.in_features)
            a_stack = self._empty(self.num_slots, len(site.slices) * self.rank, site.in_features)
            step = (tiles, counters, block_m, self.max_groups)
            dependent = launches_dependently(self.device, num_rows, self.max_groups)
            yield from sgmv_launches(x, a_stack, b_stack, y, *step, site.slices, dependent=dependent)
            is_gate = len(site.slices) == 2 and "gate" in site.target.path
            if is_gate and self.activation in GATED_ACTIVATIONS:
                yield from gated_launches(x, a_stack, b_stack, y, *step, self.activation, dependent=dependent)[1]

    def _empty(self, *shape: int) -> Tensor:
        return _empty(*shape, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class AttentionKernels:
    """What attention's kernels depend on beside a step's tables.

    Attributes:
        layout: Of the model and its cache.
        windows: Of the layers.
        scale: Of the scores.
        softcap: Of the scores.
        device: Where steps run.
    """

    layout: PagedLayout
    windows: Sequence[int | None]
    scale: float
    softcap: float | None
    device: torch.device

    def launches(self, tables: Iterable[tuple[int, int]], *, has_chunks: bool = True) -> "Iterator[Launch]":
        """Those of steps whose tables are these.

        Args:
            tables: Rows of the table of decoding rows, and blocks of the longest sequence.
            has_chunks: Whether there are prompts as well.
        """
        from kernels.paged_attention_launch import decode_launches, prefill_launch

        layout = self.layout
        heads = _empty(4, layout.num_heads + 2 * layout.num_kv_heads, layout.head_dim, dtype=layout.dtype)
        queries, out = heads[:, : layout.num_heads], _empty(4, layout.num_heads, layout.head_dim, dtype=layout.dtype)
        cache = _empty(*layout.cache_shape, dtype=layout.dtype)
        pairs = list(tables)
        for window in self.windows:
            if has_chunks and pairs:
                block_tables = _empty(1, pairs[0][1], dtype=torch.int32)
                tiles = _empty(1, 4, dtype=torch.int32)
                yield prefill_launch(
                    queries, cache, out, tiles, block_tables, scale=self.scale, window=window, softcap=self.softcap
                )
            for num_decodes, max_blocks in pairs:
                decodes = _empty(num_decodes, 4, dtype=torch.int32)
                block_tables = _empty(num_decodes, max_blocks, dtype=torch.int32)
                yield from decode_launches(
                    queries, cache, out, decodes, block_tables, scale=self.scale, window=window, softcap=self.softcap
                )


def engine_launches(
    config: DecoderConfig,
    layout: PagedLayout,
    *,
    sites: Sequence[LoRASite],
    lora: LoRAConfig,
    max_groups: int,
    max_rows: int,
    max_seqs: int,
    max_blocks: int,
    graph_tables: Iterable[tuple[int, int]],
    device: torch.device,
    attends: bool = True,
) -> "list[Launch]":
    """One launch of each variant that the steps of an engine can ask for.

    Args:
        config: Of the model, or of a rank's share of it.
        layout: Of its attention and cache.
        sites: Of its adapters; none with LoRA off.
        lora: Settings of the slots.
        max_groups: Most groups of a step.
        max_rows: Most token rows of a step.
        max_seqs: Most sequences of a step.
        max_blocks: Most cache blocks of a sequence.
        graph_tables: Rows and blocks of the attention tables of each graph.
        device: Where steps run.
        attends: Whether they attend by these kernels, not by another library's.
    """
    attention = AttentionKernels(
        layout=layout,
        windows=config.windows,
        scale=config.attention_scale,
        softcap=config.score_softcap,
        device=device,
    )
    plain = [(rows, blocks) for rows in _powers(min(max_rows, max_seqs)) for blocks in _powers(max_blocks)]
    found = [*attention.launches(plain), *attention.launches(graph_tables, has_chunks=False)] if attends else []
    if sites:
        biased = {"self_attn.qkv_proj": config.qkv_bias, "self_attn.o_proj": config.output_bias}
        biased |= dict.fromkeys(("mlp.gate_up_proj", "mlp.down_proj"), config.mlp_bias)
        adapters = AdapterKernels(
            sites=sites,
            num_slots=lora.max_num_loras,
            max_groups=max_groups,
            rank=lora.max_lora_rank,
            activation=config.activation,
            biases=frozenset(path for path, is_biased in biased.items() if is_biased),
            one_launch=lora.one_launch,
            dtype=layout.dtype,
            device=device,
        )
        found += adapters.launches(max_rows)
    return distinct(found)


def _powers(most: int) -> list[int]:
    """Powers of two up to the first that is not smaller: what steps without a graph round their tables up to."""
    powers = [1]
    while powers[-1] < most:
        powers.append(2 * powers[-1])
    return powers


def distinct(launches: "Iterable[Launch]") -> "list[Launch]":
    """One launch of each variant, in their order."""
    found: dict[Hashable, Launch] = {}
    for launch in launches:
        found.setdefault(launch.variant, launch)
    return list(found.values())


def compile_all(launches: "Sequence[Launch]", progress: Progress) -> None:
    """Compile launches for the current device, several at a time, as many as this machine has cores."""
    from triton import AsyncCompileMode

    num_workers = max(1, min(16, (os.cpu_count() or 2) - 1))
    batch = 2 * num_workers
    with ThreadPoolExecutor(num_workers, thread_name_prefix="compile") as workers:
        for first in range(0, len(launches), batch):
            progress("compiling kernels", first, len(launches))
            with AsyncCompileMode(workers):
                for launch in launches[first : first + batch]:
                    launch.compile()
    progress("compiling kernels", len(launches), len(launches))


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)
