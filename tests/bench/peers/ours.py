"""This project's engine, as a process that `tests.bench.peers.process` asks."""

import gc
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.messages import GenerateRequest, SamplingParams
from tests.bench.peers.protocol import Answers, Generated, Names, serve


class Ours:
    """The engine that a replica's process runs, stepped here."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        lora: dict[str, Any] = {"enable_lora": False}
        if settings["lora"]:
            paths = tuple(f"{name}={path}" for name, path in settings["adapters"].items())
            lora = {
                "enable_lora": True,
                "lora_paths": paths,
                "max_lora_rank": settings["max_lora_rank"],
                "max_num_loras": len(paths),
            }
        engine = {name: settings[name] for name in ("model", "dtype", "kv_cache_tokens", "max_model_len")}
        engine |= {"max_num_seqs": settings["batch"], "max_num_batched_tokens": settings["step_tokens"]}
        # The same prompts come again and again, and are to be computed each time.
        engine |= {"device": "cpu", "num_threads": settings["threads"], "enable_prefix_caching": False}
        self._engine = LLMEngine(EngineConfig(**engine), LoRAConfig(**lora))
        self._engine.warm_up()
        # As the engine's process does it before it serves.
        gc.collect()
        gc.freeze()

    def generate(self, prompts: Sequence[list[int]], names: Names, num_tokens: int) -> Generated:
        """Greedy answers of exactly `num_tokens` tokens."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        for row, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            self._engine.add_request(GenerateRequest(str(row), prompt, sampling, name))
        answers = Answers(len(names))
        while self._engine.has_work():
            deltas = self._engine.step()
            for delta in deltas:
                if delta.error is not None:
                    raise RuntimeError(delta.error)
            answers.add((int(delta.request_id), delta.token_ids) for delta in deltas)
        return answers.tokens, answers.together_tok_s

    def margin(self, prompt: list[int], name: str | None) -> float:
        """Not asked of what is compared with the reference."""
        raise NotImplementedError("the reference tells margins")


if __name__ == "__main__":
    sys.exit(serve(Ours, ["torch", "transformers"]))
