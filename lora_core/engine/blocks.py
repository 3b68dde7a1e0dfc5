"""The KV cache as a pool of equal blocks: taken, shared between requests, and remembered after they are given back."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from lora_core.types import AdapterRef


class BlockPool:
    """Hands out block ids `0 .. num_blocks - 1`; a block holds the keys and values of `block_size` tokens.

    A block is *in use* while it is in the block table of a request, or of several: full blocks with the same content
    are shared. A full block can be remembered under the hash of its content (`lora_core.engine.block_hashes`); given
    back by its last user it stays as it is, and is found by that hash, until a new block is needed and it is the least
    recently used one. Remembered blocks are never written: whoever shares them continues in a block of its own.

    Not thread-safe: its owner serialises calls.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack whose top is the lowest id at first, so that a quiet engine stays in the cache's first pages.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Remembered and in no table, the first one to go first.
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._num_users = [0] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Of remembered blocks: their hash, and through which adapter they were computed.
        self._remembered: dict[int, tuple[bytes, AdapterRef | None]] = {}
        self._by_adapter: dict[AdapterRef, set[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, those that are remembered and not in use included."""
        return len(self._free) + len(self._unused)

    @property
    def num_remembered(self) -> int:
        """Blocks that can be found by their hash."""
        return len(self._remembered)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks of unknown content. The caller has seen that `num_free` is enough."""
        assert 0 <= count <= self.num_free, f"{count} blocks asked of {self.num_free} free ones"
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._num_users[block] = 1
            blocks.append(block)
        return blocks

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The remembered blocks of a text's first hashes, up to the first that is not there. They are not taken."""
        blocks = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unused(self, blocks: Iterable[int]) -> int:
        """How many of the blocks `num_free` counts, so that `share` takes them from there."""
        return sum(block in self._unused for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Take blocks that `find` has just returned, as they are."""
        for block in blocks:
            self._num_users[block] += 1
            self._unused.pop(block, None)

    def remember(self, block: int, digest: bytes, adapter: AdapterRef | None) -> None:
        """Let a block that is in use and full be found by its hash; one that has the same content already stays it."""
        if digest in self._by_hash or block in self._remembered:
            return
        self._by_hash[digest] = block
        self._remembered[block] = digest, adapter
        if adapter is not None:
            self._by_adapter.setdefault(adapter, set()).add(block)

    def is_remembered(self, block: int) -> bool:
        """Whether the block can be found by its hash."""
        return block in self._remembered

    def holds(self, block: int, digest: bytes, adapter: AdapterRef | None) -> bool:
        """Whether a block is remembered by just this hash and adapter, or not at all."""
        return self._remembered.get(block, (digest, adapter)) == (digest, adapter)

    def forget(self, blocks: Iterable[int]) -> None:
        """Let blocks no longer be found, whether or not they are in use."""
        for block in blocks:
            if block in self._remembered:
                self._drop_hash(block)
                if block in self._unused:
                    del self._unused[block]
                    self._free.append(block)

    def forget_adapter(self, adapter: AdapterRef) -> None:
        """Forget the blocks of an adapter that nobody can ask for again, so that no others go before them."""
        self.forget(list(self._by_adapter.get(adapter, ())))

    def forget_name(self, name: str) -> None:
        """Forget the blocks of all generations of an adapter."""
        for adapter in [adapter for adapter in self._by_adapter if adapter.name == name]:
            self.forget_adapter(adapter)

    def free(self, blocks: list[int]) -> None:
        """Give a table's blocks back, and empty it, so that nothing can free them twice.

        The text's end is evicted before its beginning, without which it could not be found.
        """
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if self._num_users[block]:
                continue
            if block in self._remembered:
                self._unused[block] = None
            else:
                self._free.append(block)
        blocks.clear()

    def check(self, tables: Iterable[list[int]]) -> None:
        """Assert that free, remembered and owned blocks are every block, and that all counts are right."""
        users: Counter[int] = Counter()
        for table in tables:
            assert len(set(table)) == len(table), f"a table names a block twice: {table}"
            users.update(table)
        assert sorted([*self._free, *self._unused, *users]) == list(range(self.num_blocks)), (
            f"{self.num_free} free and {len(users)} owned blocks do not partition {self.num_blocks}"
        )
        counted = {block: count for block, count in enumerate(self._num_users) if count}
        assert counted == users, f"blocks are counted to have {counted} users, and have {dict(users)}"
        hashes = {digest: block for block, (digest, _) in self._remembered.items()}
        assert hashes == self._by_hash, "a hash finds another block than its own"
        assert self._unused.keys() <= self._remembered.keys(), "a block is kept that cannot be found"
        assert self._remembered.keys().isdisjoint(self._free), "a free block can be found"
        by_adapter = {(block, ref) for ref, blocks in self._by_adapter.items() for block in blocks}
        known = {(block, ref) for block, (_, ref) in self._remembered.items() if ref is not None}
        assert by_adapter == known, "blocks are listed under the wrong adapter"
        assert all(self._by_adapter.values()), "an adapter without blocks is listed"

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        self._drop_hash(block)
        return block

    def _drop_hash(self, block: int) -> None:
        digest, adapter = self._remembered.pop(block)
        del self._by_hash[digest]
        if adapter is not None:
            blocks = self._by_adapter[adapter]
            blocks.remove(block)
            if not blocks:
                del self._by_adapter[adapter]
