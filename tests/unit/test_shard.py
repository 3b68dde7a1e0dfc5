"""Shares of a model: they make up the whole, and what cannot be divided is refused with its numbers."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_core.config import EngineSettings
from lora_core.errors import ConfigError
from lora_core.models.architectures import decoder_config, read_hf_config
from lora_core.models.decoder import DecoderConfig
from lora_core.models.split import check_divisible, linear_splits, share_of, whole_of
from lora_core.parallel.shard import LinearSplit, Shard, shard_parameters
from tests.factories import tiny_llama, tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    folder = tiny_llama(tmp_path_factory.mktemp("base"), heads=12, kv_heads=6, hidden=96, intermediate=72, vocab=131)
    return decoder_config(read_hf_config(folder))


@settings(deadline=None)
@given(width=st.integers(0, 500), size=st.integers(1, 9))
def test_the_ranks_spans_are_the_whole_in_order_and_about_as_wide(width: int, size: int) -> None:
    spans = [Shard(rank, size).span(width) for rank in range(size)]
    assert [place for start, stop in spans for place in range(start, stop)] == list(range(width))
    widths = {stop - start for start, stop in spans}
    assert max(widths) - min(widths) <= 1


@settings(deadline=None)
@given(sections=st.lists(st.integers(1, 6).map(lambda n: 6 * n), min_size=1, max_size=3), size=st.sampled_from([2, 3]))
def test_parts_along_the_outputs_hold_each_section_once(sections: list[int], size: int) -> None:
    split = LinearSplit("outputs", tuple(sections))
    rows = torch.arange(sum(sections) * 2).view(-1, 2)
    parts = [split.part(rows, 0, Shard(rank, size)) for rank in range(size)]
    by_section = [torch.split(part, [width // size for width in sections]) for part in parts]
    rebuilt = torch.cat([section for together in zip(*by_section, strict=True) for section in together])
    assert torch.equal(rebuilt, rows)


def test_a_bias_behind_a_sum_is_the_first_ranks_alone(llama: DecoderConfig) -> None:
    tensors = {
        "model.layers.0.self_attn.o_proj.weight": torch.arange(96 * 96).view(96, 96),
        "model.layers.0.self_attn.o_proj.bias": torch.arange(96),
        "model.layers.0.self_attn.q_proj.bias": torch.arange(96),
        "model.norm.weight": torch.ones(96),
    }
    first, second = (shard_parameters(tensors, linear_splits(llama), Shard(rank, 2)) for rank in range(2))
    assert torch.equal(first["model.layers.0.self_attn.o_proj.bias"], torch.arange(96))
    assert "model.layers.0.self_attn.o_proj.bias" not in second
    assert torch.equal(second["model.layers.0.self_attn.q_proj.bias"], torch.arange(48, 96))
    columns = [part["model.layers.0.self_attn.o_proj.weight"] for part in (first, second)]
    assert torch.equal(torch.cat(columns, 1), tensors["model.layers.0.self_attn.o_proj.weight"])
    assert all(torch.equal(part["model.norm.weight"], torch.ones(96)) for part in (first, second))


def test_shares_are_of_heads_and_width_and_make_up_the_whole(llama: DecoderConfig) -> None:
    shares = [share_of(llama, Shard(rank, 3)) for rank in range(3)]
    assert {(share.num_heads, share.num_kv_heads, share.intermediate_size) for share in shares} == {(4, 2, 24)}
    assert [share.num_head_rows for share in shares] == [43, 44, 44] == list(shares[1].head_widths)
    assert shares[1].projections["o_proj"] == (96, 32)
    assert shares[1].projections["lm_head"] == (44, 96)
    assert shares[1].projections["embed_tokens"] == (96, 131)
    assert all(whole_of(share) == llama for share in shares)


@pytest.mark.parametrize(
    ("size", "found"),
    [
        (4, "num_key_value_heads 6"),
        (5, "num_attention_heads 12 and num_key_value_heads 6 and intermediate_size 72"),
        (12, "num_key_value_heads 6"),
    ],
)
def test_what_does_not_divide_is_refused_with_its_numbers(llama: DecoderConfig, size: int, found: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_divisible(llama, size)
    expected = f"tensor_parallel_size is {size}, which does not divide the base model's {found}; "
    assert str(raised.value) == f"{expected}set it to one of 1, 2, 3, 6"


def test_fused_checkpoints_are_divided_section_by_section(tmp_path: Path) -> None:
    phi = decoder_config(read_hf_config(tiny_model(tmp_path, "Phi3ForCausalLM", layers=1)))
    splits = linear_splits(phi)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    queries, keys = phi.num_heads * phi.head_dim, phi.num_kv_heads * phi.head_dim
    rows = torch.arange(queries + 2 * keys)[:, None]
    part = shard_parameters({name: rows}, splits, Shard(1, 2))[name][:, 0].tolist()
    starts = (queries // 2, queries + keys // 2, queries + keys + keys // 2)
    assert part == [
        row for start, n in zip(starts, (queries, keys, keys), strict=True) for row in range(start, start + n // 2)
    ]


def test_quantised_weights_are_not_divided() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size is 2 and quantization 'int8', and quantised weights"):
        EngineSettings(tensor_parallel_size=2, quantization="int8")
