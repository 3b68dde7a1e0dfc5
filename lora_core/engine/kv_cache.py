"""The paged KV cache: how its tensors are laid out, and the memory itself."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Shape of one layer's KV cache: `[2, num_blocks, num_kv_heads, block_size, head_dim]`, keys first.

    The tokens of one head in one block lie together, so that gathering pages copies long rows and its result is
    contiguous per head. Every block may be used; none is reserved.
    """

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (2, self.num_blocks, self.num_kv_heads, self.block_size, self.head_dim)

    def page_rows(self, blocks: Ints) -> Ints:
        """Rows of the cache viewed as `[-1, block_size * head_dim]` that hold blocks `[..., n]`.

        Returns:
            `[2, ..., num_kv_heads, n]`: keys and values of each head, in the order of the blocks.
        """
        planes = np.arange(2).reshape(2, *(1,) * (blocks.ndim + 1)) * self.num_blocks
        heads = np.arange(self.num_kv_heads)[:, None]
        return (planes + blocks[..., None, :]) * self.num_kv_heads + heads

    def token_rows(self, blocks: Ints, offsets: Ints) -> Ints:
        """Rows of the cache viewed as `[-1, head_dim]` that hold the tokens at `offsets` `[T]` of `blocks` `[T]`.

        Returns:
            `[T, 2, num_kv_heads]`.
        """
        planes = np.arange(2)[:, None] * self.num_blocks
        heads = np.arange(self.num_kv_heads)
        pages = (planes + blocks[:, None, None]) * self.num_kv_heads + heads
        return pages * self.block_size + offsets[:, None, None]


class KVCache:
    """The KV cache of all layers; `layers` is what the decoder reads and writes, one tensor of `layout.shape` each."""

    def __init__(self, layout: KVLayout, num_layers: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self._storage = torch.zeros((num_layers, *layout.shape), dtype=dtype, device=device)
        self.layers: list[Tensor] = list(self._storage.unbind(0))

    def clear(self, blocks: Tensor) -> None:
        """Zero whole blocks in every layer.

        A block's tail is multiplied by a weight of 0 before its owner fills it. If the last owner left a NaN or an
        infinity there, the product would carry it over to the new one. Kernels that load no more than a sequence's own
        tokens need no cleared blocks.
        """
        self._storage.index_fill_(2, blocks, 0)
