"""Edits of logits, against transformers' processors and against the equations in numpy, one token at a time."""

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from lora_core.engine.penalties import FIRST_CAPACITY, TokenCounts
from lora_core.engine.sampler import Choice, edit, sample
from lora_core.engine.sampler_state import SamplerState
from lora_core.messages import SamplingParams

VOCAB = 40
EOS = frozenset({2})


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def after(sampling: SamplingParams, prompt: list[int], output: list[int]) -> SamplerState:
    """The state of a request that has generated `output`."""
    state = SamplerState.start(sampling, prompt, EOS)
    for token_id in output:
        state.take(token_id)
    return state


def edited(logits: Tensor, sampling: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """One row `[V]` as the sampler edits it."""
    found = logits.clone().unsqueeze(0)
    state = after(sampling, prompt, output)
    if state.edits_logits:
        edit(found, [0], [sampling], [state])
    return found[0]


def by_the_equations(logits: Tensor, sampling: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """The same, token by token, in the order the sampler documents."""
    row = logits.numpy().copy()
    generated = Counter(output)
    ending = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)}
    bias = dict(sampling.logit_bias)
    for t in range(len(row)):
        if len(output) < sampling.min_tokens and t in ending:
            row[t] = -np.inf
        row[t] += np.float32(bias.get(t, 0.0))
        if t in generated or t in prompt:
            strength = np.float32(sampling.repetition_penalty)
            row[t] = row[t] / strength if row[t] > 0 else row[t] * strength
        row[t] -= np.float32(sampling.frequency_penalty) * np.float32(generated[t])
        row[t] -= np.float32(sampling.presence_penalty) * np.float32(t in generated)
    return torch.from_numpy(row)


PROMPT, OUTPUT = [3, 9, 9, 17], [9, 5, 5, 5, 30, 17]


@pytest.mark.parametrize("strength", [0.5, 1.3, 5.0])
def test_the_repetition_penalty_is_that_of_transformers(strength: float) -> None:
    logits = random_logits(1)[0]
    ids = torch.tensor([PROMPT + OUTPUT])
    expected = RepetitionPenaltyLogitsProcessor(strength)(ids, logits.clone().unsqueeze(0))[0]
    assert torch.equal(edited(logits, SamplingParams(repetition_penalty=strength), PROMPT, OUTPUT), expected)


def test_a_bias_is_that_of_transformers() -> None:
    logits = random_logits(1)[0]
    bias = {4: 2.5, 0: -100.0, 39: 0.25}
    processor = SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()])
    expected = processor(torch.tensor([PROMPT]), logits.clone().unsqueeze(0))[0]
    assert torch.equal(edited(logits, SamplingParams(logit_bias=tuple(bias.items())), PROMPT, []), expected)


@pytest.mark.parametrize("num_output", [0, 2, 3, 4])
def test_min_tokens_is_that_of_transformers(num_output: int) -> None:
    logits, output = random_logits(1)[0], [7] * num_output
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [2, 8])
    expected = processor(torch.tensor([PROMPT + output]), logits.clone().unsqueeze(0))[0]
    assert torch.equal(edited(logits, SamplingParams(min_tokens=3, stop_token_ids=(8,)), PROMPT, output), expected)


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 1000),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 1.5, 7.0]), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.sampled_from([0, 3, 31]),
    stop_token_ids=st.sampled_from([(), (5,), (2, 11)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(deadline=None, max_examples=200)
@given(sampling=params, prompt=tokens, output=tokens)
def test_everything_together_follows_the_equations(
    sampling: SamplingParams, prompt: list[int], output: list[int]
) -> None:
    logits = random_logits(1, seed=len(prompt) * 31 + len(output))[0]
    expected = by_the_equations(logits, sampling, prompt, output)
    torch.testing.assert_close(edited(logits, sampling, prompt, output), expected, atol=1e-5, rtol=1e-5)


row = st.tuples(params, tokens, tokens)


@settings(deadline=None, max_examples=150)
@given(rows=st.lists(row, min_size=2, max_size=7), data=st.data())
def test_a_row_is_the_same_alone_and_in_any_batch(
    rows: list[tuple[SamplingParams, list[int], list[int]]], data: st.DataObject
) -> None:
    """Seeds, truncation, edits and log-probabilities mixed per row: the neighbours decide nothing."""
    logits = random_logits(len(rows), seed=len(rows))
    order = data.draw(st.permutations(range(len(rows))))

    def choices(of: list[int]) -> list[Choice | None]:
        states = [after(*rows[index]) for index in of]
        return sample(logits[of].clone(), [rows[index][0] for index in of], states, torch.Generator())

    together = dict(zip(order, choices(list(order)), strict=True))
    for index in range(len(rows)):
        assert choices([index]) == [together[index]]


def test_counts_are_kept_as_they_grow() -> None:
    counts = TokenCounts([5, 5, 1])
    expected: Counter[int] = Counter({5: 0, 1: 0})
    for token_id in np.random.default_rng(0).integers(0, 5 * FIRST_CAPACITY, 1000).tolist():
        counts.add(token_id)
        expected[token_id] += 1
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == expected


def test_a_batch_without_edits_leaves_the_logits_alone() -> None:
    logits = random_logits(3)
    before = logits.clone()
    sample(logits, [SamplingParams(logprobs=2)] * 3, [SamplerState()] * 3, torch.Generator())
    assert torch.equal(logits, before)


def test_a_row_that_is_not_finite_is_not_edited_into_one() -> None:
    logits = random_logits(2)
    logits[0, 2] = torch.nan
    sampling = SamplingParams(temperature=0.0, min_tokens=3, logprobs=1)
    choices = sample(logits, [sampling] * 2, [after(sampling, [], []) for _ in range(2)], torch.Generator())
    assert choices[0] is None
    assert choices[1] is not None


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    logits = random_logits(4, seed=3)
    expected = logits.log_softmax(-1)
    sampling = [
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.3, top_k=2, logprobs=5, logit_bias=((1, 50.0),)),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=20, repetition_penalty=3.0),
    ]
    choices = sample(logits, sampling, [after(one, PROMPT, OUTPUT) for one in sampling], torch.Generator())
    for row, (one, choice) in enumerate(zip(sampling, choices, strict=True)):
        assert choice is not None
        if one.logprobs is None:
            assert choice.logprobs is None
            continue
        assert choice.logprobs is not None
        assert choice.logprobs.logprob == pytest.approx(float(expected[row, choice.token_id]), abs=1e-5)
        top = expected[row].topk(one.logprobs)
        assert choice.logprobs.top_ids == top.indices.tolist()
        assert choice.logprobs.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)
    assert choices[1] is not None
    assert choices[1].token_id == 1
