"""Which files are an adapter's weights, by their names."""

import json

import pytest

from lora_core.errors import InvalidAdapter
from lora_core.weight_files import INDEX_FILE, WEIGHTS_FILE, find_weights, parse_index

SHARD = "adapter_model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([WEIGHTS_FILE, INDEX_FILE, SHARD, "model.safetensors", "adapter_model.bin"], WEIGHTS_FILE),
        ([INDEX_FILE, SHARD, "model.safetensors"], INDEX_FILE),
        (["other.safetensors", "optimizer.pt", f"checkpoint-1/{WEIGHTS_FILE}"], "other.safetensors"),
    ],
)
def test_the_weights_are_found(names: list[str], found: str) -> None:
    assert find_weights(names) == found
    assert find_weights(names[::-1]) == found


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([SHARD], f"found {SHARD} without {INDEX_FILE}; expected {WEIGHTS_FILE}"),
        ([f"{n}.safetensors" for n in range(9)], r"found 0.safetensors, .* 4.safetensors and 4 more without"),
        (["a.bin", "b.ckpt"], f"found a.bin, b.ckpt and no {WEIGHTS_FILE}: pickled weights are never read"),
        ([f"last/{WEIGHTS_FILE}", f"last/{INDEX_FILE}"], f"are missing; last/{WEIGHTS_FILE} is in a sub-folder"),
        (["adapter_config.json", "last/adapter_model.bin"], "the adapter's weights are missing$"),
    ],
)
def test_what_cannot_be_read_is_named(names: list[str], reason: str) -> None:
    with pytest.raises(InvalidAdapter, match=reason):
        find_weights(names)


def test_an_index_names_files_beside_it() -> None:
    assert parse_index(json.dumps({"metadata": {}, "weight_map": {"key": SHARD}}).encode()) == {"key": SHARD}
    for name in ("../x.safetensors", "x/y.safetensors", "/x.safetensors", "x.bin", ""):
        with pytest.raises(InvalidAdapter, match=r"index\.json: names .*, expected a \*.safetensors file in the same"):
            parse_index(json.dumps({"weight_map": {"key": name}}).encode())
    for content in (b"", b"{}", b"[]", b'{"weight_map": {"key": 1}}', b"\xff", b"[" * 100_000):
        with pytest.raises(InvalidAdapter, match=r"index\.json: not a safetensors index"):
            parse_index(content)
