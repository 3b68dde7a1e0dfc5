"""What an engine will serve and take, from its settings and its model's configuration alone."""

from dataclasses import replace

import torch

from kernels.flashinfer_attention import workspace_bytes
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.decode_graphs import GraphSizes
from lora_core.engine.memory_sizes import engine_sizes, free_bytes, memory_settings
from lora_core.errors import ConfigError
from lora_core.memory_plan import MemoryPlan, plan_memory
from lora_core.models.architectures import decoder_config, read_hf_config
from lora_core.models.decoder import DecoderConfig
from lora_core.models.split import share_of
from lora_core.parallel.shard import WHOLE, Shard

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def served_config(config: DecoderConfig, engine: EngineConfig, lora: LoRAConfig) -> DecoderConfig:
    """A model as an engine serves it: what adapters may change, and how long a text may be.

    Raises:
        ConfigError: `max_model_len` is more than the model is made for.
    """
    return _limit_length(_restrict_targets(config, lora), engine.max_model_len)


def graph_sizes(
    engine: EngineConfig, lora: LoRAConfig, config: DecoderConfig, kv_cache_tokens: int | None
) -> GraphSizes:
    """The sizes of an engine's graphs; none for a model on several devices, whose steps wait for each other."""
    longest = config.max_model_len if kv_cache_tokens is None else min(config.max_model_len, kv_cache_tokens)
    return GraphSizes.choose(
        engine.cuda_graphs if engine.tensor_parallel_size == 1 else "none",
        max_rows=min(engine.max_graph_seqs, engine.max_num_seqs, engine.max_num_batched_tokens),
        max_model_len=longest,
        block_size=engine.block_size,
        has_lora=lora.enable_lora,
    )


def plan_engine(
    engine: EngineConfig, lora: LoRAConfig, device: torch.device, shard: Shard = WHOLE, free: int | None = None
) -> MemoryPlan:
    """What an engine will take of its device; of the model, only config.json is read.

    Args:
        engine: The model and its budgets.
        lora: Whether adapters are served, how many at once, and how large.
        device: It need not be there if `free` is given.
        shard: Whose share of the model it has.
        free: Bytes that are free on the device; None: the device is asked.

    Raises:
        UnsupportedModel: the model's architecture or configuration is not served.
        ConfigError: a setting cannot work with this model, or it does not fit the device.
    """
    hf_config = read_hf_config(engine.model)
    whole = served_config(decoder_config(hf_config), engine, lora)
    config = whole if shard.size == 1 else share_of(whole, shard)
    declared = DTYPES[engine.dtype] or hf_config.dtype
    # A checkpoint that declares none is as wide as its tensors: fp32 at most.
    dtype = declared if isinstance(declared, torch.dtype) else torch.float32
    num_graphs = attention_bytes = 0
    if device.type == "cuda":
        graphs = graph_sizes(engine, lora, config, engine.kv_cache_tokens)
        num_graphs = graphs.num_graphs
        if engine.attention_backend == "flashinfer":
            num_pages = graphs.rows[-1] * graphs.blocks[-1]
            attention_bytes = workspace_bytes(len(config.windows), len(graphs.rows), num_pages)
    return plan_memory(
        engine_sizes(config, engine, lora, dtype=dtype, device=device),
        memory_settings(
            engine,
            lora,
            max_model_len=config.max_model_len,
            num_graphs=num_graphs,
            attention_bytes=attention_bytes,
        ),
        device=str(device),
        free_bytes=free_bytes(device) if free is None else free,
    )


def _restrict_targets(config: DecoderConfig, lora_config: LoRAConfig) -> DecoderConfig:
    if lora_config.adapt_embeddings:
        return config
    return replace(config, targets=tuple(target for target in config.targets if target.kind == "layer"))


def _limit_length(config: DecoderConfig, max_model_len: int | None) -> DecoderConfig:
    if max_model_len is None:
        return config
    if max_model_len > config.max_model_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}, and the model is made for {config.max_model_len} tokens "
            "(max_position_embeddings in its config.json, or original_max_position_embeddings with longrope); "
            "lower max_model_len, or leave it unset"
        )
    return replace(config, max_model_len=max_model_len)
