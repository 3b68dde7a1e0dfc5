"""Safetensors files read block by block, hashed by content, and watched for changes."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_core import adapter_weights
from lora_core.adapter_weights import AdapterWeights, BlockBuffer, Destination
from lora_core.errors import InvalidAdapter

FILE = "adapter_model.safetensors"


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(7, 5, generator=generator),
        "b": torch.randn(3, 1000, generator=generator).bfloat16(),
        "c": torch.randn(11, generator=generator).half(),
        "d": torch.ones(2, 3, dtype=torch.int64),
        "e": torch.empty(0, 4),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / FILE)
    return tmp_path


@pytest.mark.parametrize("num_bytes", [1, 100, 2**20])
@pytest.mark.parametrize("key", ["a", "b", "c", "e"])
def test_blocks_are_whole_rows(folder: Path, key: str, num_bytes: int) -> None:
    expected = tensors()[key]
    with AdapterWeights(folder) as weights:
        blocks = [(row, block.clone()) for row, block in weights.blocks(key, BlockBuffer(num_bytes))]
        assert torch.equal(weights.whole(key), expected)
    row_bytes = expected[:1].nbytes
    assert all(block.nbytes <= max(num_bytes, row_bytes) for _, block in blocks)
    assert [row for row, _ in blocks] == [sum(len(block) for _, block in blocks[:i]) for i in range(len(blocks))]
    assert torch.equal(torch.cat([expected[:0], *(block for _, block in blocks)]), expected)


@pytest.mark.parametrize("num_bytes", [1, 100, 2**20])
@pytest.mark.parametrize("key", ["a", "b", "c", "e"])
def test_blocks_go_straight_to_their_place(
    folder: Path, key: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_weights, "_BLOCK_BYTES", num_bytes)
    expected = tensors()[key]
    place = torch.full((len(expected) + 2, *expected.shape[1:]), 7, dtype=expected.dtype)
    destination = place[1:-1]
    with AdapterWeights(folder) as weights:
        for row, block in weights.blocks(key, Destination(destination)):
            assert torch.equal(block, expected[row : row + len(block)])
            assert block.data_ptr() == destination[row:].data_ptr()
            assert block.nbytes <= max(num_bytes, expected[:1].nbytes)
            # What becomes of a block does not change the hash.
            block.zero_()
        assert not destination.any()
        assert (place[0] == 7).all()
        assert (place[-1] == 7).all()
        assert weights.content_hash(b"{}") == content_hash(folder)


def content_hash(folder: Path, config: bytes = b"{}") -> str:
    with AdapterWeights(folder) as weights:
        return weights.content_hash(config)


def test_the_hash_is_of_the_content_alone(folder: Path, tmp_path: Path) -> None:
    first = content_hash(folder)
    assert len(first) == 64
    shards = tmp_path / "shards"
    shards.mkdir()
    parts = {"1.safetensors": ("d", "a"), "2.safetensors": ("c", "b", "e")}
    for name, keys in parts.items():
        save_file({key: tensors()[key] for key in keys}, shards / name, metadata={"format": "pt"})
    weight_map = {key: name for name, keys in parts.items() for key in keys}
    (shards / f"{FILE}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert content_hash(shards) == first
    with AdapterWeights(folder) as weights:
        list(weights.blocks("b", BlockBuffer(1)))
        weights.whole("a")
        assert weights.content_hash(b"{}") == first


@pytest.mark.parametrize(
    "edit",
    [
        lambda all_: {**all_, "a": all_["a"].flip(0)},
        lambda all_: {**all_, "a": all_["a"].view(5, 7)},
        lambda all_: {**all_, "a": all_["a"].view(torch.int32)},
        lambda all_: {"A" if key == "a" else key: tensor for key, tensor in all_.items()},
        lambda all_: {key: tensor for key, tensor in all_.items() if key != "e"},
        lambda all_: {**all_, "d": all_["d"] + 1},
    ],
)
def test_any_change_gives_another_hash(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    before = content_hash(folder)
    assert content_hash(folder, b"{ }") != before
    save_file(edit(tensors()), folder / FILE)
    assert content_hash(folder) != before


def rewrite_in_place(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    time.sleep(0.02)  # longer than a tick of the clock that files are stamped by
    with path.open("r+b") as file:
        file.write(content)


def change_header(path: Path) -> None:
    stamp = path.stat()
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"?")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        rewrite_in_place,
        change_header,
        lambda path: os.truncate(path, 400),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: os.truncate(path, path.stat().st_size + 1),
    ],
)
def test_a_file_that_changes_meanwhile(folder: Path, change: Callable[[Path], None]) -> None:
    with AdapterWeights(folder) as weights:
        change(folder / FILE)
        with pytest.raises(InvalidAdapter, match=rf"{FILE}: changed while it was being read"):
            weights.content_hash(b"")


def test_a_file_that_is_replaced_meanwhile_is_still_the_one_opened(folder: Path) -> None:
    before = content_hash(folder)
    with AdapterWeights(folder) as weights:
        save_file({"a": torch.ones(9)}, folder / "new")
        (folder / "new").replace(folder / FILE)
        assert weights.content_hash(b"{}") == before
    assert set(load_file(folder / FILE)) == {"a"}
