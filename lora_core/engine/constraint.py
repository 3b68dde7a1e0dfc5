"""`ConstraintState`: where one constrained answer is in its grammar, and what may come next."""

import time

import numpy as np
from llguidance import LLMatcher

from lora_core.engine.kv_cache import Ints
from lora_core.errors import describe

EDITS_OF_BYTES = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    np.float32(-np.inf),
)
"""Of each byte of a bit mask, the edits of its eight tokens."""

NO_TOKEN = "NoExtensionBias"
"""llguidance's word for a text that nothing continues."""

SLOWEST_TOKEN_S = 0.1
"""Processor time one token of a constrained answer may take; usual ones take some ten microseconds. Grammars can be
written that take a second, and the constrained answers of others wait for them. A part of it, at most a quarter of
what was measured, is spent without letting Python go on, so that everybody waits."""


class ConstraintState:
    """Follows one answer. `follow` runs on a thread of its own, everything else on the step thread.

    Args:
        matcher: llguidance's, at the start; its own from here on.
        num_tokens: In the matcher's vocabulary: as many as there are logits, or more.
        vocab_size: Of the model's logits.

    Attributes:
        edits: What the next token's logits are given, fp32 `[vocab_size]`: 0 for tokens that may come next, else -inf.
        error: Why the answer cannot go on, or None.
    """

    def __init__(self, matcher: LLMatcher, num_tokens: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros(-(-num_tokens // 32), dtype=np.int32)
        self._vocab_size = vocab_size
        self.edits = np.full(vocab_size, -np.inf, dtype=np.float32)
        self._num_allowed = 0
        self.error: str | None = None
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether `edits` speak of the next token."""
        return self._is_ready

    def leaves_only(self, token_ids: Ints) -> bool:
        """Whether no token but some of these, distinct ones, may come next."""
        return self._num_allowed == int(np.count_nonzero(self.edits[token_ids] == 0))

    def expect(self) -> None:
        """A token was chosen: `follow` will be called with it."""
        self._is_ready = False

    def follow(self, token_id: int | None) -> None:
        """Take the token that was chosen, or None at the start, and find what may come next.

        Never raises: whatever goes wrong is the answer's `error`.
        """
        try:
            self._follow(token_id)
        # A panic of the library is no Exception.
        except BaseException as error:
            self.error = f"the constraint cannot be followed any further: {_first_line(describe(error))}"
        # Last: from here on the step thread may read the rest.
        self._is_ready = True

    def _follow(self, token_id: int | None) -> None:
        started_s = time.thread_time()
        if token_id is not None:
            self._matcher.consume_token(token_id)
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        taken_s = time.thread_time() - started_s
        self.edits = EDITS_OF_BYTES[self._mask.view(np.uint8)].reshape(-1)[: self._vocab_size]
        self._num_allowed = int(np.count_nonzero(self.edits == 0))
        failure = self._matcher.get_error() if self._matcher.is_error() else ""
        if failure.startswith(NO_TOKEN) or not (failure or self._num_allowed):
            self.error = "the constraint asks for text that no token of the model's vocabulary can go on with"
        elif failure:
            self.error = f"the constraint cannot be followed any further: {_first_line(failure)}"
        elif taken_s > SLOWEST_TOKEN_S:
            self.error = (
                f"the constraint took {taken_s:.1f} s of work for one token, and may take {SLOWEST_TOKEN_S} s; make it "
                "less ambiguous"
            )


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
