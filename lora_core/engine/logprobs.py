"""Log-probabilities of tokens, of the distribution the model itself gives."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_core.engine.likeliest import likeliest
from lora_core.messages import TokenLogprobs


class RowLogprobs:
    """Log-probabilities of some rows of logits, taken before anything edits them.

    Semantics: logprob(t) = logits[t] - logsumexp(logits): temperature 1, no penalty, bias, constraint or truncation
    (what vLLM calls `raw_logprobs`, its default). A token that those rule out has one like any other.

    Args:
        logits: `[N, V]` fp32, finite in `rows`.
        rows: Distinct and ascending.
        num_top: How many of the likeliest tokens each of `rows` asks for, at most V.
        copy: Whether `logits` are edited before `of` is called.
    """

    def __init__(self, logits: Tensor, rows: Sequence[int], num_top: Sequence[int], *, copy: bool) -> None:
        self._num_top = num_top
        if not rows:
            return
        chosen = logits if len(rows) == len(logits) else logits[list(rows)]
        self._logits = chosen.clone() if copy and chosen is logits else chosen
        # Not logsumexp, which takes twice the time on the CPU.
        largest = self._logits.amax(dim=-1, keepdim=True)
        self._norm = (self._logits - largest).exp_().sum(dim=-1).log_().add_(largest.squeeze(-1))

    def of(self, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """What to tell of each row, where one of `token_ids` each was chosen; waits for the device."""
        if not token_ids:
            return []
        ids = torch.tensor(token_ids, device=self._logits.device)
        logprobs = (self._logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - self._norm).tolist()
        most = max(self._num_top)
        if not most:
            return [TokenLogprobs(logprob) for logprob in logprobs]
        top, top_ids = likeliest(self._logits, most)
        values = (top - self._norm.unsqueeze(-1)).tolist()
        return [
            TokenLogprobs(logprob, row_ids[:num], row_values[:num])
            for logprob, row_ids, row_values, num in zip(logprobs, top_ids.tolist(), values, self._num_top, strict=True)
        ]
