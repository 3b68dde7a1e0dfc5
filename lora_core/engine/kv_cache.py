"""The paged KV cache: how its tensors are laid out, and the memory itself."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


STRIP_TOKENS = 64
"""Least tokens of a strip, which has whole blocks. Products of many strips of so many are as fast as those of few
larger ones, and a sequence's last strip is half empty (measured on CPU; with 32 they are slower)."""


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Shape of one layer's KV cache: `[2, num_blocks + strips, num_kv_heads, block_size, head_dim]`, keys first.

    The tokens of one head in one block lie together, so that gathering pages copies long rows and its result is
    contiguous per head. Every block may be used; none is reserved.

    Behind the blocks there is room for `num_strips` *strips*, each of `strip_blocks` blocks. A strip is
    `[num_kv_heads, strip_tokens, head_dim]`, and holds a second copy of some tokens of one sequence: strips are
    multiplied where they lie, see `lora_core.engine.strips`.
    """

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    num_strips: int = 0

    @property
    def strip_blocks(self) -> int:
        """Blocks in a strip."""
        return -(-STRIP_TOKENS // self.block_size)

    @property
    def strip_tokens(self) -> int:
        """Tokens in a strip."""
        return self.strip_blocks * self.block_size

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (2, self._num_pages, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def _num_pages(self) -> int:
        return self.num_blocks + self.num_strips * self.strip_blocks

    def page_rows(self, blocks: Ints) -> Ints:
        """Rows of the cache viewed as `[-1, block_size * head_dim]` that hold blocks `[..., n]`.

        Returns:
            `[2, ..., num_kv_heads, n]`: keys and values of each head, in the order of the blocks.
        """
        planes = np.arange(2).reshape(2, *(1,) * (blocks.ndim + 1)) * self._num_pages
        heads = np.arange(self.num_kv_heads)[:, None]
        return (planes + blocks[..., None, :]) * self.num_kv_heads + heads

    def token_rows(self, blocks: Ints, offsets: Ints) -> Ints:
        """Rows of the cache viewed as `[-1, head_dim]` that hold the tokens at `offsets` `[T]` of `blocks` `[T]`.

        Returns:
            `[T, 2, num_kv_heads]`.
        """
        planes = np.arange(2)[:, None] * self._num_pages
        heads = np.arange(self.num_kv_heads)
        pages = (planes + blocks[:, None, None]) * self.num_kv_heads + heads
        return pages * self.block_size + offsets[:, None, None]

    def strip_page_rows(self, strips: Ints, slots: Ints) -> Ints:
        """Rows of the cache viewed as `[-1, block_size * head_dim]` that hold the blocks at `slots` `[n]` of `strips`.

        Returns:
            `[2, num_kv_heads, n]`, as `page_rows` of n blocks.
        """
        planes = (np.arange(2)[:, None, None] * self._num_pages + self.num_blocks) * self.num_kv_heads
        heads = np.arange(self.num_kv_heads)[:, None]
        return planes + (strips * self.num_kv_heads + heads) * self.strip_blocks + slots

    def strip_token_rows(self, strips: Ints, offsets: Ints) -> Ints:
        """Rows of the cache viewed as `[-1, head_dim]` that hold the tokens at `offsets` `[T]` of `strips` `[T]`.

        Returns:
            `[T, 2, num_kv_heads]`, as `token_rows`.
        """
        planes = (np.arange(2)[:, None] * self._num_pages + self.num_blocks) * self.num_kv_heads * self.block_size
        heads = strips[:, None, None] * self.num_kv_heads + np.arange(self.num_kv_heads)
        return planes + heads * self.strip_tokens + offsets[:, None, None]

    def first_strips(self, cache: Tensor, count: int) -> Tensor:
        """The first strips of one layer's cache, `[2, count * num_kv_heads, strip_tokens, head_dim]`: a view."""
        pages = cache[:, self.num_blocks : self.num_blocks + count * self.strip_blocks]
        return pages.view(2, count * self.num_kv_heads, self.strip_tokens, self.head_dim)


class StripFill(NamedTuple):
    """What is copied into strips before a step, as int64 rows of a layer viewed as `[-1, block_size * head_dim]`.

    Attributes:
        sources: `[n]`, what is copied; None without any.
        targets: `[n]`, where to.
        cleared: Rows to be zeroed; None without any.
    """

    sources: Tensor | None
    targets: Tensor | None
    cleared: Tensor | None


class KVCache:
    """The KV cache of all layers; `layers` is what the decoder reads and writes, one tensor of `layout.shape` each."""

    def __init__(self, layout: KVLayout, num_layers: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self._storage = torch.empty((num_layers, *layout.shape), dtype=dtype, device=device)
        # Strips are not touched before their first use: the system provides no memory for those that have none.
        self._storage[:, :, : layout.num_blocks].zero_()
        self.layers: list[Tensor] = list(self._storage.unbind(0))

    def clear(self, blocks: Tensor) -> None:
        """Zero whole blocks in every layer.

        A block's tail is multiplied by a weight of 0 before its owner fills it. If the last owner left a NaN or an
        infinity there, the product would carry it over to the new one. Kernels that load no more than a sequence's own
        tokens need no cleared blocks.
        """
        self._storage.index_fill_(2, blocks, 0)

    def fill_strips(self, fill: StripFill) -> None:
        """Copy blocks into strips in every layer."""
        for layer in self.layers:
            pages = layer.view(-1, self.layout.block_size * self.layout.head_dim)
            if fill.cleared is not None:
                pages.index_fill_(0, fill.cleared, 0)
            if fill.sources is not None and fill.targets is not None:
                pages.index_copy_(0, fill.targets, pages.index_select(0, fill.sources))
