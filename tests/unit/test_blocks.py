"""KV blocks: each is free or owned once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_core.engine.blocks import BlockPool


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
    with pytest.raises(AssertionError, match="do not partition"):
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
