"""What `lora-fleet bench serve` draws, reads and sums up, without a server."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.bench_serve.catalogue import Catalogue, read_catalogue
from deployments.bench_serve.exchange import Outcome
from deployments.bench_serve.plan import arrival_times, plan_requests
from deployments.bench_serve.prompts import read_prompts
from deployments.bench_serve.settings import Api, Arrivals, Lengths, Load, Targets
from deployments.bench_serve.summary import Summary, summarize
from lora_core.errors import ConfigError

TARGETS = Targets(ttft_ms=100, inter_token_ms=20, adapter_share=0.5)
CATALOGUE = Catalogue(tuple(f"a{index}" for index in range(20)), "base")


def load(**fields: Any) -> Load:
    settings: dict[str, Any] = {
        "num_requests": 4000, "arrivals": Arrivals.POISSON, "rate": 50.0, "burstiness": 0.25, "num_users": 4,
        "zipf": 1.0, "base_share": 0.0, "prompt_words": Lengths(3, 9), "answer_tokens": Lengths(5, 7), "seed": 0,
    }  # fmt: skip
    return Load(**{**settings, **fields})


def gaps(**fields: Any) -> "np.ndarray[Any, np.dtype[np.float64]]":
    times = arrival_times(load(**fields), np.random.default_rng(1))
    assert times is not None
    assert times[0] == 0
    return np.diff(times)


@pytest.mark.parametrize(
    ("arrivals", "variation"), [(Arrivals.CONSTANT, 0.0), (Arrivals.POISSON, 1.0), (Arrivals.BURSTS, 2.0)]
)
def test_arrivals_keep_the_rate_and_differ_in_how_they_vary(arrivals: Arrivals, variation: float) -> None:
    found = gaps(arrivals=arrivals)
    assert found.mean() == pytest.approx(1 / 50, rel=0.1)
    # Of a gamma distribution: one over the root of its shape.
    assert found.std() / found.mean() == pytest.approx(variation, abs=0.15)


def test_closed_arrivals_are_due_when_a_user_is_free() -> None:
    assert {one.due_s for one in plan_requests(load(arrivals=Arrivals.CLOSED), CATALOGUE)} == {None}


def test_popularity_follows_zipf() -> None:
    counts = Counter(one.model for one in plan_requests(load(), CATALOGUE))
    harmonic = sum(1 / rank for rank in range(1, 21))
    for rank in (1, 2, 5):
        assert counts[f"a{rank - 1}"] / 4000 == pytest.approx(1 / rank / harmonic, rel=0.15)
    alike = Counter(one.model for one in plan_requests(load(zipf=0.0), CATALOGUE))
    assert min(alike.values()) > 4000 / 20 * 0.7
    based = Counter(one.model for one in plan_requests(load(base_share=0.25), CATALOGUE))
    assert based["base"] / 4000 == pytest.approx(0.25, abs=0.03)


def test_the_seed_decides_everything_and_the_rate_only_when() -> None:
    once, again, other = (plan_requests(load(seed=seed, num_requests=50), CATALOGUE) for seed in (3, 3, 4))
    assert once == again
    assert once != other
    slower = plan_requests(load(seed=3, num_requests=50, rate=1.0), CATALOGUE)
    assert [(one.model, one.prompt, one.max_tokens) for one in slower] == [
        (one.model, one.prompt, one.max_tokens) for one in once
    ]
    assert all(3 <= len(one.prompt.text.split()) <= 9 and 5 <= one.max_tokens <= 7 for one in once)
    assert len({one.prompt.text for one in once}) == 50


def test_the_base_model_must_be_known_to_be_asked() -> None:
    with pytest.raises(ConfigError, match="name it with --base"):
        plan_requests(load(base_share=0.5), Catalogue(("a",), None))


def test_prompts_of_a_file_are_all_asked_before_any_again(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}], "max_tokens": 99}\n')
    prompts = read_prompts(path, Api.CHAT)
    assert prompts[0].fields(Api.CHAT) == {"messages": [{"role": "user", "content": "one"}]}
    planned = plan_requests(load(num_requests=6), CATALOGUE, prompts)
    for start in (0, 2, 4):
        turn = [one.prompt for one in planned[start : start + 2]]
        assert all(prompt in turn for prompt in prompts)
    assert {one.max_tokens for one in planned if one.prompt.messages} == {99}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "line 2: no JSON"),
        ("[1]", "line 2: found a list"),
        ("{}", "line 2: expected either `prompt`, a text, or `messages`"),
        ('{"prompt": "a", "messages": [{}]}', "line 2: expected either"),
        ('{"messages": []}', "line 2: expected either"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens is 0"),
        ('{"messages": [{"role": "user"}]}', "--api completions cannot ask"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "one"}}\n{line}\n')
    with pytest.raises(ConfigError, match=said):
        read_prompts(path, Api.COMPLETIONS)


def test_a_catalogue_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "names"
    path.write_text("# the most popular first\nb\n\n  a/x \n")
    assert read_catalogue(path, "base") == Catalogue(("b", "a/x"), "base")
    path.write_text("a\na\n")
    with pytest.raises(ConfigError, match="holds 'a' twice"):
        read_catalogue(path, None)
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no name"):
        read_catalogue(path, None)


@pytest.mark.parametrize("text", ["", "0", "5:3", "1:2:3", "a", "-4", "4.5"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        Lengths.parse(text)


def outcome(index: int, model: str = "a", **fields: Any) -> Outcome:
    """Sent at `index` seconds; first token after 50 ms, then nine more in 90 ms."""
    settings: dict[str, Any] = {
        "is_cold": False, "due_s": float(index), "sent_s": index + 0.001, "first_s": index + 0.05,
        "end_s": index + 0.14, "num_tokens": 10, "prompt_tokens": 7, "cached_tokens": 3,
        "gaps_s": [0.03, 0.06], "is_counted": True,
    }  # fmt: skip
    return Outcome(index=index, model=model, **{**settings, **fields})


def test_a_summary_adds_up() -> None:
    outcomes = [
        outcome(0, is_cold=True, first_s=0.09),
        outcome(1),
        outcome(2, first_s=2.2, end_s=2.3),
        outcome(3, model="b", num_tokens=2),
        outcome(4, model="c", num_tokens=1, end_s=4.05),
        outcome(5, model="c", first_s=None, end_s=5.0, num_tokens=0, error="HTTP 503", message="come back"),
    ]
    found = summarize(outcomes, TARGETS)
    assert found.duration_s == pytest.approx(5.0)
    assert (found.num_requests, found.num_answered, found.num_good) == (6, 5, 3)
    assert found.goodput_rps == pytest.approx(3 / 5)
    assert (found.answer_tokens, found.prompt_tokens, found.cached_prompt_tokens) == (33, 35, 15)
    assert found.all.ttft_ms is not None
    assert found.all.ttft_ms.count == 5
    assert found.all.ttft_ms.max == pytest.approx(200)
    assert found.cold.ttft_ms is not None
    assert found.cold.ttft_ms.count == 1
    assert found.cold.ttft_ms.p50 == pytest.approx(90)
    # Of the answer with one token there is no time between tokens.
    assert found.all.inter_token_ms is not None
    assert found.all.inter_token_ms.count == 4
    assert found.all.inter_token_ms.max == pytest.approx(90)
    assert found.all.gap_ms is not None
    assert found.all.gap_ms.count == 10
    assert {kind: (fault.count, fault.message) for kind, fault in found.faults.items()} == {
        "HTTP 503": (1, "come back")
    }
    # a: 2 of 3; b: its one answer is too slow from token to token; c: 1 of 2.
    assert (found.num_adapters_asked, found.num_adapters_within) == (3, 2)
    assert [(one.model, one.num_good, one.num_requests) for one in found.worst_adapters] == [("b", 0, 1)]
    assert not found.is_client_late


def test_times_count_from_when_a_request_was_due_and_a_late_client_is_said() -> None:
    found: Summary = summarize([outcome(0, sent_s=0.2, first_s=0.25, end_s=0.3)], TARGETS)
    assert found.all.ttft_ms is not None
    assert found.all.ttft_ms.p50 == pytest.approx(250)
    assert found.is_client_late
    assert found.num_good == 0


def test_a_run_without_answers_is_summed_up_too() -> None:
    failed = outcome(0, first_s=None, end_s=0.0, num_tokens=0, error="connection", message="refused")
    found = summarize([failed], TARGETS)
    assert (found.goodput_rps, found.all.ttft_ms, found.prompt_tokens, found.adapters_within_share) == (
        0,
        None,
        None,
        0,
    )
    assert found.client_late_ms is None
