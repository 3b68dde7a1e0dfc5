"""The next token of every sampling row: functions on logits, vectorised over the batch.

In this order, each for the rows that ask for it (the order is vLLM's; each function says whose definition it follows):

1. log-probabilities, of the logits as they come from the model;
2. the constraint: tokens that do not fit get -inf;
3. `min_tokens`: tokens that would end the answer get -inf;
4. `logit_bias` is added;
5. repetition, frequency and presence penalties;
6. temperature 0: the largest logit. Otherwise: temperature, `min_p`, `top_k`, `top_p`, and one draw.

A row is drawn by inverting its cumulative distribution at one uniform number. A seeded row takes that number from its
own generator and everything else from its own logits and state, so what else is in the batch decides nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lora_core.engine.kv_cache import Ints
from lora_core.engine.likeliest import likeliest
from lora_core.engine.logprobs import RowLogprobs
from lora_core.engine.penalties import flat_places, penalise
from lora_core.engine.sampler_state import SamplerState
from lora_core.engine.step_buffers import send
from lora_core.messages import SamplingParams, TokenLogprobs

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e30
"""Others draw as the nearer one of these does: the largest logit, as good as always, or any token that is left; and
nothing overflows on the way."""
PREFIXES = (64, 512)
"""How many of the likeliest tokens are ordered at first, and then; only rows that reach further pay for more."""
BLOCK = 64
"""Tokens that are drawn as one at first, where nothing truncates the distribution."""


class Choice(NamedTuple):
    """What was chosen for one row."""

    token_id: int
    logprobs: TokenLogprobs | None
    """Where the row asks for them."""


@torch.inference_mode()
def sample(
    logits: Tensor, sampling: Sequence[SamplingParams], states: Sequence[SamplerState], shared: torch.Generator
) -> list[Choice | None]:
    """Choose one token a row.

    Args:
        logits: `[N, V]` fp32, contiguous; edited in place where a row asks for it.
        sampling: How each row chooses; temperature 0 takes the largest logit.
        states: What each row remembers. Only their generators change here; `SamplerState.take` notes what was chosen.
        shared: Randomness of the rows without a seed, on the CPU.

    Returns:
        One choice a row, or None where the row's logits are not all finite: there is nothing right to choose.
    """
    if not sampling:
        return []
    # One NaN or infinity makes the sum so, and summing is several times cheaper than testing each entry.
    finite = logits.sum(dim=-1).isfinite().tolist()
    asking = [row for row, params in enumerate(sampling) if params.logprobs is not None and finite[row]]
    edited = [row for row, state in enumerate(states) if state.edits_logits and finite[row]]
    logprobs = RowLogprobs(logits, asking, [sampling[row].logprobs or 0 for row in asking], copy=bool(edited))
    if edited:
        edit(logits, edited, [sampling[row] for row in edited], [states[row] for row in edited])
    tokens = _choose(logits, sampling, states, shared, finite)
    told = logprobs.of([tokens[row] for row in asking])
    by_row = dict(zip(asking, told, strict=True))
    return [
        Choice(token, by_row.get(row)) if good else None
        for row, (token, good) in enumerate(zip(tokens, finite, strict=True))
    ]


def edit(
    logits: Tensor, rows: Sequence[int], sampling: Sequence[SamplingParams], states: Sequence[SamplerState]
) -> None:
    """Apply to `rows` of `logits`, in place, what their states hold: constraints, barred tokens, biases, penalties.

    Semantics, for each row and in this order:
        logits[row, t] = -inf for t the constraint refuses, unless it has an error: what is chosen then is of no use
        logits[row, t] = -inf for t that would end an answer shorter than min_tokens (vLLM's, which bars stop tokens
            beside the end of text; transformers' `MinNewTokensLengthLogitsProcessor` bars the latter), unless the
            constraint leaves only such
        logits[row, t] += logit_bias[t]     (OpenAI's)
        `penalise`

    Args:
        logits: `[N, V]` fp32, contiguous. At least one entry of each of `rows` that is finite stays so.
        rows: Distinct and ascending.
        sampling: One for each of `rows`.
        states: One for each of `rows`.
    """
    flat = logits.view(-1)
    for row, state in zip(rows, states, strict=True):
        if state.constraint is not None and state.constraint.error is None:
            # Several times faster than filling by a mask, on the CPU.
            logits[row].add_(torch.from_numpy(state.constraint.edits).to(logits.device))
    barred = [(row, ids) for row, state in zip(rows, states, strict=True) if (ids := _barred(state)) is not None]
    if barred:
        flat[flat_places(logits, *_columns(barred))] = -torch.inf
    biased = [(row, state.bias) for row, state in zip(rows, states, strict=True) if state.bias is not None]
    if biased:
        places = flat_places(logits, [row for row, _ in biased], [ids for _, (ids, _) in biased])
        flat[places] += torch.from_numpy(np.concatenate([values for _, (_, values) in biased])).to(logits.device)
    # A request's first answer token has nothing to be penalised for, unless its prompt counts.
    counted = [
        (row, state.counts, params)
        for row, state, params in zip(rows, states, sampling, strict=True)
        if state.counts is not None and len(state.counts.ids)
    ]
    if counted:
        penalise(
            logits, [row for row, _, _ in counted], [one for _, one, _ in counted], [params for _, _, params in counted]
        )


def _barred(state: SamplerState) -> Ints | None:
    ids = state.barred_ids
    if ids is None or state.constraint is None or not state.constraint.leaves_only(ids):
        return ids
    # Where a constraint leaves nothing else, an answer that ends too early is better than one that breaks it.
    return None


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
        min_p keeps those with p >= min_p * p[0] (0 keeps all); top_k keeps the first k (0 keeps all); top_p keeps the
        fewest first ones whose share of what those two kept is at least top_p. The token is the first kept one at which
        the cumulative share exceeds `uniform`.

    The definitions are those of transformers' warpers; min_p before the others is vLLM's order (transformers has it
    last, which lets top_p count tokens that min_p then removes).

    Args:
        logits: `[N, V]` fp32, finite or -inf, at least one finite in each row.
        sampling: One for each row, temperature above 0.
        uniform: `[N]` fp32 in [0, 1), on the logits' device.

    Returns:
        int64 `[N]`.
    """
    tokens, _ = _draw(logits, sampling, uniform, _draw_all)
    return tokens


def draw_ahead(logits: Tensor, sampling: Sequence[SamplingParams], uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw as `draw` does, without waiting for the device: some rows may have to be drawn again.

    Returns:
        int64 `[N]`, and which of them are wrong, bool `[N]`: rows that keep more than `PREFIXES` reach.
    """
    return _draw(logits, sampling, uniform, _draw_most)


Draw = Callable[[Tensor, "_Bounds", Tensor], tuple[Tensor, Tensor]]
"""From logits, bounds and uniform numbers: tokens, and which of them are wrong."""


def _draw(logits: Tensor, sampling: Sequence[SamplingParams], uniform: Tensor, draw_cut: Draw) -> tuple[Tensor, Tensor]:
    device, vocab_size = logits.device, logits.shape[-1]
    temperature = upload(
        [min(max(params.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE) for params in sampling], torch.float32, device
    )
    tokens = torch.empty(len(sampling), dtype=torch.int64, device=device)
    is_wrong = torch.zeros(len(sampling), dtype=torch.bool, device=device)
    cut = [row for row, params in enumerate(sampling) if truncates(params, vocab_size)]
    whole = sorted(set(range(len(sampling))).difference(cut))
    if whole:
        rows = upload(whole, torch.int64, device)
        drawn = _draw_whole(_take(logits, whole, rows), temperature[rows], uniform[rows])
        tokens.index_copy_(0, rows, drawn)
    if cut:
        rows = upload(cut, torch.int64, device)
        bounds = _Bounds(
            top_k=upload([min(sampling[row].top_k or vocab_size, vocab_size) for row in cut], torch.int64, device),
            top_p=upload([sampling[row].top_p for row in cut], torch.float32, device),
            min_p=upload([sampling[row].min_p for row in cut], torch.float32, device),
            temperature=temperature[rows],
        )
        drawn, wrong = draw_cut(_take(logits, cut, rows), bounds, uniform[rows])
        tokens.index_copy_(0, rows, drawn)
        is_wrong.index_copy_(0, rows, wrong)
    return tokens, is_wrong


def _draw_all(logits: Tensor, bounds: "_Bounds", uniform: Tensor) -> tuple[Tensor, Tensor]:
    tokens = _draw_truncated(logits, bounds, uniform, PREFIXES)
    return tokens, torch.zeros_like(tokens, dtype=torch.bool)


def _draw_most(logits: Tensor, bounds: "_Bounds", uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Every prefix for every row: which ones need more than the first is not waited for."""
    vocab_size = logits.shape[-1]
    first, *more = sorted({min(prefix, vocab_size) for prefix in PREFIXES})
    tokens, is_wrong = _draw_from_prefix(logits, bounds, uniform, first)
    for prefix in more:
        further, still_wrong = _draw_from_prefix(logits, bounds, uniform, prefix)
        tokens = torch.where(is_wrong, further, tokens)
        is_wrong = is_wrong & still_wrong
    return tokens, is_wrong


class _Bounds(NamedTuple):
    """What shapes and cuts the distributions of some rows, each `[N]`."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    temperature: Tensor

    def of(self, rows: Tensor) -> "_Bounds":
        return _Bounds(*(bound[rows] for bound in self))


def truncates(params: SamplingParams, vocab_size: int) -> bool:
    """Whether a row is drawn from less than all of its softmax."""
    return params.top_p < 1 or 0 < params.top_k < vocab_size or params.min_p > 0


def _choose(
    logits: Tensor,
    sampling: Sequence[SamplingParams],
    states: Sequence[SamplerState],
    shared: torch.Generator,
    finite: Sequence[bool],
) -> list[int]:
    """One token id a row; any for a row that is not finite."""
    tokens = [0] * len(sampling)
    greedy = [row for row, params in enumerate(sampling) if params.temperature == 0]
    for row, token in zip(greedy, _largest(_take(logits, greedy)) if greedy else (), strict=True):
        tokens[row] = token
    drawn = [row for row, params in enumerate(sampling) if params.temperature > 0 and finite[row]]
    if drawn:
        uniform = uniform_numbers([states[row].generator for row in drawn], shared).to(logits.device)
        found = draw(_take(logits, drawn), [sampling[row] for row in drawn], uniform).tolist()
        for row, token in zip(drawn, found, strict=True):
            tokens[row] = token
    return tokens


def _largest(logits: Tensor) -> list[int]:
    """Position of each row's first largest entry. On the CPU numpy finds it over ten times as fast as torch does."""
    found: list[int] = (logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()
    return found


def _draw_whole(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """Draw from all of the softmax: first a block of tokens, then one of the block's."""
    num_rows, vocab_size = logits.shape
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), temperature)
    num_blocks = -(-vocab_size // BLOCK)
    if vocab_size % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, num_blocks * BLOCK - vocab_size))
    blocks = weights.view(num_rows, num_blocks, BLOCK)
    share = blocks.sum(dim=-1).cumsum(dim=-1)
    target = _part(uniform, share[:, -1])
    block = torch.searchsorted(share, target.unsqueeze(-1), right=True).squeeze(-1).clamp_max(num_blocks - 1)
    before = share.gather(-1, (block - 1).clamp_min(0).unsqueeze(-1)).squeeze(-1).where(block > 0, 0.0)
    within = blocks[torch.arange(num_rows, device=logits.device), block].cumsum(dim=-1)
    # Sums in another order may put the target at the block's end or past it.
    inside = torch.minimum(target - before, _just_below(within[:, -1]))
    place = torch.searchsorted(within, inside.unsqueeze(-1), right=True).squeeze(-1)
    return block * BLOCK + place.clamp_max(BLOCK - 1)


def _draw_truncated(logits: Tensor, bounds: _Bounds, uniform: Tensor, prefixes: Sequence[int]) -> Tensor:
    """Draw from rows of `[N, V]`: look at the first prefix of likeliest tokens, and at more where that falls short."""
    vocab_size = logits.shape[-1]
    prefix = min(prefixes[0], vocab_size) if prefixes else vocab_size
    tokens, falls_short = _draw_from_prefix(logits, bounds, uniform, prefix)
    if prefix < vocab_size:
        rows = falls_short.nonzero().squeeze(-1)
        if rows.numel():
            tokens[rows] = _draw_truncated(logits[rows], bounds.of(rows), uniform[rows], prefixes[1:])
    return tokens


def _draw_from_prefix(logits: Tensor, bounds: _Bounds, uniform: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Draw from the `prefix` likeliest tokens of each row.

    Returns:
        The tokens `[N]`, and which of them are wrong because what the bounds keep reaches further.
    """
    vocab_size = logits.shape[-1]
    ordered, ids = likeliest(logits, prefix)
    largest = ordered[:, :1]
    weights = _weights(ordered, largest, bounds.temperature)
    share = weights.cumsum(dim=-1)
    num_likely = (weights >= bounds.min_p.unsqueeze(-1)).sum(dim=-1)
    # Where all of the prefix is likely enough, so may be what lies beyond it.
    limit = torch.minimum(bounds.top_k, num_likely.where(num_likely < prefix, vocab_size))
    total = share.gather(-1, (limit - 1).clamp_max(prefix - 1).unsqueeze(-1)).squeeze(-1)
    if prefix < vocab_size:
        total = _with_open_totals(total, (limit == vocab_size) & (bounds.top_p < 1), logits, largest, bounds)
    below = (share < (bounds.top_p * total).unsqueeze(-1)).sum(dim=-1)
    num_kept = torch.minimum(torch.where(bounds.top_p < 1, below + 1, vocab_size), limit)
    unknown_limit = torch.where(limit < vocab_size, limit > prefix, bounds.min_p > 0)
    tokens = ids.gather(-1, _invert(share, uniform, num_kept.clamp_max(prefix)).unsqueeze(-1)).squeeze(-1)
    falls_short = unknown_limit | (num_kept > prefix)
    return tokens, falls_short if prefix < vocab_size else torch.zeros_like(falls_short)


def _with_open_totals(total: Tensor, is_open: Tensor, logits: Tensor, largest: Tensor, bounds: _Bounds) -> Tensor:
    """The totals `[N]`, all of the softmax in rows that nothing limits."""
    if logits.device.type != "cpu":
        # Adding up every row takes less time than waiting to know which are open.
        return torch.where(is_open, _weights(logits, largest, bounds.temperature).sum(dim=-1), total)
    open_rows = is_open.nonzero().squeeze(-1)
    if open_rows.numel():
        rows = slice(None) if len(open_rows) == len(logits) else open_rows
        total[rows] = _weights(logits[rows], largest[rows], bounds.temperature[rows]).sum(dim=-1)
    return total


def _weights(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """The softmax's numerators, 1 for the largest of each row's logits: fp32 `[N, V]`."""
    return (logits - largest).div_(temperature.unsqueeze(-1)).exp_()


def _invert(share: Tensor, uniform: Tensor, num_kept: Tensor) -> Tensor:
    """First position of each row whose cumulative share `[N, K]` exceeds `uniform` of the first `num_kept`."""
    last = num_kept - 1
    target = _part(uniform, share.gather(-1, last.unsqueeze(-1)).squeeze(-1))
    return torch.searchsorted(share, target.unsqueeze(-1), right=True).squeeze(-1).minimum(last)


def _part(uniform: Tensor, total: Tensor) -> Tensor:
    """`uniform * total`, and less than `total` however it is rounded: at `total`, tokens of weight 0 may be."""
    return torch.minimum(uniform * total, _just_below(total))


def _just_below(numbers: Tensor) -> Tensor:
    return torch.nextafter(numbers, torch.zeros_like(numbers))


def upload(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device; the host does not wait for the copy."""
    return send(torch.tensor(numbers, dtype=dtype), device)


def _take(tensor: Tensor, rows: list[int], index: Tensor | None = None) -> Tensor:
    """`tensor[rows]` for ascending distinct rows, without the copy where that is all of them.

    `index` has the same rows on the tensor's device.
    """
    return tensor if len(rows) == len(tensor) else tensor[rows if index is None else index]


def _columns(pairs: Sequence[tuple[int, Ints]]) -> tuple[list[int], list[Ints]]:
    return [row for row, _ in pairs], [ids for _, ids in pairs]
