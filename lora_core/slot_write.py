"""The copy of one adapter into one slot, in pieces that fit between two steps."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 20
"""Bytes written between two looks at the clock: a few tenths of a millisecond."""

Move: TypeAlias = tuple[Tensor, Tensor | None]
"""A part of a slot, and what it becomes: a tensor of the same shape, or zeros where there is none."""

Mover: TypeAlias = Callable[[Sequence[Move]], None]
"""Makes moves, in order."""


def make_moves(moves: Sequence[Move]) -> None:
    """Copy and zero, in this process."""
    destinations = [destination for destination, source in moves if source is not None]
    zeroed = [destination for destination, source in moves if source is None]
    # One call for all: it leaves the interpreter's lock to other threads as long as it copies.
    if destinations:
        sources = [source for _, source in moves if source is not None]
        torch._foreach_copy_(destinations, sources, non_blocking=True)
    if zeroed:
        torch._foreach_zero_(zeroed)


class _Chunk(NamedTuple):
    """Moves that are made together."""

    moves: list[Move]
    num_bytes: int

    def wait(self) -> None:
        """Until a device has made the moves: queued ones take no time here, and all of it in the next step."""
        device = self.moves[0][0].device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


class SlotWrite:
    """A write in progress. It belongs to the thread that runs the model, and may be abandoned at any time.

    Attributes:
        num_bytes_left: What is not written yet, in bytes of the slot.
    """

    def __init__(
        self, moves: Iterable[Move], num_bytes: int, finish: Callable[[], None], mover: Mover = make_moves
    ) -> None:
        """Write nothing yet.

        Args:
            moves: What to write; looked at as far as it is needed.
            num_bytes: How much that is.
            finish: Called once, when all of it is written.
            mover: What makes the moves.
        """
        self.num_bytes_left = num_bytes
        self._chunks = _chunks(moves)
        self._mover = mover
        self._finish: Callable[[], None] | None = finish
        self._is_abandoned = False

    def abandon(self) -> None:
        """Write no more: the slot is written anew."""
        self._is_abandoned = True

    @torch.no_grad()
    def advance(self, budget_s: float | None) -> bool:
        """Write on for about this long, by a chunk at least; None: to the end.

        A write that reaches its end with most of the budget spent is completed by the next call: a step that wrote for
        so long should not be the one that runs the adapter's first prompt, too.

        To a device the moves are made on the current stream. Without a budget they are only queued there, as far as
        the adapter's memory is pinned, and the step that is queued next finds them done.

        Returns:
            Whether the write is complete.

        Raises:
            RuntimeError: the write was abandoned.
        """
        if self._is_abandoned:
            raise RuntimeError("a slot's write was abandoned for a later one, and cannot go on")
        started = time.perf_counter()
        spent_s = 0.0
        while self.num_bytes_left:
            chunk = next(self._chunks)
            self._mover(chunk.moves)
            self.num_bytes_left -= chunk.num_bytes
            if budget_s is not None:
                chunk.wait()
                spent_s = time.perf_counter() - started
                if spent_s >= budget_s:
                    break
        if self.num_bytes_left or (budget_s is not None and spent_s > budget_s / 2):
            return False
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True


def _chunks(moves: Iterable[Move]) -> Iterator[_Chunk]:
    """Moves in runs of about `_CHUNK_BYTES`, larger ones cut."""
    together: list[Move] = []
    num_bytes = 0
    for move in moves:
        for part in (move,) if move[0].nbytes <= _CHUNK_BYTES else _cut(*move):
            together.append(part)
            num_bytes += part[0].nbytes
            if num_bytes >= _CHUNK_BYTES:
                yield _Chunk(together, num_bytes)
                together, num_bytes = [], 0
    if num_bytes:
        yield _Chunk(together, num_bytes)


def _cut(destination: Tensor, source: Tensor | None) -> Iterable[Move]:
    rows = max(1, _CHUNK_BYTES * destination.shape[0] // destination.nbytes)
    parts = torch.split(destination, rows)
    return zip(parts, [None] * len(parts) if source is None else torch.split(source, rows), strict=True)
