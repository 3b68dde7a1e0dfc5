"""Log-probabilities the engine tells, against those of transformers' logits; and penalties through whole answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from lora_core.engine.engine import LLMEngine
from lora_core.messages import GenerateRequest, SamplingParams, TokenDelta, TokenLogprobs
from tests.engine.answers import PROMPTS, Names, assert_nothing_left, make_engine
from tests.factories import reference_logits, reference_model


def run(engine: LLMEngine, requests: Sequence[GenerateRequest]) -> dict[str, list[TokenDelta]]:
    """All deltas of some requests."""
    deltas: dict[str, list[TokenDelta]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
        engine.check_invariants()
    assert_nothing_left(engine)
    return deltas


def assert_same(found: Sequence[TokenLogprobs], logprobs: Tensor, token_ids: Sequence[int], num_top: int) -> None:
    """Compare with log-softmax rows `[len(token_ids), V]`."""
    assert len(found) == len(token_ids)
    for one, row, token_id in zip(found, logprobs, token_ids, strict=True):
        assert one.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert one.top_logprobs == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        assert [float(row[top]) for top in one.top_ids] == pytest.approx(one.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}, {"kv_cache_tokens": 64, "block_size": 4}])
def test_logprobs_of_answers_and_prompts_are_those_of_transformers(
    tiny_base: Path, tiny_adapters: Names, settings: dict[str, Any]
) -> None:
    """Whole prompts, prompts in chunks, and prompts that are computed twice after a preemption."""
    name, folder = next(iter(tiny_adapters.items()))
    asked = [
        ("both", 20, None, SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, prompt_logprobs=2)),
        ("prompt", 33, name, SamplingParams(max_tokens=3, temperature=0.8, seed=1, prompt_logprobs=0)),
        ("answer", 12, name, SamplingParams(max_tokens=12, temperature=1.3, seed=2, logprobs=0, min_p=0.1)),
        ("none", 7, None, SamplingParams(max_tokens=12, temperature=0.0)),
        ("short", 1, None, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)),
    ]
    engine = make_engine(tiny_base, tiny_adapters, **settings)
    requests = [GenerateRequest(key, PROMPTS[size], sampling, lora) for key, size, lora, sampling in asked]
    deltas = run(engine, requests)
    for key, size, lora, sampling in asked:
        prompt = PROMPTS[size]
        answer = [token_id for delta in deltas[key] for token_id in delta.token_ids]
        assert len(answer) == sampling.max_tokens
        expected = reference_logits(tiny_base, None if lora is None else folder, prompt + answer).log_softmax(-1)
        if sampling.logprobs is None:
            assert all(delta.logprobs is None for delta in deltas[key])
        else:
            told = [one for delta in deltas[key] for one in delta.logprobs or ()]
            assert_same(told, expected[size - 1 : -1], answer, sampling.logprobs)
        first, *rest = deltas[key]
        assert all(delta.prompt_logprobs is None for delta in rest)
        if sampling.prompt_logprobs is None:
            assert first.prompt_logprobs is None
        else:
            assert_same(first.prompt_logprobs or [], expected[: size - 1], prompt[1:], sampling.prompt_logprobs)


def test_a_penalised_greedy_answer_is_that_of_transformers(tiny_base: Path) -> None:
    """Token by token, over the whole text anew each time, with OpenAI's penalties written out."""
    sampling = SamplingParams(
        max_tokens=40, temperature=0.0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3
    )
    prompt = PROMPTS[20]
    deltas = run(make_engine(tiny_base, {}, slots=0, kv_cache_tokens=80), [GenerateRequest("r", prompt, sampling)])
    found = [token_id for delta in deltas["r"] for token_id in delta.token_ids]
    model = reference_model(tiny_base)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2)])
    token_ids = list(prompt)
    for _ in range(40):
        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            scores: Tensor = processors(ids, model(input_ids=ids).logits[:, -1])[0]  # type: ignore[arg-type]
        answer = torch.tensor(token_ids[len(prompt) :], dtype=torch.int64)
        counts = torch.bincount(answer, minlength=len(scores))
        token_ids.append(int((scores - 0.3 * counts - 0.4 * (counts > 0)).argmax()))
    assert found == token_ids[len(prompt) :]
    plain = run(
        make_engine(tiny_base, {}, slots=0),
        [GenerateRequest("r", prompt, SamplingParams(max_tokens=40, temperature=0.0))],
    )
    assert found != [token_id for delta in plain["r"] for token_id in delta.token_ids]
