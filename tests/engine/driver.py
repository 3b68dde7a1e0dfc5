"""Runs requests through a runner without a scheduler, as many tokens of each in a step as a test asks for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.blocks import BlockPool
from lora_core.engine.request import Request, ScheduledBatch, ScheduledRow
from lora_core.engine.runner import ModelRunner
from lora_core.types import AdapterRef, LoRAStatus

PROMPT = [5, 17, 90, 3, 44, 44, 21, 8, 101, 63, 2]


class Driver:
    """Runs requests greedily, as many tokens of each in a step as asked for."""

    def __init__(
        self, base: Path, adapters: dict[str, Path] | None = None, *, adapt_embeddings: bool = True, **settings: Any
    ) -> None:
        adapters = adapters or {}
        engine_config = EngineConfig(
            model=base, **{"dtype": "float32", "device": "cpu", "block_size": 4, "kv_cache_tokens": 2048, **settings}
        )
        lora_config = LoRAConfig(
            enable_lora=bool(adapters),
            max_num_loras=max(1, len(adapters)),
            max_lora_rank=8,
            adapt_embeddings=adapt_embeddings,
        )
        self.runner = ModelRunner(engine_config, lora_config)
        self.blocks = BlockPool(self.runner.num_blocks, engine_config.block_size)
        self.refs: dict[str | None, AdapterRef | None] = {None: None}
        for name, folder in adapters.items():
            response = self.runner.manager.load_adapter(f"{name}={folder}")
            assert response.status is LoRAStatus.SUCCESS, response.message
            self.refs[name] = self.runner.manager.acquire(name)
            self.runner.manager.activate_adapter(name)

    def request(self, prompt: Sequence[int], adapter: str | None = None) -> Request:
        return Request(
            request_id=str(adapter),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            arrival=0,
            adapter=self.refs[adapter],
        )

    def step(self, work: Sequence[tuple[Request, int]]) -> dict[int, Tensor]:
        """Run the next tokens of requests; those that sample get their next token. Returns logits by `id(request)`."""
        for request, num_tokens in work:
            needed = self.blocks.blocks_for(request.num_computed + num_tokens) - len(request.block_table)
            request.block_table += self.blocks.allocate(needed)
        rows = self.runner.manager.sort_lora_batch([ScheduledRow(request, n) for request, n in work])
        logits = self.runner.run(ScheduledBatch(rows))
        sampling = [row.request for row in rows if row.samples]
        assert logits.shape == (len(sampling), self.runner.config.vocab_size)
        assert logits.dtype == torch.float32
        for row in rows:
            row.request.num_computed += row.num_tokens
        for request, row_logits in zip(sampling, logits, strict=True):
            request.token_ids.append(int(row_logits.argmax()))
        return {id(request): row_logits for request, row_logits in zip(sampling, logits, strict=True)}

    def finish(self, requests: Sequence[Request], n: int, *, chunk: int = 1000) -> None:
        """Decode until each request has `n` output tokens; prompts run in chunks."""
        while running := [request for request in requests if request.num_output_tokens < n]:
            self.step([(request, min(chunk, request.num_uncomputed)) for request in running])
