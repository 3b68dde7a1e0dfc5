"""The KV blocks of requests: what they share, what they get, and what is remembered of them."""

from collections import Counter
from collections.abc import Sequence

from lora_core.engine.blocks import BlockPool
from lora_core.engine.request import Request
from lora_core.types import AdapterRef


class BlockTables:
    """Fills, grows and empties the block tables of requests over one pool, and reuses what was computed before.

    With `share`, every block is remembered once it is full and computed, and a request that starts takes the remembered
    blocks its text begins with: its `num_computed` starts behind them. At least its last token is left to compute, so
    that there are logits; a text of whole blocks therefore computes its last block again.

    A request that stops for a while may be parked: it keeps its blocks until somebody else needs them.

    Attributes:
        num_queried_tokens: Prompt tokens of all requests that started and might have shared.
        num_hit_tokens: How many of them were in remembered blocks.
    """

    def __init__(self, pool: BlockPool, *, share: bool) -> None:
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._pool = pool
        self._share = share
        # In the order in which they were parked.
        self._parked: dict[Request, None] = {}

    @property
    def usage(self) -> float:
        """Share of the pool's blocks that are in tables, those of parked requests included."""
        return 1 - self._pool.num_free / self._pool.num_blocks

    def fits(self, request: Request, num_spare: int) -> bool:
        """Whether a request that waits could start, and leave `num_spare` blocks free; parked ones make room for it."""
        missing = self._num_missing(request)
        while missing + num_spare > self._pool.num_free:
            shared = self._find(request)
            # Those in use by others cost nothing; the rest are among the free ones.
            if missing - len(shared) + self._pool.num_unused(shared) + num_spare <= self._pool.num_free:
                return True
            if not self._unpark_another(request):
                return False
        return True

    def start(self, request: Request) -> None:
        """Give a request that fits the blocks of its text, shared ones first; a parked one goes on where it was."""
        if request.is_parked:
            self._unpark(request)
            request.block_table += self._pool.allocate(self._num_missing(request))
            return
        assert not request.block_table, f"{request.request_id} has blocks"
        shared = self._find(request)
        self._pool.share(shared)
        request.block_table += shared
        request.num_computed = request.num_settled = len(shared) * self._pool.block_size
        request.num_remembered = len(shared)
        request.block_table += self._pool.allocate(self._num_missing(request))
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed
            if self._share and request.may_share_blocks:
                self.num_queried_tokens += len(request.token_ids)
                self.num_hit_tokens += request.num_computed

    def grow(self, request: Request) -> bool:
        """Give a request the blocks that its text has come to need; False, and nothing, if there are too few."""
        missing = self._num_missing(request)
        if not missing:
            # As for nearly every row of nearly every step.
            return True
        while missing > self._pool.num_free:
            if not self._unpark_another(request):
                return False
        request.block_table += self._pool.allocate(missing)
        return True

    def extend(self, request: Request, num_tokens: int) -> None:
        """Take note that the keys and values of the next `num_tokens` tokens of a request are on their way."""
        request.num_computed += num_tokens

    def settle(self, request: Request, num_tokens: int) -> None:
        """Take note that the first `num_tokens` tokens of a request are known, and computed: others may share them."""
        request.num_settled = num_tokens
        if not self._share:
            return
        num_full = num_tokens // self._pool.block_size
        if num_full > request.num_remembered:
            hashes = request.block_hashes.first(num_full, request.token_ids, self._pool.block_size)
            for index in range(request.num_remembered, num_full):
                self._pool.remember(request.block_table[index], hashes[index], request.adapter)
            request.num_remembered = num_full

    def park(self, request: Request) -> None:
        """Let a running request that is going to wait keep its blocks, until another needs them."""
        self._parked[request] = None
        request.is_parked = True

    def release(self, request: Request) -> None:
        """Take a request's blocks back, if it has some; those that are full are remembered for a while."""
        if request.is_parked:
            self._unpark(request)
        self._pool.free(request.block_table)
        request.num_computed = request.num_settled = request.num_remembered = 0
        request.num_releases += 1

    def forget(self, request: Request) -> None:
        """Let nobody share what a request has computed."""
        self._pool.forget(request.block_table)

    def forget_adapter(self, adapter: AdapterRef) -> None:
        """Keep nothing of an adapter that nobody can ask for again."""
        self._pool.forget_adapter(adapter)

    def forget_name(self, name: str) -> None:
        """Keep nothing of any generation of an adapter."""
        self._pool.forget_name(name)

    def check(self, requests: Sequence[Request]) -> None:
        """Assert that the blocks of running requests and of the pool agree, and that nobody writes what others read."""
        assert all(request.is_parked for request in self._parked), "a parked request does not know it"
        assert not any(request.is_parked for request in requests), "a running request is parked"
        requests = [*requests, *self._parked]
        self._pool.check(request.block_table for request in requests)
        users = Counter(block for request in requests for block in request.block_table)
        for request in requests:
            num_blocks, num_full = len(request.block_table), request.num_computed // self._pool.block_size
            num_settled = request.num_settled // self._pool.block_size
            assert request.num_settled <= request.num_computed, f"{request.request_id} settles what is not computed"
            assert self._pool.blocks_for(request.num_computed) <= num_blocks, f"{request.request_id} lacks blocks"
            assert num_blocks <= self._pool.blocks_for(len(request.token_ids)), f"{request.request_id} hoards blocks"
            assert request.num_remembered == (num_settled if self._share else 0), f"{request.request_id}: remembered"
            still_written = request.block_table[num_full:]
            assert all(users[block] == 1 for block in still_written), f"{request.request_id} writes a shared block"
            assert not any(map(self._pool.is_remembered, still_written)), f"{request.request_id} writes what is found"
            if self._share:
                hashes = request.block_hashes.first(num_settled, request.token_ids, self._pool.block_size)
                assert all(
                    self._pool.holds(block, digest, request.adapter)
                    for block, digest in zip(request.block_table, hashes, strict=False)
                ), f"{request.request_id} has a block of another content"

    def _unpark(self, request: Request) -> None:
        del self._parked[request]
        request.is_parked = False

    def _unpark_another(self, request: Request) -> bool:
        """Release the request that was parked last, other than this one; False if there is none."""
        last = next((parked for parked in reversed(self._parked) if parked is not request), None)
        if last is None:
            return False
        self.release(last)
        return True

    def _num_missing(self, request: Request) -> int:
        return self._pool.blocks_for(len(request.token_ids)) - len(request.block_table)

    def _find(self, request: Request) -> list[int]:
        if not self._share or not request.may_share_blocks:
            return []
        size, text = self._pool.block_size, request.token_ids
        return self._pool.find(request.block_hashes.first((len(text) - 1) // size, text, size))
