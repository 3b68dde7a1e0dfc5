"""The routing triple of sorted batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_core.routing import routing_triple

A, B, C = 0, 1, 2


@pytest.mark.parametrize(
    ("batch", "lora_ids", "grouped_offsets", "end"),
    [
        ([(A, 10)], [0], [0, 10], 10),
        ([(A, 5), (A, 5), (B, 10)], [0, 1], [0, 10, 20], 20),
        ([(A, 2), (A, 2), (B, 2), (None, 1)], [0, 1], [0, 4, 6], 6),
        ([(C, 3), (B, 4), (A, 2), (A, 5), (None, 1), (None, 6)], [2, 1, 0], [0, 3, 7, 14], 14),
        ([(None, 3), (None, 1)], [], [0], 0),
        ([], [], [0], 0),
    ],
)
def test_table(batch: list[tuple[int | None, int]], lora_ids: list[int], grouped_offsets: list[int], end: int) -> None:
    assert routing_triple(batch) == (lora_ids, grouped_offsets, end)


def test_an_adapter_after_a_base_request_is_refused_not_served_by_the_base() -> None:
    with pytest.raises(ValueError, match=r"slot 1 follows a base request.*sort_lora_batch"):
        routing_triple([(0, 2), (None, 1), (1, 3)])


def test_negative_token_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 token rows"):
        routing_triple([(0, -1)])


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=12),
    st.lists(st.integers(0, 4), max_size=4),
)
def test_every_row_gets_the_slot_of_its_request(adapted: list[tuple[int, int]], base: list[int]) -> None:
    adapted = sorted(adapted, key=lambda entry: -entry[0])
    batch: list[tuple[int | None, int]] = [*adapted, *((None, tokens) for tokens in base)]
    lora_ids, offsets, end = routing_triple(batch)

    row_slots = [slot for slot, tokens in adapted for _ in range(tokens)]
    routed = [slot for index, slot in enumerate(lora_ids) for _ in range(offsets[index], offsets[index + 1])]
    assert routed == row_slots
    assert end == offsets[-1] == len(row_slots)
    assert len(set(lora_ids)) == len(lora_ids)
