"""Modules filled by several threads: all of them, in order, and the same fault told each time."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lora_core import module_loader
from lora_core.adapter_tensors import TensorLoader
from lora_core.errors import InvalidAdapter
from lora_core.model import LoRAModel

LAYERS, RANK, WIDTH = 8, 4, 64


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_loader, "thread_count", lambda num_elements: 4)


def key(layer: int, part: str) -> str:
    return f"base_model.model.model.layers.{layer}.self_attn.o_proj.{part}.weight"


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"lora_A": (RANK, WIDTH), "lora_B": (WIDTH, RANK)}
    return {
        key(layer, part): torch.randn(shape, generator=generator)
        for layer in range(LAYERS)
        for part, shape in shapes.items()
    }


def save(folder: Path, content: dict[str, Tensor]) -> Path:
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(content, folder / "adapter_model.safetensors")
    return folder


def load(folder: Path) -> LoRAModel:
    return LoRAModel(
        "x", folder, torch.float32, RANK, 4, 4, 16, projections={"o_proj": (WIDTH, WIDTH)}, num_layers=LAYERS
    )


def test_every_module_is_filled(tmp_path: Path) -> None:
    content = tensors()
    content[key(5, "lora_B")].zero_()
    content[key(2, "lora_A")].zero_()
    adapter = load(save(tmp_path, content))
    for layer in range(LAYERS):
        weights = adapter.module(f"layers.{layer}.self_attn.o_proj")
        assert weights is not None
        assert torch.equal(weights.a, content[key(layer, "lora_A")])
        assert torch.equal(weights.b, content[key(layer, "lora_B")] * 2)
    assert adapter.noop_modules == ("layers.2.self_attn.o_proj", "layers.5.self_attn.o_proj")
    assert load(tmp_path).content_hash == adapter.content_hash


def test_the_first_fault_in_order_is_told(tmp_path: Path) -> None:
    content = tensors()
    for layer in (3, 4, 5, 6):
        content[key(layer, "lora_B")][0, 0] = torch.nan
    save(tmp_path, content)
    for _ in range(10):
        with pytest.raises(InvalidAdapter, match=r"layers\.3\.self_attn.o_proj.lora_B.weight: 1 NaN"):
            load(tmp_path)


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = threading.active_count()
    load(save(tmp_path, tensors()))
    assert threading.active_count() == before


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_threads_give_way_to_the_step_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    fill = TensorLoader.fill

    def note_and_fill(self: TensorLoader, *arguments: object) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        fill(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TensorLoader, "fill", note_and_fill)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    load(save(tmp_path, tensors()))
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert len(seen) == LAYERS
    assert min(seen) > before


@pytest.mark.parametrize(("num_elements", "most"), [(0, 1), (10**6, 1), (10**7, 1), (2 * 10**7, 2), (10**9, 4)])
def test_small_adapters_get_one_thread(monkeypatch: pytest.MonkeyPatch, num_elements: int, most: int) -> None:
    monkeypatch.undo()
    assert 1 <= module_loader.thread_count(num_elements) <= most


def test_a_load_in_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        adapter = load(save(tmp_path, tensors()))
    weights = adapter.module("layers.0.self_attn.o_proj")
    assert weights is not None
    assert not weights.a.is_inference()


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> threading.Barrier:
    """Four threads must come to fill a module before any of them goes on."""
    barrier = threading.Barrier(4, timeout=30)
    fill = TensorLoader.fill

    def meet_and_fill(self: TensorLoader, *arguments: object) -> None:
        barrier.wait()
        fill(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TensorLoader, "fill", meet_and_fill)
    return barrier


def test_threads_work_at_the_same_time(tmp_path: Path, meeting: threading.Barrier) -> None:
    adapter = load(save(tmp_path, tensors()))
    assert len(adapter.ranks) == LAYERS
    assert not meeting.broken
