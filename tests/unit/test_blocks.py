"""KV blocks: each is free, remembered, or in use, and found only by the hash of what it holds."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lora_core.engine.block_hashes import BlockHashes
from lora_core.engine.block_tables import BlockTables
from lora_core.engine.blocks import BlockPool
from lora_core.engine.request import Request
from lora_core.types import AdapterRef

A, B = AdapterRef("x", 1), AdapterRef("x", 2)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_counts_a_part_as_a_block(num_tokens: int, num_blocks: int) -> None:
    assert BlockPool(10, 4).blocks_for(num_tokens) == num_blocks


def test_all_blocks_can_be_taken_and_no_more() -> None:
    pool = BlockPool(3, 4)
    table = pool.allocate(3)
    assert sorted(table) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="1 blocks asked of 0 free"):
        pool.allocate(1)


def test_freeing_empties_the_table_so_that_it_cannot_be_freed_twice() -> None:
    pool = BlockPool(3, 4)
    table = pool.allocate(2)
    pool.free(table)
    pool.free(table)
    assert table == []
    assert pool.num_free == 3
    pool.check([])


def test_check_finds_a_lost_block_and_one_owned_twice() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2), pool.allocate(1)
    pool.check([first, second])
    with pytest.raises(AssertionError, match="do not partition"):
        pool.check([first])
    with pytest.raises(AssertionError, match="counted"):
        pool.check([first, second, second])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_any_order_of_taking_and_freeing_keeps_the_partition(steps: list[tuple[bool, int]]) -> None:
    pool = BlockPool(12, 4)
    tables: list[list[int]] = []
    for takes, number in steps:
        if takes and number <= pool.num_free:
            tables.append(pool.allocate(number))
        elif tables:
            pool.free(tables.pop(number % len(tables)))
        pool.check(tables)


def remembered(pool: BlockPool, *digests: bytes, adapter: AdapterRef | None = None) -> list[int]:
    """A table whose blocks are remembered by these hashes."""
    table = pool.allocate(len(digests))
    for block, digest in zip(table, digests, strict=True):
        pool.remember(block, digest, adapter)
    return table


def test_remembered_blocks_are_found_up_to_the_first_that_is_missing_and_can_be_shared() -> None:
    pool = BlockPool(6, 4)
    table = remembered(pool, b"1", b"2", b"3")
    assert pool.find([b"1", b"2", b"4", b"3"]) == table[:2]
    assert pool.find([b"2"]) == [table[1]]
    assert pool.num_unused(table) == 0
    second = pool.find([b"1", b"2"])
    pool.share(second)
    pool.check([table, second])
    third = list(table)
    pool.free(table)
    # The first two are still in use.
    assert pool.num_free == 4
    assert pool.num_unused(third) == 1
    pool.free(second)
    assert pool.num_free == 6
    pool.check([])


def test_a_second_block_of_the_same_content_is_not_remembered() -> None:
    pool = BlockPool(4, 4)
    first, second = remembered(pool, b"1"), remembered(pool, b"1")
    assert pool.find([b"1"]) == first
    pool.free(second)
    assert pool.num_remembered == 1
    pool.check([first])


def test_unused_blocks_go_least_recently_used_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(4, 4)
    old, new = remembered(pool, b"1", b"2"), remembered(pool, b"3", b"4")
    pool.free(old)
    pool.free(new)
    again = pool.find([b"1"])
    pool.share(again)
    pool.free(again)
    gone = []
    for _ in range(4):
        pool.allocate(1)
        gone += [digest for digest in (b"1", b"2", b"3", b"4") if not pool.find([digest]) and digest not in gone]
    assert gone == [b"2", b"4", b"3", b"1"]


def test_blocks_of_an_adapter_that_is_gone_are_free_at_once_or_when_their_user_ends() -> None:
    pool = BlockPool(4, 4)
    others, used, unused = remembered(pool, b"1"), remembered(pool, b"2", adapter=A), remembered(pool, b"3", adapter=A)
    pool.free(others)
    pool.free(unused)
    pool.forget_adapter(A)
    assert not pool.find([b"2"])
    assert not pool.find([b"3"])
    pool.check([used])
    pool.free(used)
    pool.allocate(3)
    assert pool.find([b"1"]), "an older block of another went first"


def test_hashes_differ_by_weights_by_every_token_before_and_by_their_place() -> None:
    text, other = list(range(12)), [0, 1, 2, 3, 99, 5, 6, 7, 8, 9, 10, 11]
    texts = [BlockHashes(adapter).first(3, tokens, 4) for adapter in (None, A, B) for tokens in (text, other)]
    # The first blocks of both texts are the same, for each of three models; nothing else is.
    assert len(set(itertools.chain(*texts))) == 18 - 3
    repeated = BlockHashes(A).first(3, [7] * 12, 4)
    assert len(set(repeated)) == 3
    # Where one token ends and the next begins is part of the text.
    assert BlockHashes(A).first(1, [1, 256], 2) != BlockHashes(A).first(1, [257, 0], 2)


def test_hashes_differ_by_what_requests_are_kept_apart_by() -> None:
    of_salts = [BlockHashes(adapter, salt).first(1, [1] * 4, 4)[0] for adapter in (None, A) for salt in ("", "x", "y")]
    assert len(set(of_salts)) == 6
    assert BlockHashes(A, "x").first(1, [1] * 4, 4) == BlockHashes(A, "x").first(1, [1] * 4, 4)


def test_hashes_are_the_same_however_they_are_asked_for() -> None:
    text = list(range(40))
    grown = BlockHashes(A)
    assert grown.first(0, [], 4) == []
    parts = [grown.first(count, text[: 4 * count + 1], 4) for count in (1, 2, 9)]
    assert parts[-1] == BlockHashes(A).first(9, text, 4)
    assert grown.first(2, text, 4) == parts[1]


def request(num_tokens: int) -> Request:
    return Request(request_id="r", token_ids=list(range(num_tokens)), num_prompt_tokens=num_tokens, arrival=0)


def compute(tables: BlockTables, request: Request, num_tokens: int) -> None:
    tables.extend(request, num_tokens)
    tables.settle(request, request.num_computed)


def test_a_parked_request_keeps_its_blocks_until_another_needs_them() -> None:
    pool = BlockPool(4, 2)
    tables = BlockTables(pool, share=False)
    parked, other = request(4), request(4)
    for one in (parked, other):
        tables.start(one)
        compute(tables, one, 4)
    tables.park(parked)
    kept = list(parked.block_table)
    parked.token_ids.append(9)
    # It lacks a block, and none of its own would help it.
    assert not tables.fits(parked, 0)
    assert parked.block_table == kept
    tables.release(other)
    assert tables.fits(parked, 1)
    tables.start(parked)
    assert (parked.num_computed, parked.block_table[:2]) == (4, kept)
    tables.check([parked])
    tables.park(parked)
    assert tables.fits(request(7), 0)
    assert not parked.is_parked
    assert (parked.num_computed, parked.block_table) == (0, [])
    tables.check([])


class TablesMachine(RuleBasedStateMachine):
    """Requests of few texts start, compute, grow and end over a small pool; a dictionary says what each block holds."""

    @initialize(num_blocks=st.integers(4, 14), size=st.integers(1, 3), share=st.booleans())
    def begin(self, num_blocks: int, size: int, share: bool) -> None:
        self.size = size
        self.pool = BlockPool(num_blocks, size)
        self.tables = BlockTables(self.pool, share=share)
        self.running: list[Request] = []
        self.parked: list[Request] = []
        self.content: dict[tuple[int, int], tuple[AdapterRef | None, tuple[int, ...]]] = {}

    @rule(adapter=st.sampled_from([None, A, B]), text=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def start(self, adapter: AdapterRef | None, text: list[int]) -> None:
        request = Request(request_id="r", token_ids=text, num_prompt_tokens=len(text), arrival=0, adapter=adapter)
        if self.tables.fits(request, len(self.running)):
            self.tables.start(request)
            assert request.num_computed < len(text)
            assert request.num_cached_tokens == request.num_computed
            self.running.append(request)
            assert self.pool.num_free >= len(self.running) - 1

    @rule(index=st.integers(0, 9), count=st.integers(1, 9))
    def compute(self, index: int, count: int) -> None:
        if not self.running:
            return
        request = self.running[index % len(self.running)]
        count = min(count, request.num_uncomputed)
        for place in range(request.num_computed, request.num_computed + count):
            cell = request.block_table[place // self.size], place % self.size
            self.content[cell] = request.adapter, tuple(request.token_ids[: place + 1])
        compute(self.tables, request, count)
        if not request.num_uncomputed:
            request.token_ids.append(place % 2)
            if not self.tables.grow(request):
                self._end(request)

    @rule(index=st.integers(0, 9))
    def park(self, index: int) -> None:
        if self.running:
            request = self.running.pop(index % len(self.running))
            self.tables.park(request)
            self.parked.append(request)

    @rule()
    def go_on(self) -> None:
        if self.parked and self.tables.fits(self.parked[0], len(self.running)):
            self.running.append(self.parked.pop(0))
            self.tables.start(self.running[-1])

    @rule(index=st.integers(0, 9), is_wrong=st.booleans())
    def end(self, index: int, is_wrong: bool) -> None:
        if self.running:
            request = self.running[index % len(self.running)]
            if is_wrong:
                self.tables.forget(request)
            self._end(request)

    @rule(adapter=st.sampled_from([A, B]))
    def forget_adapter(self, adapter: AdapterRef) -> None:
        self.tables.forget_adapter(adapter)

    @invariant()
    def every_request_reads_its_own_text(self) -> None:
        if not hasattr(self, "tables"):
            return
        self.tables.check(self.running)
        for request in (*self.running, *self.parked):
            for place in range(request.num_computed):
                cell = request.block_table[place // self.size], place % self.size
                assert self.content[cell] == (request.adapter, tuple(request.token_ids[: place + 1]))

    def _end(self, request: Request) -> None:
        self.tables.release(request)
        self.running.remove(request)

    def teardown(self) -> None:
        if hasattr(self, "tables"):
            for request in list(self.running):
                self._end(request)
            for request in self.parked:
                self.tables.release(request)
            assert self.pool.num_free == self.pool.num_blocks


TestTables = TablesMachine.TestCase
TestTables.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
