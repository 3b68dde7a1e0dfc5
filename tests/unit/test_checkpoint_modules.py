"""The base model's layers from its checkpoint: the weights and outputs that the model on one device has."""

from pathlib import Path

import pytest
import torch

from lora_core.base_modules import ModelBaseModules
from lora_core.layers import RoutingContext
from lora_core.models.weights import load_decoder, read_checkpoint
from lora_core.parallel.checkpoint_modules import CheckpointModules
from lora_core.targets import lora_sites
from lora_core.wrapping import wrap_targets
from tests.factories import tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("LlamaForCausalLM", True), ("LlamaForCausalLM", False), ("Qwen2ForCausalLM", True), ("Phi3ForCausalLM", False)],
)
def test_weights_and_canaries_are_those_of_the_model(
    architecture: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tiny_model(tmp_path, architecture, tied=tied)
    decoder, config = load_decoder(folder, dtype=dtype, device=CPU, pack=False)
    sites = lora_sites(config.targets, config.projections, config.num_layers)
    wrap_targets(decoder, sites, RoutingContext())
    model, checkpoint = ModelBaseModules(decoder), CheckpointModules(read_checkpoint(folder), dtype)
    modules = [module for site in sites for module in site.modules]
    assert {"embed_tokens", "lm_head"} < set(modules)
    for module in modules:
        with model.open_weight(module) as expected, checkpoint.open_weight(module) as found:
            assert found.stored.dtype is dtype
            assert torch.equal(found.rows(0, len(found.stored)), expected.rows(0, len(expected.stored))), module
        (x, y), (expected_x, expected_y) = checkpoint.canary(module), model.canary(module)
        assert torch.equal(x, expected_x)
        assert y.dtype is dtype
        torch.testing.assert_close(y, expected_y)
        assert checkpoint.canary(module)[1] is y


def test_unknown_modules_are_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "LlamaForCausalLM", layers=1)
    checkpoint = CheckpointModules(read_checkpoint(folder), torch.float32)
    with pytest.raises(KeyError), checkpoint.open_weight("layers.7.self_attn.q_proj"):
        pass
