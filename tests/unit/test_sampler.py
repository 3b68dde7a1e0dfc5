"""The choice of the next token, against transformers' own warpers."""

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lora_core.engine import sampler
from lora_core.engine.likeliest import likeliest
from lora_core.engine.sampler import PREFIXES, draw, sample
from lora_core.engine.sampler_state import SamplerState
from lora_core.messages import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
PREFIX = PREFIXES[-1]


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def choose(
    logits: Tensor, sampling: list[SamplingParams], generators: list[torch.Generator | None], shared: torch.Generator
) -> list[int | None]:
    choices = sample(logits, sampling, [SamplerState(generator=generator) for generator in generators], shared)
    return [None if choice is None else choice.token_id for choice in choices]


def reference_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Distribution of one row `[V]` by transformers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    ids = torch.zeros(1, 1, dtype=torch.int64)
    probs: Tensor = warpers(ids, logits.unsqueeze(0)).softmax(dim=-1)[0]  # type: ignore[arg-type]
    return probs


def exact_probs(logits: Tensor, params: SamplingParams, points: int = 20_000) -> Tensor:
    """Distribution of one row `[V]` by `draw`, on an even grid of uniform numbers: within 1/points of exact."""
    uniform = (torch.arange(points) + 0.5) / points
    tokens = draw(logits.expand(points, -1), [params] * points, uniform)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / points


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=1),
        SamplingParams(top_k=5),
        SamplingParams(top_k=50),
        SamplingParams(top_k=51),
        SamplingParams(top_k=1000),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.05),
        SamplingParams(top_p=1e-6),
        SamplingParams(temperature=0.7, top_k=10, top_p=0.8),
        SamplingParams(temperature=3.0, top_k=40, top_p=0.99),
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=1e-4),
        SamplingParams(min_p=1.0),
        SamplingParams(min_p=0.02, top_p=0.7),
        SamplingParams(min_p=1e-3, top_k=12),
        SamplingParams(temperature=2.0, min_p=0.05, top_k=30, top_p=0.9),
    ],
    ids=str,
)
@pytest.mark.parametrize("prefixes", [(8, 20), (4,), (64, 512)], ids=str)
def test_draws_follow_the_distribution_of_transformers(
    params: SamplingParams, prefixes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A prefix shorter than what is kept takes the road that orders more.
    monkeypatch.setattr(sampler, "PREFIXES", prefixes)
    logits = random_logits(1, 51)[0]
    torch.testing.assert_close(exact_probs(logits, params), reference_probs(logits, params), atol=3e-4, rtol=0)


def test_a_prefix_and_the_whole_vocabulary_choose_alike() -> None:
    vocab = 3 * PREFIX
    logits = random_logits(64, vocab, scale=0.5)
    uniform = torch.rand(64, generator=seeded(1))
    wide = [
        SamplingParams(top_p=0.99),
        SamplingParams(top_k=2 * PREFIX),
        SamplingParams(top_k=2 * PREFIX, top_p=0.9),
        SamplingParams(min_p=1e-2),
        SamplingParams(min_p=1e-2, top_p=0.4),
    ]
    narrow = [
        SamplingParams(top_p=0.01),
        SamplingParams(top_k=20),
        SamplingParams(top_k=20, top_p=0.5),
        SamplingParams(min_p=0.9),
    ]
    for params in (*wide, *narrow):
        probs = torch.stack([reference_probs(row, params) for row in logits])
        ordered, ids = probs.sort(dim=-1, descending=True)
        expected = ids.gather(-1, (ordered.cumsum(-1) <= uniform.unsqueeze(-1)).sum(-1, keepdim=True)).squeeze(-1)
        tokens = draw(logits, [params] * 64, uniform)
        # Sums in another order may move a boundary by an ulp onto the other side of a uniform number.
        assert (tokens == expected).sum() >= 63


def test_greedy_rows_take_the_largest_logit_in_a_mixed_batch() -> None:
    logits = random_logits(6, 97)
    params = [GREEDY, SamplingParams(), GREEDY, SamplingParams(top_k=3), SamplingParams(top_p=0.5), GREEDY]
    before = logits.clone()
    tokens = choose(logits, params, [None] * 6, seeded(0))
    assert torch.equal(logits, before)
    for row in (0, 2, 5):
        assert tokens[row] == int(logits[row].argmax())
    assert tokens[3] in logits[3].topk(3).indices.tolist()


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    logits = random_logits(9, 2 * PREFIX, scale=1.0)
    others = [
        GREEDY,
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=4, seed=5),
        SamplingParams(top_p=0.99, temperature=3.0),
    ]
    for params in (
        SamplingParams(seed=7),
        SamplingParams(seed=7, top_p=0.9),
        SamplingParams(seed=7, top_k=900, top_p=0.99),
    ):
        alone = seeded(7)
        expected = [choose(row.unsqueeze(0), [params], [alone], seeded(0))[0] for row in logits]
        assert len(set(expected)) > 1
        in_batch = seeded(7)
        for step, row in enumerate(logits):
            place = step % (len(others) + 1)
            batch = [*others[:place], params, *others[place:]]
            generators = [in_batch if p is params else seeded(5) if p.seed == 5 else None for p in batch]
            rows = random_logits(len(batch), logits.shape[-1], seed=100 + step)
            rows[place] = row
            assert choose(rows, batch, generators, seeded(step))[place] == expected[step]


