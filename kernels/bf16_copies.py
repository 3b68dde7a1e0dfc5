"""bf16 copies of adapters' weights on the CPU, kept from step to step for products in bf16."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, TypeAlias
from weakref import ReferenceType, ref

import torch
from torch import Tensor

MAX_BLOCK_WEIGHTS = 28_000
"""Rank times output width up to which the B of several projections is stored as one matrix, with zeros."""

_NARROW = 16
"""Columns of A up to which they are stored one by one."""

_Key: TypeAlias = tuple[int, int, tuple[int, ...]]


class Bf16Weights(NamedTuple):
    """One slot's weights of true rank r, rounded to bf16; not to be changed.

    Attributes:
        rank: r.
        a: `[K, S*r]`, A of all projections side by side, transposed.
        b: For each projection `[r, columns]`, its B transposed.
        block: `[S*r, OUT]`, zero but for its diagonal blocks, which are `b`; None of one projection, and of large B.
        num_bytes: Size of a and b, or of a and block.
    """

    rank: int
    a: Tensor
    b: tuple[Tensor, ...]
    block: Tensor | None
    num_bytes: int

    @classmethod
    def converted(
        cls, a_stack: Tensor, b_stack: Tensor, slot: int, rank: int, slices: tuple[int, ...]
    ) -> "Bf16Weights":
        """As `of`, for a single use: rounded but not put in order, which takes half the time."""
        live = a_stack[slot].view(len(slices), -1, a_stack.shape[2])[:, :rank].bfloat16()
        matrix = b_stack[slot, :, :rank].bfloat16().t()
        b = tuple(matrix.split_with_sizes(slices, 1))
        return cls(rank, live.flatten(0, 1).t(), b, None, live.nbytes + matrix.nbytes)

    @classmethod
    def of(cls, a_stack: Tensor, b_stack: Tensor, slot: int, rank: int, slices: tuple[int, ...]) -> "Bf16Weights":
        """Copy one slot.

        Args:
            a_stack: fp32 `[N, S*R, K]`, contiguous.
            b_stack: fp32 `[N, OUT, R]`.
            slot: Which of the N.
            rank: True rank of the slot, 1 to R.
            slices: Output widths of the S projections; they add up to OUT.
        """
        projections, width, out = len(slices), a_stack.shape[2], b_stack.shape[1]
        live = a_stack[slot].view(projections, -1, width)[:, :rank].reshape(projections * rank, width)
        # As the stack lies where the product is narrow, else as the product reads it: 3 to 5 percent faster each.
        a = live.bfloat16().t()
        if live.shape[0] > _NARROW:
            a = a.contiguous()
        has_block = projections > 1 and rank * out <= MAX_BLOCK_WEIGHTS
        matrix = a.new_zeros((projections * rank, out)) if has_block else a.new_empty((rank, out))
        rows = matrix.chunk(projections) if has_block else (matrix,) * projections
        b = tuple(part.split_with_sizes(slices, 1)[index] for index, part in enumerate(rows))
        # Rounded before it is turned, each of which torch does fast; not so both at once.
        turned = b_stack[slot, :, :rank].bfloat16().t()
        for part, live_columns in zip(b, turned.split_with_sizes(slices, 1), strict=True):
            part.copy_(live_columns)
        return cls(rank, a, b, matrix if has_block else None, a.nbytes + matrix.nbytes)


class SlotCopies:
    """The copies of a pair of stacks that were made since the stacks were last written to.

    Attributes:
        slots: By slot, for those that have one.
    """

    def __init__(self) -> None:
        self.slots: dict[int, Bf16Weights] = {}
        self._asked: set[tuple[int, int]] = set()

    def find(self, slot: int, rank: int) -> Bf16Weights | None:
        """The copy of a slot of this true rank, if there is one."""
        weights = self.slots.get(slot)
        return weights if weights is not None and weights.rank == rank else None

    def is_first_use(self, slot: int, rank: int) -> bool:
        """Whether nobody has asked this before."""
        is_first = (slot, rank) not in self._asked
        self._asked.add((slot, rank))
        return is_first

    @property
    def num_bytes(self) -> int:
        """Size of all of them."""
        return sum(weights.num_bytes for weights in self.slots.values())


class _Pair(NamedTuple):
    """Copies, and the stacks they are of in the state before any was made."""

    copies: SlotCopies
    a_stack: "ReferenceType[Tensor]"
    b_stack: "ReferenceType[Tensor]"
    state: tuple[int, ...]


class Bf16Copies:
    """Copies of slots that were asked for more than once; where they are too many, the least recently used stacks' go.

    Copies are used as long as their stacks are the same tensors at the same address and of the same version: torch
    raises the version that a tensor shares with all views of its memory after every write through any of them, in
    whichever thread or mode. Writes that go around torch's operators, or through `tensor.data`, would not be noticed.
    Tensors created in inference mode have no version, and no copies of them are kept. Copies go when their stacks do.

    Any thread may ask at any time. What is found of a slot that is being written is unspecified, as its weights are;
    what `of` returns after the write has what was written.
    """

    def __init__(self, max_bytes: int) -> None:
        """Keep nothing yet, and never more than so many bytes."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Size of all copies that are kept."""
        self._pairs: OrderedDict[_Key, _Pair] = OrderedDict()
        # Reentrant: the thread that holds it may free a stack meanwhile.
        self._lock = threading.RLock()

    def of(self, a_stack: Tensor, b_stack: Tensor, slices: tuple[int, ...]) -> SlotCopies:
        """The copies of slots of these stacks as they are now, to be used in one operation.

        Args:
            a_stack: fp32 `[N, S*R, K]`, contiguous.
            b_stack: fp32 `[N, OUT, R]`.
            slices: Output widths of the S projections; they add up to OUT.
        """
        if a_stack.is_inference() or b_stack.is_inference():
            return SlotCopies()
        key = id(a_stack), id(b_stack), slices
        # Looked at before any weight is: a write that ends later makes the copies old ones.
        state = a_stack._version, b_stack._version, a_stack.data_ptr(), b_stack.data_ptr()
        with self._lock:
            pair = self._pairs.get(key)
            if pair is not None and pair.state == state and pair.a_stack() is a_stack and pair.b_stack() is b_stack:
                self._pairs.move_to_end(key)
                return pair.copies
            self._drop(key)
            drop, copies = self._dropper(key), SlotCopies()
            self._pairs[key] = _Pair(copies, ref(a_stack, drop), ref(b_stack, drop), state)
            return copies

    def weights(
        self, copies: SlotCopies, a_stack: Tensor, b_stack: Tensor, slot: int, rank: int, slices: tuple[int, ...]
    ) -> Bf16Weights:
        """One slot's weights of its true rank, 1 to R, by what `of` returned for these stacks.

        Of a slot that is asked for the first time none are kept: while an adapter is written, step by step, all copies
        of the stacks grow old at every step, and making them anew would cost more than it saves.
        """
        found = copies.find(slot, rank)
        if found is not None:
            return found
        if copies.is_first_use(slot, rank):
            return Bf16Weights.converted(a_stack, b_stack, slot, rank, slices)
        return self.add(copies, a_stack, b_stack, slot, rank, slices)

    def add(
        self, copies: SlotCopies, a_stack: Tensor, b_stack: Tensor, slot: int, rank: int, slices: tuple[int, ...]
    ) -> Bf16Weights:
        """Copy one slot of its true rank, 1 to R, to what `of` returned for these stacks."""
        # Of use in every mode, whichever they are made in.
        with torch.inference_mode(False), torch.no_grad():
            weights = Bf16Weights.of(a_stack, b_stack, slot, rank, slices)
        key = id(a_stack), id(b_stack), slices
        with self._lock:
            pair = self._pairs.get(key)
            if pair is not None and pair.copies is copies:
                self.num_bytes -= copies.num_bytes
                copies.slots[slot] = weights
                self.num_bytes += copies.num_bytes
                while self.num_bytes > self.max_bytes:
                    self._drop(next(iter(self._pairs)))
        return weights

    def _drop(self, key: _Key) -> None:
        with self._lock:
            if (pair := self._pairs.pop(key, None)) is not None:
                self.num_bytes -= pair.copies.num_bytes

    def _dropper(self, key: _Key) -> Callable[[object], None]:
        """What to call when a stack is gone; it does not keep these copies."""
        owner = ref(self)

        def drop(_: object) -> None:
            if (copies := owner()) is not None:
                copies._drop(key)

        return drop
