"""The requests of a run, all drawn before the first is sent: the same seed asks the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deployments.bench_serve.catalogue import Catalogue
from deployments.bench_serve.prompts import Prompt, made_up_prompts
from deployments.bench_serve.settings import Arrivals, Load
from lora_core.errors import ConfigError

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One request.

    Attributes:
        index: Its place in the run.
        model: Whom it asks.
        prompt: What.
        max_tokens: Longest answer.
        due_s: When it is sent, from the run's start; None: when a user is free.
    """

    index: int
    model: str
    prompt: Prompt
    max_tokens: int
    due_s: float | None


def plan_requests(load: Load, catalogue: Catalogue, prompts: Sequence[Prompt] | None = None) -> list[Planned]:
    """Draw a run.

    Arrivals, models, prompts and lengths are drawn apart from each other: another rate sends the same requests.

    Args:
        load: What to draw.
        catalogue: Whom to ask.
        prompts: Asked in turn, in an order that the seed decides; None: made-up ones.

    Raises:
        ConfigError: the base model is to be asked, and is not known.
    """
    seeds = np.random.SeedSequence(load.seed).spawn(4)
    arrivals, models, texts, lengths = (np.random.default_rng(seed) for seed in seeds)
    count = load.num_requests
    if prompts is None:
        asked = made_up_prompts(count, load.prompt_words, texts)
    else:
        order = np.concatenate([texts.permutation(len(prompts)) for _ in range(-(-count // len(prompts)))])
        asked = [prompts[index] for index in order[:count]]
    names = _drawn_names(load, catalogue, models)
    most = lengths.integers(load.answer_tokens.low, load.answer_tokens.high, size=count, endpoint=True)
    due = arrival_times(load, arrivals)
    return [
        Planned(
            index=index,
            model=names[index],
            prompt=asked[index],
            max_tokens=asked[index].max_tokens or int(most[index]),
            due_s=None if due is None else float(due[index]),
        )
        for index in range(count)
    ]


def arrival_times(load: Load, generator: np.random.Generator) -> Floats | None:
    """Seconds from the run's start, the first at 0; None for closed arrivals."""
    count = load.num_requests
    if load.arrivals is Arrivals.CLOSED:
        return None
    if load.arrivals is Arrivals.CONSTANT:
        gaps = np.full(count, 1 / load.rate)
    else:
        # Gamma with shape 1 is exponential: Poisson's. The mean is 1 / rate for any shape.
        shape = load.burstiness if load.arrivals is Arrivals.BURSTS else 1.0
        gaps = generator.gamma(shape, 1 / (load.rate * shape), size=count)
    gaps[0] = 0
    return np.cumsum(gaps)


def _drawn_names(load: Load, catalogue: Catalogue, generator: np.random.Generator) -> list[str]:
    if load.base_share and catalogue.base is None:
        raise ConfigError("--base-share asks the base model, and nothing says which it is; name it with --base")
    drawn = generator.choice(len(catalogue.adapters), size=load.num_requests, p=catalogue.popularity(load.zipf))
    is_base = generator.random(load.num_requests) < load.base_share
    base = catalogue.base or ""
    return [base if of_base else catalogue.adapters[index] for index, of_base in zip(drawn, is_base, strict=True)]
