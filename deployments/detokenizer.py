"""From token ids to text as they arrive: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What bytes that are no character decode to, among them the first bytes of a character still to be completed."""

MIN_CONTEXT, MAX_CONTEXT = 4, 24
"""How many of the last prompt tokens decide how the first new one is written (a leading space, say)."""

MAX_UNSETTLED = 64
"""Tokens without any text after which waiting for a character to be completed ends. A character has four bytes."""


class Detokenizer:
    """The text of one answer, token by token.

    Semantics: the pieces returned by `push` and `flush`, joined, are
    `decode(prompt + output)[len(decode(prompt)):]` with special tokens left out (unless they are kept), wherever the
    output is valid UTF-8.
    A character spread over several tokens is returned with the last of them; one that is never completed is returned
    by `flush`, as U+FFFD.

    Args:
        tokenizer: The base model's; shared, never changed.
        prompt_token_ids: The tokens before the answer, at least the last `MAX_CONTEXT` of them.
        keep_special: Write special tokens, too.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, keep_special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = not keep_special
        self._settled = list(prompt_token_ids[-MAX_CONTEXT:])
        self._unsettled: list[int] = []
        self._stream = self._new_stream()

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is now certain, often "" in the middle of a character."""
        self._unsettled.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # The one failure it has, raised as a bare Exception: new bytes changed how earlier ones are read, as a
            # broken byte does to the run of byte tokens before it. What was returned stands.
            if "prefix" not in str(error):
                raise
            return self.flush()
        if piece is None:
            return self.flush() if len(self._unsettled) >= MAX_UNSETTLED else ""
        self._settle()
        return piece

    def flush(self) -> str:
        """Return the text held back for an incomplete character. The answer may go on."""
        known = self._decode(self._settled)
        whole = self._decode(self._settled + self._unsettled)
        text = whole[len(known) :] if whole.startswith(known) else self._decode(self._unsettled)
        self._settle()
        self._stream = self._new_stream()
        return text

    def _settle(self) -> None:
        self._settled = (self._settled + self._unsettled)[-MAX_CONTEXT:]
        self._unsettled = []

    def _context(self, token_ids: list[int]) -> list[int]:
        """The shortest tail that has text and starts and ends between characters; empty where there is none."""
        for count in range(min(MIN_CONTEXT, len(token_ids)), len(token_ids) + 1):
            tail = token_ids[len(token_ids) - count :]
            text = self._decode(tail)
            if text and REPLACEMENT not in text:
                return tail
        return []

    def _new_stream(self) -> DecodeStream:
        self._settled = self._context(self._settled)
        return DecodeStream(ids=self._settled, skip_special_tokens=self._skip_special)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)
        return text


class Scan(NamedTuple):
    """What a `StopMatcher` lets through."""

    text: str
    stopped: bool


class StopMatcher:
    """Ends a text before the stop string that is completed first, however the text is cut into pieces.

    Of stop strings completed by the same character the longest counts. Text that may turn out to be the start of a
    stop string is held back until that is known, so no part of one that ends the text is ever let through.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Scan:
        """Take more text; returns what may be shown now. After `stopped` nothing more may be pushed."""
        text = self._held + text
        start = self._first_match(text)
        if start is not None:
            self._held = ""
            return Scan(text[:start], True)
        kept = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[kept:]
        return Scan(text[:kept], False)

    def flush(self) -> str:
        """The text held back, at the end of an answer that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class Written(NamedTuple):
    """What one batch of tokens added to an answer."""

    text: str
    num_tokens: int
    """Tokens of the batch that belong to the answer; those after a stop string do not."""
    stopped: bool
    """A stop string ended the answer."""


class AnswerWriter:
    """Writes one answer: detokenised, and ended before its first stop string.

    Args:
        tokenizer: The base model's; shared, never changed.
        prompt_token_ids: The tokens before the answer.
        stops: The stop strings.
        min_tokens: Stop strings are looked for in the text that comes after this many tokens.
        keep_special: Write special tokens, too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stops: Sequence[str],
        min_tokens: int = 0,
        *,
        keep_special: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, keep_special=keep_special)
        self._matcher = StopMatcher(stops)
        self._num_unstoppable = min_tokens

    def write(self, token_ids: Sequence[int], *, silent_last: bool = False, final: bool = False) -> Written:
        """Take the next tokens.

        Args:
            token_ids: As the engine sent them.
            silent_last: The last one ended the answer and is not part of its text (end of text, a stop token).
            final: No more will come: whatever was held back is written.
        """
        text = ""
        for index, token_id in enumerate(token_ids):
            if silent_last and index == len(token_ids) - 1:
                break
            piece = self._detokenizer.push(token_id)
            if self._num_unstoppable:
                self._num_unstoppable -= 1
                text += piece
                continue
            scan = self._matcher.push(piece)
            text += scan.text
            if scan.stopped:
                return Written(text, index + 1, True)
        if not final:
            return Written(text, len(token_ids), False)
        scan = self._matcher.push(self._detokenizer.flush())
        held = "" if scan.stopped else self._matcher.flush()
        return Written(text + scan.text + held, len(token_ids), scan.stopped)
