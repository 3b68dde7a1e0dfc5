"""Tokens that are chosen on the device and not waited for, so that the next step can begin from them there."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lora_core.engine.sampler import PREFIXES, draw, draw_ahead, truncates, uniform_numbers, upload
from lora_core.engine.sampler_state import SamplerState
from lora_core.engine.step_buffers import send
from lora_core.messages import SamplingParams


class Landed(NamedTuple):
    """What became of one row.

    Attributes:
        token_id: The token; None where the row's logits are not all finite.
        was_wrong: Whether the device had another one, so that what was computed from it does not count.
    """

    token_id: int | None
    was_wrong: bool = False


def can_run_ahead(sampling: SamplingParams, state: SamplerState, vocab_size: int) -> bool:
    """Whether a request's next tokens can be chosen before the host knows its last one, now and later.

    Not those whose choice depends on the tokens so far, or that want log-probabilities. Nor those with a seed whose
    choice may have to be made again: their next random number would have been taken.
    """
    has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
    if state.edits_logits or sampling.constraint is not None or has_logprobs:
        return False
    is_bounded = 0 < sampling.top_k <= PREFIXES[-1] or vocab_size <= PREFIXES[-1]
    return state.generator is None or not truncates(sampling, vocab_size) or is_bounded


class AheadTokens:
    """The next token of each row of `[N, V]` fp32 logits, on their device.

    Attributes:
        inputs: int64 `[N]`, what the next step computes from; 0 where there is nothing right to choose.
    """

    @torch.inference_mode()
    def __init__(
        self,
        logits: Tensor,
        sampling: Sequence[SamplingParams],
        states: Sequence[SamplerState],
        shared: torch.Generator,
    ) -> None:
        """Choose, as `lora_core.engine.sampler.sample` does, and begin to copy the tokens to the host.

        Args:
            logits: They are read again where rows have to be drawn again, and must not change until `wait`.
            sampling: How each row chooses.
            states: What each row remembers; all are ones of which `can_run_ahead` holds.
            shared: Randomness of the rows without a seed, on the CPU.
        """
        device = logits.device
        finite = logits.sum(dim=-1).isfinite()
        tokens = logits.argmax(dim=-1)
        is_wrong = torch.zeros_like(finite)
        self._drawn = [row for row, params in enumerate(sampling) if params.temperature > 0]
        if self._drawn:
            self._sampling = [sampling[row] for row in self._drawn]
            self._uniform = uniform_numbers([states[row].generator for row in self._drawn], shared)
            rows = upload(self._drawn, torch.int64, device)
            # Rows that are not finite have no distribution to draw from.
            self._logits = torch.where(finite[rows].unsqueeze(-1), logits[rows], 0.0)
            found, wrong = draw_ahead(self._logits, self._sampling, send(self._uniform, device))
            tokens.index_copy_(0, rows, found)
            is_wrong.index_copy_(0, rows, wrong)
        self.inputs = tokens.where(finite, 0)
        outcome = torch.stack((tokens.where(finite, -1), is_wrong.long()))
        self._is_ready: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._outcome = torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=True)
            self._outcome.copy_(outcome, non_blocking=True)
            self._is_ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_ready.record()
        else:
            self._outcome = outcome.cpu()

    @torch.inference_mode()
    def wait(self) -> list[Landed]:
        """Every row's token, when the device has them; those that it had wrong are drawn again first."""
        if self._is_ready is not None:
            self._is_ready.synchronize()
        tokens, wrong = self._outcome.tolist()
        landed = [Landed(None if token < 0 else token) for token in tokens]
        again = [place for place, row in enumerate(self._drawn) if wrong[row] and tokens[row] >= 0]
        if again:
            uniform = send(self._uniform[again], self._logits.device)
            found = draw(self._logits[again], [self._sampling[place] for place in again], uniform).tolist()
            for place, token in zip(again, found, strict=True):
                row = self._drawn[place]
                landed[row] = Landed(token, was_wrong=token != tokens[row])
        return landed
