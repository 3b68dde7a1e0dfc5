"""Log-probabilities of prompt tokens: which rows of a step need logits for them, and what is made of those."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lora_core.engine.kv_cache import Ints
from lora_core.engine.logprobs import RowLogprobs
from lora_core.engine.request import ScheduledRow

ROWS_AT_ONCE = 64
"""Rows of logits worked on together, which bounds the memory it takes."""


def logit_rows(rows: Sequence[ScheduledRow], ends: Ints) -> Ints:
    """Which of a step's tokens need logits: the last one of each row that samples, all of each that scores its prompt.

    Args:
        rows: What the step runs.
        ends: Where each row's tokens end among the step's.

    Returns:
        int64, ascending.
    """
    if not any(row.scores_prompt for row in rows):
        return ends[[row.samples for row in rows]] - 1
    spans = [
        np.arange(end - (row.num_tokens if row.scores_prompt else row.samples), end)
        for row, end in zip(rows, ends.tolist(), strict=True)
    ]
    return np.concatenate(spans)


@torch.inference_mode()
def score_prompts(rows: Sequence[ScheduledRow], logits: Tensor) -> Tensor:
    """Note the log-probabilities of the prompt tokens of `rows` in their requests' states.

    Args:
        rows: What the step ran, not yet noted as computed.
        logits: fp32 `[len(logit_rows(...)), V]`.

    Returns:
        fp32 `[rows that sample, V]`, in row order.
    """
    if not any(row.scores_prompt for row in rows):
        return logits
    sampling: list[int] = []
    first = 0
    for row in rows:
        num_logits = row.num_tokens if row.scores_prompt else int(row.samples)
        if row.scores_prompt:
            # After which it may have no more to score.
            _score(row, logits[first : first + num_logits])
        first += num_logits
        if row.samples:
            sampling.append(first - 1)
    return logits[sampling]


def _score(row: ScheduledRow, logits: Tensor) -> None:
    """Score the tokens that follow each of the row's, as far as they are the prompt's and have no score yet."""
    request, start = row.request, row.request.num_computed
    scores = request.sampler.prompt_scores
    # Score i is that of token i + 1, which the logits at token i predict.
    stop = min(start + row.num_tokens, request.num_prompt_tokens - 1)
    while start <= len(scores) < stop:
        place = len(scores)
        count = min(ROWS_AT_ONCE, stop - place)
        some = logits[place - start : place - start + count]
        num_top = [request.sampling.prompt_logprobs or 0] * count
        scores += RowLogprobs(some, range(count), num_top, copy=False).of(
            request.token_ids[place + 1 : place + 1 + count]
        )
