"""The requests with which an engine warms up, and how it tells of its progress."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from lora_core.messages import EngineReady, GenerateRequest, SamplingParams

WARM_UP_TOKENS = 16
"""Length of a short prompt."""

REPORT_EVERY_S = 5.0


def warm_up_requests(
    ready: EngineReady, prompt_lengths: Iterable[int], names: Iterable[str | None]
) -> Iterator[GenerateRequest]:
    """Prompts of each length, and a decode step after each: greedy and drawn, through each of the adapters.

    Args:
        ready: What the engine takes; prompts are cut to it.
        prompt_lengths: In tokens.
        names: Of adapters; None is the base model.
    """
    lengths = list(prompt_lengths)
    for name in names:
        for length in lengths:
            prompt = [0] * max(1, min(length, ready.max_model_len - 2))
            max_tokens = min(2, ready.max_model_len - len(prompt))
            for temperature in (0.0, 1.0):
                sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=0.9, ignore_eos=True)
                yield GenerateRequest(f"warm-up {name} {length} {temperature}", prompt, sampling, name)


def ignore_progress(what: str, done: int, total: int) -> None:
    """Tell nobody."""


def logged_progress(
    logger: logging.Logger, clock: Callable[[], float] = time.monotonic
) -> Callable[[str, int, int], None]:
    """Log what is being done, when it changes or ends, and every few seconds."""
    last: dict[str, float] = {}

    def progress(what: str, done: int, total: int) -> None:
        now_s = clock()
        if what not in last or done == total or now_s - last[what] >= REPORT_EVERY_S:
            last[what] = now_s
            logger.info("%s: %d of %d", what, done, total)

    return progress
