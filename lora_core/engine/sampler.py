"""The next token of every sampling row: pure functions on logits.

A row is drawn by inverting its cumulative distribution at one uniform number. A seeded row takes that number from its
own generator and everything else from its own logits, so what else is in the batch decides nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_core.messages import SamplingParams

MIN_TEMPERATURE = 1e-5
"""Lower ones draw as this one does: the largest logit, as good as always, and no overflow on the way."""
PREFIX = 512
"""How many of the likeliest tokens are ordered at first; only rows whose top-k or top-p reach further pay for more."""


def sample(
    logits: Tensor,
    sampling: Sequence[SamplingParams],
    generators: Sequence[torch.Generator | None],
    shared: torch.Generator,
) -> list[int | None]:
    """Choose one token a row.

    Args:
        logits: `[N, V]` fp32; not changed.
        sampling: How each row chooses; temperature 0 takes the largest logit.
        generators: Each row's own randomness, or None for a row that draws from `shared`; all on the CPU.
        shared: Randomness of the rows without a seed, on the CPU.

    Returns:
        One token id a row, or None where the row's logits are not all finite: there is nothing right to choose.
    """
    if not sampling:
        return []
    tokens = logits.argmax(dim=-1)
    # One NaN or infinity makes the sum so, and summing is several times cheaper than testing each entry.
    finite = logits.sum(dim=-1).isfinite().tolist()
    drawn = [row for row, params in enumerate(sampling) if params.temperature > 0 and finite[row]]
    if drawn:
        uniform = uniform_numbers([generators[row] for row in drawn], shared).to(logits.device)
        tokens[drawn] = draw(_take(logits, drawn), [sampling[row] for row in drawn], uniform)
    return [token if good else None for token, good in zip(tokens.tolist(), finite, strict=True)]


def uniform_numbers(generators: Sequence[torch.Generator | None], shared: torch.Generator) -> Tensor:
    """Draw one number in [0, 1) a row, fp32 `[N]` on the CPU, from its own generator or else from `shared`."""
    uniform = torch.rand(len(generators), generator=shared)
    for row, generator in enumerate(generators):
        if generator is not None:
            uniform[row] = torch.rand((), generator=generator)
    return uniform


def draw(logits: Tensor, sampling: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    """Draw one token a row from its tempered, truncated softmax.

    Semantics, for each row, with p = softmax(logits / temperature) and its entries in descending order:
        top_k keeps the first k (0 keeps all); top_p keeps the fewest first ones whose share of what top_k kept is at
        least top_p. The token is the first kept one at which the cumulative share exceeds `uniform`.

    Args:
        logits: Finite, `[N, V]` fp32.
        sampling: One for each row, temperature above 0.
        uniform: `[N]` fp32 in [0, 1), on the logits' device.

    Returns:
        int64 `[N]`.
    """
    device, vocab_size = logits.device, logits.shape[-1]
    temperature = torch.tensor([max(params.temperature, MIN_TEMPERATURE) for params in sampling], device=device)
    probs = (logits / temperature.unsqueeze(-1)).softmax(dim=-1)
    tokens = torch.empty(len(sampling), dtype=torch.int64, device=device)

    whole = [row for row, params in enumerate(sampling) if params.top_p == 1 and params.top_k in (0, vocab_size)]
    if whole:
        # Unordered: inverting needs only that every token keeps its share.
        tokens[whole] = _invert(_take(probs, whole).cumsum(dim=-1), uniform[whole], None)

    cut = sorted(set(range(len(sampling))).difference(whole))
    if cut:
        top_k = torch.tensor([min(sampling[row].top_k or vocab_size, vocab_size) for row in cut], device=device)
        top_p = torch.tensor([sampling[row].top_p for row in cut], device=device)
        tokens[cut] = _draw_truncated(_take(probs, cut), top_k, top_p, uniform[cut], min(PREFIX, vocab_size))
    return tokens


def _draw_truncated(probs: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor, prefix: int) -> Tensor:
    """Draw from `probs` `[N, V]`, looking at the `prefix` likeliest tokens, and at all where those fall short."""
    vocab_size = probs.shape[-1]
    ordered, ids = probs.topk(prefix, dim=-1)
    share = ordered.cumsum(dim=-1)
    # What top_k keeps; without it, all of the softmax.
    total = share.gather(-1, (top_k - 1).clamp_max(prefix - 1).unsqueeze(-1)).squeeze(-1)
    total = total.where(top_k < vocab_size, 1.0)
    num_kept = torch.minimum((share < (top_p * total).unsqueeze(-1)).sum(dim=-1) + 1, top_k)

    short = ((num_kept > prefix) | ((top_k > prefix) & (top_k < vocab_size))) & (prefix < vocab_size)
    num_kept = num_kept.clamp_max(prefix)
    tokens = ids.gather(-1, _invert(share, uniform, num_kept).unsqueeze(-1)).squeeze(-1)
    rows = short.nonzero().squeeze(-1)
    if rows.numel():
        tokens[rows] = _draw_truncated(probs[rows], top_k[rows], top_p[rows], uniform[rows], vocab_size)
    return tokens


def _invert(share: Tensor, uniform: Tensor, num_kept: Tensor | None) -> Tensor:
    """First position of each row whose cumulative share `[N, K]` exceeds `uniform` of the first `num_kept` (or all)."""
    last = torch.full_like(uniform, share.shape[-1] - 1, dtype=torch.int64) if num_kept is None else num_kept - 1
    target = uniform.unsqueeze(-1) * share.gather(-1, last.unsqueeze(-1))
    return torch.minimum(torch.searchsorted(share, target, right=True).squeeze(-1), last)


def _take(tensor: Tensor, rows: list[int]) -> Tensor:
    """`tensor[rows]` for ascending distinct rows, without the copy where that is all of them."""
    return tensor if len(rows) == len(tensor) else tensor[rows]
