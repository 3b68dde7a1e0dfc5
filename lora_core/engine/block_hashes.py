"""What identifies the content of a full KV block: its tokens, those before it, and the weights they went through."""

from array import array
from collections.abc import Sequence

from blake3 import blake3

from lora_core.types import AdapterRef

_BASE = blake3(b"base").digest()


class BlockHashes:
    """The hashes of one request's full blocks, computed once each, as they are asked for.

    Each is the BLAKE3 hash (256 bits) of the hash before it and of the block's token ids, 8 bytes each. The first one
    follows on a salt: the adapter's generation, which no other load of any adapter ever has in this engine, or a salt
    of its own for the base model, and what the request asks to be kept apart by. Blocks of equal hashes therefore hold
    the same keys and values; nobody can find two different texts whose hashes are equal, so that token ids need not be
    compared.
    """

    def __init__(self, adapter: AdapterRef | None, salt: str = "") -> None:
        first = _BASE if adapter is None else blake3(f"adapter {adapter.generation}".encode()).digest()
        self._digests = [blake3(first + salt.encode()).digest() if salt else first]

    def first(self, num_blocks: int, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        """The hashes of the first `num_blocks` blocks of a text, `token_ids`, that holds as many full ones.

        The text may have grown since the last call, and is otherwise the same.
        """
        for index in range(len(self._digests) - 1, num_blocks):
            tokens = token_ids[index * block_size : (index + 1) * block_size]
            assert len(tokens) == block_size, f"block {index} is not full"
            self._digests.append(blake3(self._digests[-1] + array("q", tokens).tobytes()).digest())
        return self._digests[1 : num_blocks + 1]

    def at(self, index: int) -> bytes:
        """The hash of one block that `first` was asked for."""
        return self._digests[index + 1]
