"""The model of an engine and the memory it decodes in: a scheduled batch in, logits out."""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels import Routing
from kernels.sgmv_native import sgmv_function
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.attention import SequenceSpan, build_attention, paged_layout, token_positions
from lora_core.engine.kv_cache import Ints, KVCache, KVLayout
from lora_core.engine.prompt_scores import logit_rows
from lora_core.engine.request import ScheduledBatch, ScheduledRow
from lora_core.engine.strips import Strips
from lora_core.errors import ConfigError
from lora_core.layers import LoRALayer, LoRAModelWrapper, lora_layers
from lora_core.manager import LoRAManagerV3
from lora_core.models.decoder import DecoderConfig
from lora_core.models.weights import load_decoder

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """Owns the decoder, the adapter manager bound to it, and the KV cache. Used by one thread.

    Attributes:
        config: What the decoder computes; its `max_model_len` is the engine's, where that is shorter.
        manager: Its slot tensors are those the model reads. With LoRA off it is there, and refuses adapters.
        num_blocks: KV blocks; all may be given to requests.
        kv_cache: What they hold.
    """

    def __init__(self, engine_config: EngineConfig, lora_config: LoRAConfig) -> None:
        """Load the model and allocate the KV cache.

        Raises:
            UnsupportedModel: the model's architecture or configuration is not served.
            ConfigError: a setting cannot work with this model or machine.
        """
        self.device = _device(engine_config.device)
        pack = engine_config.pack_weights and self.device.type == "cpu"
        self._decoder, config = load_decoder(
            engine_config.model,
            dtype=DTYPES[engine_config.dtype],
            device=self.device,
            pack=pack,
            quantization=engine_config.quantization,
        )
        self.dtype = self._decoder.dtype
        self.config = _limit_length(_restrict_targets(config, lora_config), engine_config.max_model_len)
        self.manager = _manager(self.config, engine_config, lora_config, self.dtype, self.device)
        # Without adapters the model runs as it is; with them, the wrapper puts the routing in force.
        self._wrapper: LoRAModelWrapper | None = None
        self._head: LoRALayer | None = None
        if lora_config.enable_lora:
            if self.device.type == "cpu":
                # Compiled where it is not in the cache: no request waits for that.
                sgmv_function()
            self._wrapper = self.manager.wrap(self._decoder)
            self.manager.bind_inputs(self.manager.input_buffers())
            self._head = next((layer for _, layer in lora_layers(self._decoder) if layer.site.kind == "head"), None)
        self.num_blocks = -(-engine_config.kv_cache_tokens // engine_config.block_size)
        self._layout = KVLayout(
            num_blocks=self.num_blocks,
            num_kv_heads=config.num_kv_heads,
            block_size=engine_config.block_size,
            head_dim=config.head_dim,
        )
        self._paged = paged_layout(self._layout, config.num_heads, dtype=self.dtype, device=self.device)
        self._strips: Strips | None = None
        if self.device.type == "cpu" and self._paged is None:
            self._layout = replace(self._layout, num_strips=_num_strips(engine_config, self._layout))
            self._strips = Strips(self._layout) if self._layout.num_strips else None
        self.kv_cache = KVCache(self._layout, config.num_layers, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> Tensor:
        """Compute a batch's tokens: store their keys and values, and choose nothing.

        Args:
            batch: At least one row, sorted by `manager.sort_lora_batch`; each request's adapter is in a slot and its
                `block_table` has room for `num_computed + num_tokens` tokens. Requests are not changed.

        Returns:
            fp32 logits `[rows that sample, vocab_size]`, in row order; all of `logit_rows` where prompts are scored.

        Raises:
            KeyError: the adapter of a request has no slot; it is named.
            ValueError: the batch is not sorted by slot.
        """
        rows = batch.rows
        starts = [row.request.num_computed for row in rows]
        q_lens = np.array([row.num_tokens for row in rows])
        kv_lens = q_lens + np.array(starts)
        spans = [
            SequenceSpan(row.num_tokens, start + row.num_tokens, row.request.block_table)
            for row, start in zip(rows, starts, strict=True)
        ]
        attention = build_attention(
            spans,
            self._layout,
            windows=self.config.windows,
            dtype=self.dtype,
            device=self.device,
            paged=self._paged,
            num_heads=self.config.num_heads,
            strips=self._strips,
        )
        if attention.fresh_blocks is not None:
            self.kv_cache.clear(attention.fresh_blocks)
        if attention.strip_fill is not None:
            self.kv_cache.fill_strips(attention.strip_fill)
        ends = np.cumsum(q_lens)
        routing = self._routing(rows, ends.tolist())
        with self._routed(routing):
            hidden = self._decoder(
                self._to_device(_token_ids(rows, starts)),
                self._to_device(token_positions(q_lens, kv_lens)),
                attention,
                self.kv_cache.layers,
            )
        sampling_rows = logit_rows(rows, ends)
        if len(sampling_rows) < len(hidden):
            hidden = hidden.index_select(0, self._to_device(sampling_rows))
        with self._routed(self._head_routing(routing, sampling_rows)):
            return self._decoder.logits(hidden)

    def check(self) -> None:
        """Assert that what is held of running requests a second time is right; costs time, for tests."""
        if self._strips is not None:
            self._strips.check(self.kv_cache)

    def _routing(self, rows: Sequence[ScheduledRow], ends: Sequence[int]) -> Routing | None:
        if self._wrapper is None:
            return None
        return self.manager.get_lora_graph_inputs(rows, [0, *ends], self.device)

    def _head_routing(self, routing: Routing | None, sampling_rows: Ints) -> Routing | None:
        """The routing of the rows that sample; None where no adapter of the step changes the head."""
        if routing is None or self._head is None or not self._head.is_live(routing):
            return None
        if len(sampling_rows) == routing.num_rows:
            return routing
        return routing.select(sampling_rows.tolist())

    def _routed(self, routing: Routing | None) -> AbstractContextManager[None]:
        return nullcontext() if self._wrapper is None else self._wrapper.routed(routing)

    def _to_device(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _token_ids(rows: Sequence[ScheduledRow], starts: Sequence[int]) -> Ints:
    return np.fromiter(
        itertools.chain.from_iterable(
            row.request.token_ids[start : start + row.num_tokens] for row, start in zip(rows, starts, strict=True)
        ),
        dtype=np.int64,
    )


def _num_strips(engine_config: EngineConfig, layout: KVLayout) -> int:
    num_tokens = engine_config.strip_tokens
    return -(-(engine_config.kv_cache_tokens if num_tokens is None else num_tokens) // layout.strip_tokens)


def _device(setting: str) -> torch.device:
    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', and torch finds no CUDA device here; set it to 'cpu' or 'auto'")
    return torch.device(setting)


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


def _manager(
    config: DecoderConfig,
    engine_config: EngineConfig,
    lora_config: LoRAConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> LoRAManagerV3:
    return LoRAManagerV3(
        lora_config,
        str(engine_config.model),
        dtype,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        engine_config.max_num_batched_tokens,
        config.targets,
        projections=config.projections,
        num_layers=config.num_layers,
        device=device,
    )
