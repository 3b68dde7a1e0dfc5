"""What choosing tokens costs a step: one JSON line for each mix of requests.

`python -m tests.bench.bench_sampler [--rows 32]`, on one thread. The logits are like those of a small model: most of
the probability in some tens of tokens. `step_ms` is the step thread's own time; `wall_ms` is what passed, with whatever
else the machine does, and for constrained rows with the wait for what may come next, which in an engine passes while
the model computes.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from cluster.base_model import locate_base_model
from lora_core.engine.end_of_text import eos_token_ids
from lora_core.engine.grammars import Grammars
from lora_core.engine.sampler import sample
from lora_core.engine.sampler_state import SamplerState
from lora_core.messages import Constraint, SamplingParams

NUM_STEPS = 60
VOCAB = 49152
PROMPT, OUTPUT = range(0, 1024, 4), range(0, 384, 3)
FIELDS = {
    "name": {"type": "string"},
    "age": {"type": "integer"},
    "tags": {"type": "array", "items": {"type": "string"}},
}
SCHEMA = Constraint("json_schema", json.dumps({"type": "object", "properties": FIELDS, "required": [*FIELDS]}))
EVERYTHING: dict[str, Any] = {
    "temperature": 0.8, "top_p": 0.9, "top_k": 200, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.2,
    "frequency_penalty": 0.2, "logit_bias": tuple((token_id, 1.0) for token_id in range(100)), "seed": 7,
    "min_tokens": 1000, "max_tokens": 1000, "stop_token_ids": (7,), "logprobs": 5,
}  # fmt: skip
MIXES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "temperature, top_p": {"temperature": 0.8, "top_p": 0.9},
    "temperature, top_k": {"temperature": 0.8, "top_k": 50},
    "temperature, min_p": {"temperature": 0.8, "min_p": 0.05},
    "temperature, seed": {"temperature": 0.8, "seed": 7},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "greedy, logprobs": {"temperature": 0.0, "logprobs": 5},
    "everything": EVERYTHING,
    "greedy, schema": {"temperature": 0.0, "constraint": SCHEMA},
    "everything, schema": {**EVERYTHING, "constraint": SCHEMA},
}


def model_logits(rows: int, seed: int) -> Tensor:
    """Logits `[rows, VOCAB]` that fall with the logarithm of the rank, at random places."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(rows)]).float() + 1
    return -1.6 * ranks.log() + 0.5 * torch.randn(rows, VOCAB, generator=generator)


def start(sampling: SamplingParams, grammars: Grammars) -> SamplerState:
    """A request in the middle of its answer; a constrained one at its start."""
    state = SamplerState.start(sampling, PROMPT, frozenset({2}))
    for token_id in OUTPUT:
        state.take(token_id)
    if sampling.constraint is not None:
        state.constraint = grammars.compile(sampling.constraint).result()
    return state


def step_ms(mix: dict[str, Any], logits: list[Tensor], grammars: Grammars) -> tuple[float, float]:
    """Median processor and wall time of one step, its bookkeeping included."""
    sampling = [SamplingParams(**mix)] * len(logits[0])
    states = [start(one, grammars) for one in sampling]
    shared = torch.Generator()
    own_s, passed_s = [], []
    for step in range(NUM_STEPS):
        given = logits[step % len(logits)].clone()
        started_s, started_own_s = time.perf_counter(), time.thread_time()
        grammars.settle([state.constraint for state in states if state.constraint is not None])
        choices = sample(given, sampling, states, shared)
        followed = []
        for state, choice in zip(states, choices, strict=True):
            assert choice is not None
            state.take(choice.token_id)
            if state.constraint is not None:
                followed.append((state.constraint, choice.token_id))
        grammars.follow([one for one in followed if one[1] != 2])
        own_s.append(time.thread_time() - started_own_s)
        passed_s.append(time.perf_counter() - started_s)
        for place, (state, choice) in enumerate(zip(states, choices, strict=True)):
            if state.constraint is not None and choice is not None and choice.token_id == 2:
                states[place] = start(sampling[place], grammars)
    return 1e3 * statistics.median(own_s), 1e3 * statistics.median(passed_s)


def main() -> None:
    """Print one line for each mix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    rows = parser.parse_args().rows
    torch.set_num_threads(1)
    model = locate_base_model("demo")
    grammars = Grammars(model, VOCAB, eos_token_ids(model))
    logits = [model_logits(rows, seed) for seed in range(4)]
    for name, mix in MIXES.items():
        own_ms, passed_ms = step_ms(mix, logits, grammars)
        line = {"measure": "sampler", "mix": name, "rows": rows, "vocab": VOCAB}
        print(json.dumps({**line, "step_ms": round(own_ms, 3), "wall_ms": round(passed_ms, 3)}), flush=True)


if __name__ == "__main__":
    main()
