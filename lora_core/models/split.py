"""How a decoder is divided among ranks: each has some heads, some of the feed-forward width, some of the vocabulary.

The projections into heads and gates are divided along their outputs, those out of them along their inputs, so that a
decoder layer takes two sums over the ranks. Embedding and norms are whole on every rank, and so is the residual stream.
"""

from dataclasses import replace

from lora_core.errors import ConfigError
from lora_core.models.decoder import DecoderConfig
from lora_core.parallel.shard import WHOLE, LinearSplit, Shard


def linear_splits(config: DecoderConfig) -> dict[str, LinearSplit]:
    """How the layers of a whole model are divided, by the last part of their names; the others are not."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden = config.intermediate_size
    outputs = {
        "q_proj": (queries,),
        "k_proj": (keys,),
        "v_proj": (keys,),
        "qkv_proj": (queries, keys, keys),
        "gate_proj": (hidden,),
        "up_proj": (hidden,),
        "gate_up_proj": (hidden, hidden),
        "lm_head": (config.vocab_size,),
    }
    inputs = {"o_proj": (queries,), "down_proj": (hidden,)}
    return {
        **{name: LinearSplit("outputs", sections) for name, sections in outputs.items()},
        **{name: LinearSplit("inputs", sections) for name, sections in inputs.items()},
    }


def share_of(config: DecoderConfig, shard: Shard) -> DecoderConfig:
    """What one rank of a whole model computes.

    Raises:
        ConfigError: heads or feed-forward width cannot be divided so; all numbers are named.
    """
    check_divisible(config, shard.size)
    return replace(
        config,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=config.num_kv_heads // shard.size,
        intermediate_size=config.intermediate_size // shard.size,
        shard=shard,
    )


def whole_of(config: DecoderConfig) -> DecoderConfig:
    """What `share_of` has divided."""
    size = config.shard.size
    return replace(
        config,
        num_heads=config.num_heads * size,
        num_kv_heads=config.num_kv_heads * size,
        intermediate_size=config.intermediate_size * size,
        shard=WHOLE,
    )


def check_divisible(config: DecoderConfig, size: int) -> None:
    """Raise ConfigError, with the numbers, unless a whole model can be divided among `size` ranks."""
    widths = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    uneven = [f"{name} {width}" for name, width in widths.items() if width % size]
    if uneven:
        sizes = [n for n in range(1, config.num_kv_heads + 1) if not any(width % n for width in widths.values())]
        raise ConfigError(
            f"tensor_parallel_size is {size}, which does not divide the base model's {' and '.join(uneven)}; "
            f"set it to one of {', '.join(map(str, sizes))}"
        )
