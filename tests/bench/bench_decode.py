"""`make bench-decode`: decode and prefill rates of this engine, and of PEFT's mixed batch, in one run on one thread.

Prints one JSON line per point and data type. `ours-base` has no adapters in the batch (LoRA is on, as a server has
it), `ours` and `peft` have 1, 4 or 8 all-linear ones, spread over the rows. Before a point is timed, its greedy tokens
in fp32 are compared with PEFT's, up to a row's first near tie: a point that differs is reported and not timed.

Decode rate: B * (N - 1) / (T(N) - T(1)); prefill rate: B * P / T(1), for B rows, prompts of P tokens, answers of N.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cluster.demo.base_model import prepare
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.messages import GenerateRequest, SamplingParams
from tests.factories import LINEAR_TARGETS, make_adapter

PROMPT_TOKENS = 43
NUM_TOKENS = 33
RANK = 16
ADAPTERS = 8
REPEATS = 2
NEAR_TIE = 1e-4
"""Logits closer than this in fp32 may change order with the order of a sum."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Names = Sequence[str | None]
"""The adapter of each row; None is the base model."""


def prompts(batch: int) -> list[list[int]]:
    """A prompt of its own for each row, of ordinary tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 40_000, (batch, PROMPT_TOKENS), generator=generator).tolist()


class Ours:
    """This project's engine."""

    def __init__(self, base: Path, adapters: dict[str, Path], dtype: str) -> None:
        paths = tuple(f"{name}={path}" for name, path in adapters.items())
        lora = LoRAConfig(enable_lora=True, lora_paths=paths, max_lora_rank=RANK, max_num_loras=ADAPTERS)
        settings: dict[str, Any] = {"model": base, "dtype": dtype, "device": "cpu", "num_threads": 1}
        # The same prompts come again and again, and are to be computed each time.
        settings["enable_prefix_caching"] = False
        self._engine = LLMEngine(EngineConfig(**settings, max_num_batched_tokens=2048, max_model_len=512), lora)

    def generate(self, names: Names, num_tokens: int) -> list[list[int]]:
        """Greedy answers of exactly `num_tokens` tokens."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        for row, (prompt, name) in enumerate(zip(prompts(len(names)), names, strict=True)):
            self._engine.add_request(GenerateRequest(str(row), prompt, sampling, name))
        answers: list[list[int]] = [[] for _ in names]
        while self._engine.has_work():
            for delta in self._engine.step():
                if delta.error is not None:
                    raise RuntimeError(delta.error)
                answers[int(delta.request_id)] += delta.token_ids
        return answers


class Peft:
    """PEFT's mixed batch: one `generate` with an adapter name for each row."""

    def __init__(self, base: Path, adapters: dict[str, Path], dtype: str) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=DTYPES[dtype])
        self._model: Any = None
        for name, path in adapters.items():
            options = {"adapter_name": name, "autocast_adapter_dtype": False}
            if self._model is None:
                self._model = PeftModel.from_pretrained(model, str(path), **options)
            else:
                self._model.load_adapter(str(path), **options)
        self._model.to(DTYPES[dtype]).eval()
        # Answers go on past an end of text, as `ignore_eos` has them do here.
        self._model.generation_config.eos_token_id = None
        # With frozen weights the head of a non-contiguous slice becomes a bmm that copies the weight for each row.
        self._model.base_model.model.lm_head.weight.requires_grad_(True)

    @torch.no_grad()
    def generate(self, names: Names, num_tokens: int) -> list[list[int]]:
        """Greedy answers of exactly `num_tokens` tokens."""
        ids = torch.tensor(prompts(len(names)))
        answers = self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), adapter_names=[name or "__base__" for name in names],
            max_new_tokens=num_tokens, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        return answers[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    @torch.no_grad()
    def margin(self, prompt: list[int], name: str | None) -> float:
        """How far apart the two likeliest next tokens are, in logits."""
        logits = self._model(torch.tensor([prompt]), adapter_names=[name or "__base__"]).logits[0, -1].float()
        best, second = logits.topk(2).values.tolist()
        return float(best - second)


def agree(names: Names, ours: Ours, peft: Peft) -> bool:
    """Whether both give the same tokens to every row, up to the first near tie of that row."""
    answers = zip(
        prompts(len(names)), names, ours.generate(names, NUM_TOKENS), peft.generate(names, NUM_TOKENS), strict=True
    )
    for prompt, name, found, right in answers:
        if found != right:
            same = next(index for index, (a, b) in enumerate(zip(found, right, strict=True)) if a != b)
            if peft.margin(prompt + right[:same], name) > NEAR_TIE:
                return False
    return True


def rates(system: Ours | Peft, names: Names) -> dict[str, float]:
    """Best of a few runs, in tokens per second."""

    def best_s(num_tokens: int) -> float:
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            system.generate(names, num_tokens)
            times.append(time.perf_counter() - began)
        return min(times)

    first, whole, batch = best_s(1), best_s(NUM_TOKENS), len(names)
    decode = batch * (NUM_TOKENS - 1) / (whole - first)
    return {"decode_tok_s": round(decode, 1), "prefill_tok_s": round(batch * PROMPT_TOKENS / first, 1)}


def points(batches: Sequence[int]) -> Iterator[tuple[int, int, Names]]:
    """Batch size, number of adapters, and the adapter of each row."""
    for batch in batches:
        for count in (0, 1, 4, 8):
            if count <= batch:
                yield batch, count, [f"a{row % count}" if count else None for row in range(batch)]


def run(base: Path, adapters: dict[str, Path], batches: Sequence[int]) -> int:
    """Check and time every point; returns how many were wrong."""
    wrong: set[tuple[int, int]] = set()
    for dtype in DTYPES:
        ours, peft = Ours(base, adapters, dtype), Peft(base, adapters, dtype)
        for batch, count, names in points(batches):
            point = {"batch": batch, "adapters": count, "dtype": dtype}
            # bf16 flips near ties with the batch's shape in every engine, so tokens are compared in fp32, for both.
            if dtype == "float32" and not agree(names, ours, peft):
                wrong.add((batch, count))
            if (batch, count) in wrong:
                print(json.dumps({"system": "ours", **point, "error": "fp32 tokens differ from PEFT's"}), flush=True)
                continue
            for name, system in (("ours" if count else "ours-base", ours), ("peft", peft)):
                print(json.dumps({"system": name, **point, **rates(system, names)}), flush=True)
    return len(wrong)


def main() -> int:
    """Run the benchmark; the status is 1 if a point's tokens were wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base = prepare(report=lambda line: print(line, file=sys.stderr))
    with tempfile.TemporaryDirectory() as folder:
        adapters = {}
        for index in range(ADAPTERS):
            path = Path(folder) / f"a{index}"
            adapters[f"a{index}"] = make_adapter(base, path, r=RANK, alpha=RANK, targets=LINEAR_TARGETS, seed=index)
        return 1 if run(base, adapters, arguments.batches) else 0


if __name__ == "__main__":
    sys.exit(main())
