"""What the sampler remembers of one request between its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lora_core.engine.constraint import ConstraintState
from lora_core.engine.kv_cache import Ints
from lora_core.engine.penalties import Floats, TokenCounts
from lora_core.messages import SamplingParams, TokenLogprobs


@dataclass(eq=False, kw_only=True)
class SamplerState:
    """One request's own randomness and what its tokens so far mean for the next. None: the request does not use it.

    It belongs to the request, not to a place in a batch: a preempted request keeps it.
    """

    generator: torch.Generator | None = None
    """With a seed; on the CPU, one draw for each sampled token."""
    counts: TokenCounts | None = None
    """With penalties."""
    bias: tuple[Ints, Floats] | None = None
    """Token ids and what is added to their logits."""
    barred_ids: Ints | None = None
    """Tokens that would end the answer, while it is shorter than `min_tokens`."""
    num_barred: int = 0
    """For how many more tokens."""
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)
    """With `prompt_logprobs`: of each prompt token but the first, in order, as far as they are computed."""
    constraint: ConstraintState | None = None
    """Followed by `lora_core.engine.grammars.Grammars`; ready whenever the sampler sees it."""

    @classmethod
    def start(
        cls, sampling: SamplingParams, prompt_token_ids: Sequence[int], eos_token_ids: frozenset[int]
    ) -> "SamplerState":
        """The state before the first token."""
        repetition = sampling.repetition_penalty != 1
        ending = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        state = cls()
        if sampling.seed is not None and sampling.temperature > 0:
            state.generator = torch.Generator().manual_seed(sampling.seed)
        if repetition or sampling.presence_penalty or sampling.frequency_penalty:
            state.counts = TokenCounts(prompt_token_ids if repetition else ())
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            state.bias = np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)
        if sampling.min_tokens and ending:
            state.barred_ids = np.array(sorted(ending), dtype=np.int64)
            state.num_barred = sampling.min_tokens
        return state

    @property
    def edits_logits(self) -> bool:
        """Whether the next token is chosen from other logits than the model's."""
        return not (self.constraint is None and self.counts is None and self.bias is None and self.barred_ids is None)

    def take(self, token_id: int) -> None:
        """Note the token that was chosen."""
        if self.counts is not None:
            self.counts.add(token_id)
        if self.barred_ids is not None:
            self.num_barred -= 1
            if not self.num_barred:
                self.barred_ids = None
