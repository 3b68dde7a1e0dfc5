"""`StreamPace`: how often a replica sends a stream's tokens, by how many streams it has."""

from collections.abc import Iterator
from contextlib import contextmanager

CHUNK_S = 0.001
"""What a chunk costs on its way from a replica to a client, in processor time, whatever it holds (measured: 0.2 to
1 ms, by Ray's settings; `tests/bench/bench_hop.py`)."""

CORE_SHARE = 0.25
"""Of a processor core that chunks may take before tokens are sent together."""

WHOLE_S = 1.0
"""Between the chunks of an answer that nobody reads before its end: they say that it goes on."""


class StreamPace:
    """A chunk costs the same whether it holds one token or ten: many streams at once send fewer, of more tokens each.

    One stream alone waits a few milliseconds, which is less than its next token takes. The first token of an answer
    never waits, nor does the last.

    Args:
        longest_s: Longest time between two chunks of a stream for the sake of the others; 0: tokens do not wait.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._num_streams = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one more stream within the block."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def window_s(self, *, is_read: bool) -> float:
        """Seconds until the next chunk of a stream.

        Args:
            is_read: Whether somebody reads the answer as it comes.
        """
        if not is_read:
            return WHOLE_S
        return min(self._longest_s, self._num_streams * CHUNK_S / CORE_SHARE)
