"""What the CPU path copies of a slot is what was last written into it."""

import pytest
import torch

from kernels import build_routing, reference, sgmv, sgmv_cpu
from kernels.bf16_copies import Bf16Copies
from lora_core.module_weights import ModuleWeights
from lora_core.stacks import SlotStacks
from lora_core.targets import LoRASite, LoRATargetModule


class _Adapter:
    """Small integers for gate and up, of one rank."""

    def __init__(self, rank: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rank = rank
        self._weights = [
            [torch.randint(-1, 2, shape, generator=generator).float() for shape in ((rank, 256), (2048, rank))]
            for _ in range(2)
        ]

    def module(self, name: str) -> ModuleWeights | None:
        a, b = self._weights[name.endswith("up_proj")]
        return ModuleWeights(a, b, None)


def test_an_adapter_written_in_pieces_is_served_as_soon_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Bf16Copies(1 << 30)
    monkeypatch.setattr(sgmv_cpu, "_BF16_COPIES", copies)
    monkeypatch.setattr(sgmv_cpu, "_has_fast_bf16", lambda: True)
    target = LoRATargetModule("mlp.gate_up_proj", ("gate_proj", "up_proj"))
    site = LoRASite(0, 0, target, 256, (2048, 2048))
    slots = SlotStacks([site], 2, 64, torch.float32)
    slots.bind([torch.zeros(spec.shape, dtype=spec.dtype) for spec in slots.specs], are_zero=True)
    (bound,) = slots.bound
    x, y = torch.zeros(80, 256, dtype=torch.bfloat16), torch.zeros(80, 4096, dtype=torch.bfloat16)
    x[torch.arange(80), torch.arange(80)] = 1

    def check(slot: int, rank: int) -> None:
        ranks = [0, 0]
        ranks[slot] = rank
        routing = build_routing([slot], [0, 80], ranks, num_rows=80, max_groups=2, device=torch.device("cpu"))
        found, expected = y.clone(), y.clone()
        with torch.inference_mode():
            sgmv(x, bound.a, bound.b, found, routing, site.slices)
        reference.sgmv(x, bound.a, bound.b, expected, routing, site.slices)
        assert torch.equal(found, expected)
        assert found.any()

    slots.write(1, _Adapter(64, 0))
    for seed, rank in enumerate((64, 40, 64, 64, 7)):
        write = slots.begin_write(0, _Adapter(rank, seed + 1))
        num_pieces = 1
        while not write.advance(0.0):
            # The other slot is in use meanwhile.
            check(1, 64)
            num_pieces += 1
        assert num_pieces > 1
        check(0, rank)
        check(1, 64)
    assert copies.num_bytes > 0
