"""Steps of attention over pages, with NaN in all memory that may not matter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels import PagedLayout, PagedSchedule, build_paged_schedule, paged_attention
from kernels import paged_attention_reference as reference
from kernels.launch import Launch
from tests.kernels.cases import DEVICE

# Of the largest value: fp32 rounds in another order, 16 bits also round the softmax's weights.
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class PagedCase:
    """The arguments of a `paged_attention` call, and the sequences behind them."""

    queries: Tensor
    cache: Tensor
    q_lens: list[int]
    kv_lens: list[int]
    block_tables: list[list[int]]
    schedule: PagedSchedule
    features: dict[str, Any]
    bounds: dict[str, Any]

    def result(self) -> Tensor:
        return paged_attention(self.queries, self.cache, self.schedule, **self.features)

    def expected(self) -> Tensor:
        return reference.paged_attention(
            self.queries, self.cache, self.q_lens, self.kv_lens, self.block_tables, **self.features
        )

    def launches(self, out: Tensor) -> list[Launch]:
        """What one call launches, in order, to fill out: the query tiles, the decodes, and their combination."""
        # Importing it needs triton, which tests of the arguments do not.
        from kernels.paged_attention_launch import combine_launch, decode_launch, prefill_launch

        tensors, schedule = (self.queries, self.cache, out), self.schedule
        partials, logsums, decode = decode_launch(*tensors, schedule.decodes, schedule.block_tables, **self.features)
        return [
            prefill_launch(*tensors, schedule.tiles, schedule.block_tables, **self.features),
            decode,
            combine_launch(
                partials, logsums, self.cache, out, schedule.decodes, schedule.block_tables, self.features["window"]
            ),
        ]

    def num_splits(self) -> int:
        """Splits of a decoding row's past."""
        splits: int = self.launches(torch.empty_like(self.queries))[1].constants["SPLITS"]
        return splits

    def rescheduled(self, other: "PagedCase") -> "PagedCase":
        """This case's tensors with the sequences of another one of the same shapes, in this schedule's buffer."""
        schedule = build_paged_schedule(
            other.q_lens,
            other.kv_lens,
            other.block_tables,
            layout=self.schedule.layout,
            num_rows=self.schedule.num_rows,
            **self.bounds,
            device=DEVICE,
            into=self.schedule.buffer,
        )
        return replace(
            self, q_lens=other.q_lens, kv_lens=other.kv_lens, block_tables=other.block_tables, schedule=schedule
        )

    def check(self) -> None:
        """The kernels agree with the reference within rounding; rows of no sequence are zero."""
        self.require(self.result())

    def require(self, result: Tensor) -> None:
        """What kernels gave, in whatever way they ran, agrees with the reference."""
        expected = self.expected()
        assert result.dtype == self.queries.dtype
        assert not result.isnan().any()
        assert not expected.isnan().any()
        assert not result[sum(self.q_lens) :].any()
        tolerance = TOLERANCES[result.dtype]
        torch.testing.assert_close(result.float(), expected, rtol=tolerance, atol=tolerance)


def make_paged_case(
    sequences: Sequence[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    unowned_rows: int = 0,
    num_blocks: int | None = None,
    max_sequences: int | None = None,
    max_blocks: int | None = None,
    max_decodes: int | None = None,
    max_chunks: int | None = None,
    into: Tensor | None = None,
    seed: int = 0,
) -> PagedCase:
    """Build a step of sequences `(past, rows)`, and `unowned_rows` rows after them.

    The cache has `num_blocks` blocks, or three more than the sequences fill. Blocks that no sequence has are NaN, and
    so is what a last block holds past its sequence's end, and block 0, which the unused places of block tables name.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q_lens, kv_lens = [rows for _, rows in sequences], [past + rows for past, rows in sequences]
    counts = [-(-kv_len // block_size) for kv_len in kv_lens]
    num_rows = sum(q_lens) + unowned_rows
    if num_blocks is None:
        num_blocks = sum(counts) + 3
    bounds: dict[str, Any] = {
        "max_sequences": max_sequences or len(sequences),
        "max_blocks": max_blocks or max(counts),
        "max_decodes": max_decodes,
        "max_chunks": max_chunks,
    }
    layout = PagedLayout(num_kv_heads * group, num_kv_heads, head_dim, block_size, num_blocks, dtype)
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    block_tables = [[free.pop() for _ in range(count)] for count in counts]
    cache = torch.full(layout.cache_shape, float("nan"))
    for kv_len, table in zip(kv_lens, block_tables, strict=True):
        for place, block in enumerate(table):
            filled = min(block_size, kv_len - place * block_size)
            cache[:, block, :, :filled] = random(2, num_kv_heads, filled, head_dim)
    # Rows of the fused projection, as a model has them: queries, keys and values side by side.
    fused = random(num_rows, num_kv_heads * (group + 2), head_dim).to(DEVICE, dtype)
    schedule = build_paged_schedule(
        q_lens,
        kv_lens,
        block_tables,
        layout=layout,
        num_rows=num_rows,
        **bounds,
        device=DEVICE,
        into=into,
    )
    return PagedCase(
        queries=fused[:, : layout.num_heads],
        cache=cache.to(DEVICE, dtype),
        q_lens=q_lens,
        kv_lens=kv_lens,
        block_tables=block_tables,
        schedule=schedule,
        features={"scale": head_dim**-0.5, "window": window, "softcap": softcap},
        bounds=bounds,
    )
