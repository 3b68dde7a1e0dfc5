"""Penalties for tokens that have come up before, on the logits of the few tokens they concern."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_core.engine.kv_cache import Ints
from lora_core.messages import SamplingParams

Floats = npt.NDArray[np.float32]

FIRST_CAPACITY = 64


class TokenCounts:
    """The distinct tokens of one request's text, and how often each was generated; one array entry a step at most.

    Args:
        prompt: Tokens that were there before, counted 0 times.
    """

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt, dtype=np.int64))
        self._num = len(distinct)
        self._ids: Ints = np.empty(max(FIRST_CAPACITY, 2 * self._num), dtype=np.int64)
        self._ids[: self._num] = distinct
        self._counts: Floats = np.zeros(len(self._ids), dtype=np.float32)
        self._places = {token_id: place for place, token_id in enumerate(distinct.tolist())}

    @property
    def ids(self) -> Ints:
        """The distinct token ids, int64 `[D]`, in no order; a view that lasts until the next `add`."""
        return self._ids[: self._num]

    @property
    def counts(self) -> Floats:
        """How often each of `ids` was generated, fp32 `[D]`; a view that lasts until the next `add`."""
        return self._counts[: self._num]

    def add(self, token_id: int) -> None:
        """Count a generated token."""
        place = self._places.setdefault(token_id, self._num)
        if place == self._num:
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token_id
            self._num += 1
        self._counts[place] += 1


def penalise(
    logits: Tensor, rows: Sequence[int], counts: Sequence[TokenCounts], sampling: Sequence[SamplingParams]
) -> None:
    """Lower the logits of tokens that have come up, in place.

    Semantics, for each row and each distinct token t of its prompt and answer, generated c times:
        x = logits[row, t];  x = x / repetition_penalty if x > 0 else x * repetition_penalty
        logits[row, t] = x - frequency_penalty * c - presence_penalty * (c > 0)

    The first line is transformers' `RepetitionPenaltyLogitsProcessor` (over prompt and answer), the second OpenAI's
    definition (over the answer alone); their order is vLLM's.

    Args:
        logits: `[N, V]` fp32, contiguous.
        rows: Distinct rows that have penalties.
        counts: One for each of `rows`; with a repetition penalty it knows the prompt.
        sampling: One for each of `rows`.
    """
    sizes = [len(one.ids) for one in counts]
    strengths = np.array(
        [(params.repetition_penalty, params.frequency_penalty, params.presence_penalty) for params in sampling],
        dtype=np.float32,
    )
    repetition, frequency, presence = (
        torch.from_numpy(column).to(logits.device) for column in np.repeat(strengths, sizes, axis=0).T.copy()
    )
    generated = torch.from_numpy(np.concatenate([one.counts for one in counts])).to(logits.device)
    flat, places = logits.view(-1), flat_places(logits, rows, [one.ids for one in counts])
    values = flat[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[places] = values - frequency * generated - presence * (generated > 0)


def flat_places(logits: Tensor, rows: Sequence[int], ids: Sequence[Ints]) -> Tensor:
    """Where the tokens `ids` of each of `rows` are in `logits.view(-1)`: int64, on the logits' device, row by row."""
    starts = np.repeat(np.asarray(rows, dtype=np.int64) * logits.shape[-1], [len(one) for one in ids])
    return torch.from_numpy(starts + np.concatenate(list(ids))).to(logits.device)
