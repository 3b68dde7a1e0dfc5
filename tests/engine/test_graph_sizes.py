"""At which sizes graphs are captured, and the buffers they read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lora_core.engine.buckets import block_buckets, row_buckets, smallest
from lora_core.engine.decode_graphs import GraphSizes
from lora_core.engine.step_buffers import PendingTokens, fill_pending, upload_step
from lora_core.layers import Adapted

CPU = torch.device("cpu")


def test_row_buckets_are_few_and_near() -> None:
    assert row_buckets(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert row_buckets(1) == (1,)
    assert row_buckets(7) == (1, 2, 4, 7)
    assert row_buckets(300)[-3:] == (192, 256, 300)
    for most in range(1, 300):
        buckets = row_buckets(most)
        assert list(buckets) == sorted(set(buckets))
        assert buckets[-1] == most
        for rows in range(1, most + 1):
            found = smallest(buckets, rows)
            assert found is not None
            assert rows <= found <= 2 * rows
        assert smallest(buckets, most + 1) is None


def test_block_buckets_reach_the_longest_text() -> None:
    assert block_buckets(2048, 16) == (128,)
    assert block_buckets(4096, 16) == (256,)
    assert block_buckets(131072, 16) == (256, 1024, 4096, 8192)
    assert block_buckets(4097, 100) == (41,)


@pytest.mark.parametrize(
    ("setting", "has_lora", "kinds"),
    [
        ("none", True, ()),
        ("common", True, (Adapted.NOTHING, Adapted.LAYERS)),
        ("all", True, (Adapted.NOTHING, Adapted.LAYERS, Adapted.EVERYTHING)),
        ("all", False, (Adapted.NOTHING,)),
    ],
)
def test_kinds_of_graphs(setting: str, has_lora: bool, kinds: Sequence[Adapted]) -> None:
    sizes = GraphSizes.choose(setting, max_rows=8, max_model_len=8192, block_size=16, has_lora=has_lora)
    assert sizes.adapted == tuple(kinds)
    assert sizes.num_graphs == 4 * 2 * len(kinds)
    assert next(iter(sizes.tables)) == (8, 512)


def test_buffers_are_written_in_place_and_pending_tokens_put_where_they_are_read() -> None:
    def rows(first: int) -> tuple[Any, Any, Any]:
        return np.arange(first, first + 3), np.arange(3) + 10, np.arange(12) + first

    buffers = upload_step(*rows(0), CPU)
    addresses = [view.data_ptr() for view in buffers]
    again = upload_step(*rows(5), CPU, buffers)
    assert [view.data_ptr() for view in again] == addresses
    assert again.token_ids.tolist() == [5, 6, 7]
    assert again.positions.tolist() == [10, 11, 12]
    assert again.write_rows.tolist() == list(range(5, 17))
    fill_pending(again.token_ids, PendingTokens(torch.tensor([70, 80]), np.array([0, 2]), np.array([1, 0])))
    assert again.token_ids.tolist() == [80, 6, 70]
    with pytest.raises(AssertionError, match="do not fill"):
        upload_step(*rows(0), CPU, again._replace(buffer=again.buffer[:4]))
