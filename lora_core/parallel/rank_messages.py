"""What the first rank tells the others, and what they answer; msgpack over a `Link`."""

import msgspec


class Connect(msgspec.Struct, frozen=True, array_like=True, tag="connect"):
    """To a rank that has said `Started`: all have; connect to each other, and load. Answered by `Ready` or `Failed`."""


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """One sequence of a step."""

    number: int
    """Its own among the sequences that have blocks."""
    q_len: int
    kv_len: int
    num_kept: int
    """Blocks of its table, from the first, that are as they were last told."""
    blocks: list[int]
    """The rest of its table."""


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Compute a step; see `StepInput`."""

    sequences: list[SequenceStep]
    token_ids: list[int]
    logit_rows: list[int]
    slots: list[int | None]
    slot_ranks: list[int]
    ended: list[int]
    """Numbers of sequences that have no blocks any more."""


class TensorMove(msgspec.Struct, frozen=True, array_like=True):
    """A part of a slot tensor, and what it becomes: the next bytes behind the message, or zeros."""

    tensor: int
    """Which slot tensor, in the order they are bound."""
    offset: int
    """First element of the part in the tensor's memory."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str | None
    """Of the bytes, as torch names it; None: zeros."""


class WriteSlot(msgspec.Struct, frozen=True, array_like=True, tag="write"):
    """Write to slot tensors."""

    moves: list[TensorMove]


class MarkLive(msgspec.Struct, frozen=True, array_like=True, tag="live"):
    """A slot's adapter changes these sites' outputs, and no others; by index."""

    slot: int
    sites: list[int]
    gain_sites: list[int]
    """Those of them whose output it scales."""


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Call a method of the rank's runner that takes nothing and returns nothing. Answered by `Done` or `Failed`."""

    method: str


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """A rank's process has begun."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """A rank has its share of the model, and waits for steps."""

    num_blocks: int
    """KV blocks it has room for."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """A call has returned."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A rank cannot go on, and ends."""

    kind: str
    """The exception's class name."""
    reason: str


RankMessage = Connect | RunStep | WriteSlot | MarkLive | Call | Started | Ready | Done | Failed
