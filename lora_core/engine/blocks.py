"""The KV cache as a pool of equal blocks, each owned by at most one request."""

from collections.abc import Iterable


class BlockPool:
    """Hands out block ids `0 .. num_blocks - 1`; a block holds the keys and values of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack whose top is the lowest id at first, so that a quiet engine stays in the cache's first pages.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. The caller has seen that `num_free` is enough."""
        assert 0 <= count <= len(self._free), f"{count} blocks asked of {len(self._free)} free ones"
        return [self._free.pop() for _ in range(count)]

    def free(self, blocks: list[int]) -> None:
        """Give blocks back, and empty the list that named them, so that nothing can free them twice."""
        self._free.extend(reversed(blocks))
        blocks.clear()

    def check(self, tables: Iterable[list[int]]) -> None:
        """Assert that free blocks and the given block tables together are every block, each once."""
        owned = [block for table in tables for block in table]
        assert sorted([*self._free, *owned]) == list(range(self.num_blocks)), (
            f"{len(self._free)} free and {len(owned)} owned blocks do not partition {self.num_blocks}"
        )