def test_rows_without_a_seed_differ_from_each_other() -> None:
    logits = torch.zeros(32, 1000)
    tokens = choose(logits, [SamplingParams()] * 32, [None] * 32, seeded(0))
    assert len(set(tokens)) > 16


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=3, top_p=0.5)], ids=str)
def test_a_row_that_is_not_finite_gives_none_and_its_neighbours_their_tokens(
    bad: float, params: SamplingParams
) -> None:
    logits = random_logits(3, 50)
    expected = choose(logits, [params, GREEDY, params], [seeded(1), None, seeded(2)], seeded(0))
    broken = logits.clone()
    broken[1, 17] = bad
    assert choose(broken, [params, GREEDY, params], [seeded(1), None, seeded(2)], seeded(0)) == [
        expected[0],
        None,
        expected[2],
    ]
    assert choose(broken[1:2], [params], [seeded(1)], seeded(0)) == [None]


@pytest.mark.parametrize("temperature", [1e-40, 1e-7, 1e-3])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits(4, 100) * 1000
    tokens = choose(logits, [SamplingParams(temperature=temperature, top_p=0.9)] * 4, [None] * 4, seeded(0))
    assert tokens == logits.argmax(dim=-1).tolist()


def test_the_ends_of_the_uniform_range_stay_inside_what_is_kept() -> None:
    logits = torch.tensor([[0.0, -200.0, 5.0, 1.0, -200.0]]).expand(2, -1)
    uniform = torch.tensor([0.0, 1 - 2**-24])
    for params, allowed in (
        (SamplingParams(), {0, 2, 3}),
        (SamplingParams(top_k=2), {2, 3}),
        (SamplingParams(top_p=0.9), {2}),
        (SamplingParams(top_k=4), {0, 2, 3}),
    ):
        assert set(draw(logits, [params] * 2, uniform).tolist()) <= allowed


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.99), SamplingParams(top_k=300)], ids=str)
def test_tokens_that_are_ruled_out_are_never_drawn(params: SamplingParams) -> None:
    """Also where a uniform number falls between rows' sums, and in vocabularies of broken blocks."""
    for vocab in (700, 64, 8200):
        logits = random_logits(40, vocab, seed=vocab, scale=0.1)
        allowed = torch.rand(40, vocab, generator=seeded(vocab)) < 0.01
        allowed[:, 17] = True
        # The last ones, and whole blocks, are ruled out.
        allowed[:, vocab - 40 :] = False
        logits.masked_fill_(~allowed, -torch.inf)
        for value in (0.0, 0.3, 0.9999999, 1 - 2**-24):
            tokens = draw(logits, [params] * 40, torch.full((40,), value))
            assert allowed[torch.arange(40), tokens].all()


def test_no_rows_give_no_tokens() -> None:
    assert choose(torch.empty(0, 10), [], [], seeded(0)) == []


@pytest.mark.parametrize("vocab", [50, 8191, 8192, 49152, 50257])
@pytest.mark.parametrize("k", [1, 64, 512])
def test_the_likeliest_are_those_of_topk(vocab: int, k: int) -> None:
    values = random_logits(3, vocab, seed=vocab + k)
    # The last ones are outside every group.
    values[1, -1] = 1e3
    values[2, vocab // 2 :] = -torch.inf
    expected = values.topk(min(k, vocab))
    found, ids = likeliest(values, min(k, vocab))
    assert torch.equal(found, expected.values)
    assert torch.equal(values.gather(-1, ids), found)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
