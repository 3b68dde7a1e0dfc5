"""The demo model and its trained adapters through the engine: the very tokens transformers and PEFT give, in fp32."""

from collections.abc import Iterator

import pytest
import torch

from cluster.demo.base_model import prepare
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.messages import GenerateRequest, SamplingParams
from tests.reference import ADAPTERS, DEMO_ADAPTERS, QUESTIONS, Reference

NUM_TOKENS = 64
Case = tuple[str | None, str]
CASES: list[Case] = [(model, question) for question in QUESTIONS for model in (*DEMO_ADAPTERS, None)]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def right(reference: Reference) -> dict[Case, list[int]]:
    return {(model, question): reference.tokens(model, question, NUM_TOKENS) for model, question in CASES}


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    paths = tuple(f"{name}={ADAPTERS / name}" for name in DEMO_ADAPTERS)
    config = EngineConfig(model=prepare(), dtype="float32", device="cpu", num_threads=1, max_model_len=512)
    yield LLMEngine(config, LoRAConfig(enable_lora=True, lora_paths=paths, max_num_loras=3))
    torch.set_num_threads(1)


def answer(engine: LLMEngine, reference: Reference, cases: list[Case]) -> list[list[int]]:
    """All of them in one batch."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    for index, (model, question) in enumerate(cases):
        engine.add_request(GenerateRequest(str(index), reference.prompt(question), sampling, model))
    answers: list[list[int]] = [[] for _ in cases]
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta.error
            answers[int(delta.request_id)] += delta.token_ids
    engine.check_invariants()
    return answers


@pytest.mark.parametrize("case", CASES)
def test_alone(engine: LLMEngine, reference: Reference, right: dict[Case, list[int]], case: Case) -> None:
    assert answer(engine, reference, [case]) == [right[case]]


def test_eight_requests_over_three_adapters_and_base(
    engine: LLMEngine, reference: Reference, right: dict[Case, list[int]]
) -> None:
    assert answer(engine, reference, CASES) == [right[case] for case in CASES]
    assert len({tuple(tokens) for tokens in right.values()}) == len(CASES), "eight different answers"
