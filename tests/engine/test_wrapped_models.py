"""Models that were not written for LoRA: transformers' own, wrapped, against the same model with dense weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from kernels import build_routing
from lora_core.inputs import LoRAInputs
from lora_core.layers import LoRAModelWrapper, RoutingContext
from lora_core.module_weights import ModuleWeights
from lora_core.stacks import SlotStacks
from lora_core.targets import EMBEDDING_TARGET, HEAD_TARGET, LoRASite, LoRATargetModule, lora_sites
from lora_core.wrapping import wrap_targets
from tests.factories import LINEAR_TARGETS, tiny_llama

HIDDEN, KV, INTERMEDIATE, VOCABULARY, RANK = 64, 32, 96, 128, 8
CPU = torch.device("cpu")

PROJECTIONS = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (KV, HIDDEN),
    "v_proj": (KV, HIDDEN),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
    "embed_tokens": (HIDDEN, VOCABULARY),
    "lm_head": (VOCABULARY, HIDDEN),
}


def _path(projection: str) -> str:
    return f"{'mlp' if projection in LINEAR_TARGETS[4:] else 'self_attn'}.{projection}"


SITES = lora_sites(
    (EMBEDDING_TARGET, *(LoRATargetModule(_path(p), (p,)) for p in LINEAR_TARGETS), HEAD_TARGET), PROJECTIONS, 2
)


class Adapter:
    """Random weights for every module, gains in every other one."""

    def __init__(self, seed: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rank = rank
        self._modules = {site.name: self._weights(site, generator) for site in SITES}

    def module(self, name: str) -> ModuleWeights | None:
        return self._modules.get(name)

    def _weights(self, site: LoRASite, generator: torch.Generator) -> ModuleWeights:
        a = torch.randn(self.rank, site.in_features, generator=generator) * 0.1
        b = torch.randn(site.out_features, self.rank, generator=generator) * 0.1
        gain = torch.randn(site.out_features, generator=generator) * 0.1 if site.index % 2 == 0 else None
        return ModuleWeights(a.T.contiguous() if site.kind == "embedding" else a, b, gain)

    def merged(self, folder: Path) -> LlamaForCausalLM:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        with torch.no_grad():
            for site in SITES:
                rows = model.get_parameter(f"{'' if site.kind == 'head' else 'model.'}{site.name}.weight")
                weight = rows.T if site.kind == "embedding" else rows
                a, b, gain = self._modules[site.name]
                weight *= 1 if gain is None else 1 + gain[:, None]
                weight += b @ (a.T if site.kind == "embedding" else a)
        return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sequences_of_a_batch_get_their_adapters(tied: bool, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, tied=tied, attention_bias=True)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    context = RoutingContext()
    wrap_targets(model, SITES, context)
    assert list(model.state_dict()) == list(plain.state_dict())
    wrapper = LoRAModelWrapper(model, context)
    inputs = LoRAInputs(SlotStacks(SITES, 2, RANK, torch.float32), 2, CPU)
    inputs.bind_model(model)
    adapters = {1: Adapter(1, 8), 0: Adapter(2, 3)}
    inputs.bind(inputs.buffers(), list(adapters.items()))

    ids = torch.randint(0, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(0))
    routing = build_routing([1, 0], [0, 7, 14], [3, 8], num_rows=21, max_groups=2, device=CPU)
    with torch.inference_mode():
        logits: Tensor = wrapper(input_ids=ids, routing=routing).logits
        base = plain(input_ids=ids).logits
        for sequence, slot in enumerate((1, 0)):
            expected = adapters[slot].merged(folder)(input_ids=ids[sequence : sequence + 1]).logits[0]
            torch.testing.assert_close(logits[sequence], expected, rtol=1e-4, atol=1e-4)
            assert not torch.allclose(logits[sequence], base[sequence], atol=0.1)
        assert torch.equal(logits[2], base[2])
        assert torch.equal(wrapper(input_ids=ids).logits, base)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)
